"""A format of calls that is in no table, derived from the calls that a chat template writes.

A template renders known inputs, alone and two together. What stands before, between and behind what
was put in is the markup. What is derived is no more than a guess until `engine.text.formats.proof`
has read back with it what the template writes.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from engine.text.formats.arguments import ALL_TYPES, TagSyntax
from engine.text.formats.table import CallFormat, format_of, object_begin
from engine.text.template.messages import Written

Show = Callable[[Sequence[dict[str, Any]]], str | None]
"""The turn that a template writes for calls with these inputs, from its first character on."""

_KEYS, _VALUES = ("first_key", "other_key"), ("first value", "other value")
_ONE, _TWO = dict(zip(_KEYS, _VALUES, strict=True)), {"first_key": "third value"}
_OTHER_VALUES: dict[str, Any] = {
    "integer": 3, "number": 1.5, "boolean": True, "null": None, "array": ["x"], "object": {"k": "z"}
}  # fmt: skip
_MIN_MARKER = 3
_Atoms = list[str]
"""Pieces of markup that are not cut: control tokens, characters, and the places of a name and of
digits."""


@dataclass(frozen=True, slots=True)
class Derivation:
    """Derives a format from what `show` renders. `name` is the tool's in every call.

    `ends` are the texts that end a turn.
    """

    show: Show
    name: str
    controls: "re.Pattern[str] | None"
    ends: Collection[str]

    def derive(self) -> CallFormat | None:
        """None where calls are written in a way that has no such form."""
        one, two = self.show([_ONE]), self.show([_ONE, _TWO])
        if one is None or self.name not in one:
            return None
        # A call that begins with what ends a turn can't be told from the turn's end.
        if any(end in one.partition(self.name)[0] for end in self.ends):
            return None
        return self._json_calls(one, two) or self._tagged_calls(one, two)

    def _json_calls(self, one: str, two: str | None) -> CallFormat | None:
        """Calls whose input stands in them as JSON."""
        at = _find_json(one, _ONE)
        if at is None:
            return None
        first = None if two is None else _find_json(two, _ONE)
        second = None if two is None or first is None else _find_json(two, _TWO, first[1])
        middle: _Atoms | None = None
        if two is not None and first is not None and second is not None:
            middle = self._atoms(two[first[1] : second[0]])
        written = _written(self._atoms(one[: at[0]]), self._behind(one[at[1] :]), middle)
        if written is None:
            return None
        head, _, tail = written.call.partition("{input}")
        if '"name"' in head and object_begin(head, tail) is None:
            return None
        return _usable(format_of(written, is_opened=bool(written.begin)))

    def _tagged_calls(self, one: str, two: str | None) -> CallFormat | None:
        """Calls whose arguments stand in them one by one, each between tags."""
        pieces = re.split("|".join(map(re.escape, (*_KEYS, *_VALUES))), one)
        keys = _KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1]
        if len(pieces) != 5 or re.findall("|".join(map(re.escape, keys)), one) != list(keys):
            return None
        shown, assign, gap, again, rest = pieces
        between, before = self._atoms(gap), self._atoms(shown)
        num_open = _num_alike(before[::-1], between[::-1])
        opened = between[len(between) - num_open :]
        closed = "".join(between[: len(between) - num_open])
        close = closed.rstrip()
        kinds = self._kinds(assign, close)
        if assign != again or not num_open or not close or not rest.startswith(close):
            return None
        if kinds is None:
            return None
        middle: _Atoms | None = None
        begin = one[: len(one) - len(rest)] + close
        if two is not None and two.startswith(begin):
            # What stands between two calls' arguments.
            third = _KEYS[0] + assign + _TWO[_KEYS[0]]
            at = two.find(_KEYS[0], len(begin))
            if two.startswith(third, at):
                middle = self._atoms(two[len(begin) : at])[:-num_open]
        behind = self._behind(rest[len(close) :])
        written = _written(before[: len(before) - num_open], behind, middle, closed[len(close) :])
        if written is None or not written.call.partition("{input}")[2].strip():
            return None
        has_lines = assign.endswith("\n") and close.startswith("\n")
        if has_lines:
            assign, close = assign[:-1], close[1:]
        if kinds:
            head, _, tail = assign.rpartition(kinds["string"])
            assign = f"{head}{{kind}}{tail}"
        tags = TagSyntax(
            open="".join(opened) + "{key}" + assign,
            close=close,
            has_lines=has_lines,
            kinds=kinds,
            has_cdata=self._has_cdata(),
        )
        return _usable(format_of(written, arguments=tags, is_opened=bool(written.begin)))

    def _kinds(self, assign: str, close: str) -> Mapping[str, str] | None:
        """The word that tells an argument's type, by JSON type; empty where there is none."""
        kinds: dict[str, str] = {}
        for kind, value in _OTHER_VALUES.items():
            shown = self.show([{_KEYS[0]: value, _KEYS[1]: _VALUES[1]}])
            if shown is None or _KEYS[0] not in shown:
                return None
            behind = shown.partition(_KEYS[0])[2]
            if not behind.startswith(assign):
                words = _other_word(assign, behind)
                if words is None:
                    return None
                kinds["string"], kinds[kind] = words
        return kinds if not kinds or set(kinds) == ALL_TYPES else None

    def _has_cdata(self) -> bool:
        """Does the template write a string with markup as XML's character data?"""
        shown = self.show([{_KEYS[0]: "<x>&\n", _KEYS[1]: _VALUES[1]}])
        return shown is not None and "<![CDATA[<x>&\n]]>" in shown

    def _behind(self, text: str) -> _Atoms:
        """Up to where the turn ends, or behind its last control token where nothing else tells."""
        ends = [at for end in self.ends if (at := text.find(end)) >= 0]
        if not ends and self.controls is not None:
            ends = [found.end() for found in self.controls.finditer(text)][-1:]
        return self._atoms(text[: min(ends)] if ends else text)

    def _atoms(self, text: str) -> _Atoms:
        control = "" if self.controls is None else f"(?:{self.controls.pattern})|"
        atom = re.compile(rf"{control}(?P<name>{re.escape(self.name)})|(?P<digits>\d+)|(?s:.)")
        return [
            f"{{{found.lastgroup}}}" if found.lastgroup else found.group()
            for found in atom.finditer(text)
        ]


