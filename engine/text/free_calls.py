"""Calls among free text: the grammar begins where the model begins a call.

The text before, between and behind calls is any text in which no call begins. So every call is one
of the grammar's, and each strict tool is called by its schema. This needs a format whose calls
begin with a marker that ordinary text does not contain; the renderer tells whether the model's is
one.
"""

import json
import re
from collections.abc import Iterable, Sequence

from engine.protocol import GenerateRequest

_ANY = "/(.|\\n)*/"


def is_free(request: GenerateRequest) -> bool:
    """Whether the model may call or not, and a call of some tool must keep to its schema."""
    if request.tool_choice.mode != "auto" or request.output_schema is not None:
        return False
    return any(tool.strict for tool in request.prompt.callable_tools)


def find_starts(starts: Sequence[str], written: str) -> tuple[str, ...]:
    """The texts that calls begin with, the written one first.

    Nothing where a written call begins with none of them, or where one of them is so short or so
    plain that ordinary text has it.
    """
    first = next((start for start in starts if written.startswith(start)), None)
    if first is None or any(len(start) < 3 or start[0].isalnum() for start in starts):
        return ()
    return (first, *(start for start in starts if start != first))


def free_rules(starts: Sequence[str], pieces: Sequence[str], *, parallel: bool) -> list[str]:
    """The rule `free`, over the rule `calls`; `pieces` are the first start as Lark.

    Where the start begins with a control token, so does `calls`. Else its beginning stands in
    `head`, and `calls` goes on behind that (`behind_head`).
    """
    times = "*" if parallel else "?"
    text = f"TEXT: {_without(starts)}"
    if is_control(pieces[0]):
        return [f"free: TEXT (calls TEXT){times}", text]
    free = f"free: (head calls){times} TEXT"
    if len(pieces) > 1:
        before = _escaped(json.loads(pieces[0]))
        return [free, f"head: BEFORE {pieces[1]}", f"BEFORE: /(.|\\n)*{before}/", text]
    head = f"/(.|\\n)*{_escaped(starts[0])}/"
    if starts[1:]:
        head += f" & ~/(.|\\n)*({_any_of(starts[1:])})(.|\\n)*/"
    return [free, f"head[lazy]: {head}", text]


def is_control(piece: str) -> bool:
    return piece.startswith("<[")


def behind_head(rule: str, pieces: Sequence[str]) -> str:
    """A rule's Lark without what `head` has of it."""
    if len(pieces) > 1:
        return rule.removeprefix(" ".join(pieces[:2])).lstrip()
    literal, end = json.JSONDecoder().raw_decode(rule)
    rest = str(literal).removeprefix(json.loads(pieces[0]))
    return f"{json.dumps(rest, ensure_ascii=False) if rest else ''}{rule[end:]}"


def _without(starts: Iterable[str]) -> str:
    return f"{_ANY} & ~/(.|\\n)*({_any_of(starts)})(.|\\n)*/"


def _any_of(starts: Iterable[str]) -> str:
    return "|".join(map(_escaped, starts))


def _escaped(text: str) -> str:
    return re.sub(r"([\\.^$*+?()\[\]{}|/#&~-])", r"\\\1", text)
