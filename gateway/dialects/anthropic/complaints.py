"""The wire's words for a body that its type refuses: those of pydantic.

Paths in errors are dotted, `messages.0.content.1.text: why`: a content block's type follows its
position.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

import msgspec

from gateway.dialects.anthropic.request import SUPPORTED_BLOCKS, AnthropicTtl
from gateway.dialects.bodies import split_complaint


def _any_of(names: Sequence[str]) -> str:
    """The names as pydantic lists them: `'a', 'b' or 'c'`."""
    *others, last = [f"'{name}'" for name in names]
    return f"{', '.join(others)} or {last}" if others else last


_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[]+)")
_FIELD = re.compile(r"^Object (missing required|contains unknown) field `(.*)`$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected `([^`]*)`(?: (>=|<=|>|<) (\S+)|.*of length (<=|>=) (\d+))?")
_LIMITS = {
    ">=": "greater than or equal to",
    "<=": "less than or equal to",
    ">": "greater than",
    "<": "less than",
}
_KINDS = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "array": "list",
    "object": "object",
    "null": "null",
}
_CHOICES = {
    "ttl": _any_of(get_args(AnthropicTtl)),
    "role": _any_of(["user", "assistant", "system"]),
    "service_tier": _any_of(["auto", "standard_only"]),
    "speed": _any_of(["standard", "fast"]),
    "media_type": _any_of(["text/plain"]),
}
_TAGS = {
    "cache_control": ("ephemeral",),
    "tool_choice": ("auto", "any", "tool", "none"),
    "thinking": ("enabled", "adaptive", "disabled", "between_tools"),
    "source": ("base64", "text", "content", "url", "file"),
    "format": ("json_schema",),
    "thread": ("create", "continue"),
}
_MAX_SHOWN = 64
_Steps = list[str | int]


def explained(complaint: str, body: bytes) -> str:
    """The wire's words for msgspec's complaint about the body: the field's path, and what is
    wrong."""
    what, where = split_complaint(complaint)
    steps: _Steps = [
        int(index) if index.isdigit() else index or name for index, name in _STEP.findall(where)
    ]
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        document = None
    path = partial(path_of, document)
    field = _FIELD.match(what)
    if field:
        is_missing = field[1] == "missing required"
        name = field[2]
        is_tagged = bool(steps) and (isinstance(steps[-1], int) or steps[-1] in _TAGS)
        if name == "type" and is_missing and is_tagged:
            return f"{path(steps)}: Unable to extract tag using discriminator 'type'"
        reason = "Field required" if is_missing else "Extra inputs are not permitted"
        return f"{path([*steps, name[:_MAX_SHOWN]])}: {reason}"
    if steps and steps[-1] == "type" and what.startswith("Invalid"):
        steps = steps[:-1]
        tag = _at(document, [*steps, "type"])
        parent = next((step for step in reversed(steps) if isinstance(step, str)), "")
        names = ", ".join(f"'{name}'" for name in _TAGS.get(parent, SUPPORTED_BLOCKS))
        if isinstance(tag, str):
            tag_text = tag[:_MAX_SHOWN]
        else:
            tag_text = "…" if tag is None else tag
        return (
            f"{path(steps, shows_last=False)}: Input tag '{tag_text}' found using 'type' does not"
            f" match any of the expected tags: {names}"
        )
    reason = _reason(what, str(steps[-1]) if steps else "")
    return f"{path(steps)}: {reason}" if steps else reason


def _reason(what: str, field: str) -> str:
    if field in _CHOICES and what.startswith(("Invalid enum value", "Expected `str")):
        return f"Input should be {_CHOICES[field]}"
    expected = _EXPECTED.match(what)
    if expected is None:
        return "Input is not valid" if field else "The request body is not valid"
    if expected[2]:
        return f"Input should be {_LIMITS[expected[2]]} {expected[3]}"
    if expected[4]:
        most = "at most" if expected[4] == "<=" else "at least"
        return f"List should have {most} {expected[5]} items"
    kinds = [_KINDS.get(kind, kind) for kind in expected[1].split(" | ")]
    return f"Input should be a valid {' or '.join(kind for kind in kinds if kind != 'null')}"


def path_of(document: Any, steps: _Steps, *, shows_last: bool = True) -> str:
    """Write a path, with each content block's type after its position in `content`."""
    names: list[str] = []
    for depth, step in enumerate(steps):
        names.append(str(step))
        is_last = depth == len(steps) - 1
        if is_last and not shows_last:
            break
        if isinstance(step, int) and depth and steps[depth - 1] == "content":
            kind = _at(document, [*steps[: depth + 1], "type"])
            if isinstance(kind, str) and kind in SUPPORTED_BLOCKS:
                names.append(kind)
        elif step == "cache_control" and not is_last:
            names.append("ephemeral")
    return ".".join(names)


def _at(value: Any, steps: _Steps) -> Any:
    """The text, number, true or false at a path; None where it has none."""
    for step in steps:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value if isinstance(value, str | int | float) else None