def _written(
    before: _Atoms, behind: _Atoms, middle: _Atoms | None, gap: str = ""
) -> Written | None:
    """None where no call's head has the name. `middle` is what stands between two calls' inputs.

    `gap` is the white space behind an argument, which belongs to the input.
    """
    num_head, num_tail, rest = len(before), len(behind), _Atoms()
    if middle is not None:
        num_head = _num_alike(before[::-1], middle[::-1])
        rest = middle[: len(middle) - num_head]
        num_tail = _num_alike(behind, rest)
    head = before[len(before) - num_head :]
    if head.count("{name}") != 1:
        return None
    return Written(
        begin="".join(before[: len(before) - num_head]),
        call="".join(head) + "{input}" + "".join(behind[:num_tail]).removeprefix(gap),
        separator="".join(rest[num_tail:]),
        end="".join(behind[num_tail:]),
    )


def _find_json(text: str, value: Mapping[str, Any], begin: int = 0) -> tuple[int, int] | None:
    """Where in a text a value stands as JSON."""
    for found in re.compile(r"\{").finditer(text, begin):
        try:
            read, end = json.JSONDecoder().raw_decode(text, found.start())
        except ValueError:
            continue
        if read == value:
            return found.start(), end
    return None


def _other_word(assign: str, behind: str) -> tuple[str, str] | None:
    """The word of `assign` that is another one in `behind`, and that one."""
    at = _num_alike(assign, behind)
    at -= len(assign[:at]) - len(assign[:at].rstrip("abcdefghijklmnopqrstuvwxyz"))
    words = [re.compile("[a-z]+").match(text, at) for text in (assign, behind)]
    if words[0] is None or words[1] is None:
        return None
    rest = assign[words[0].end() :]
    if not behind.startswith(rest, words[1].end()):
        return None
    return words[0].group(), words[1].group()


def _usable(of: CallFormat) -> CallFormat | None:
    """None where nothing tells a call from text that looks like one, or from another call."""
    if not of.starts or any(len(s) < _MIN_MARKER or s[0].isalnum() for s in of.starts):
        return None
    return None if re.sub(r"[\s,;]", "", of.written[0].separator) else of


def _num_alike(one: Sequence[str], other: Sequence[str]) -> int:
    """How many first elements are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
