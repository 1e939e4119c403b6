"""A format of calls that is in no table, derived from the calls that a chat template writes.

A template renders known inputs, alone and two together. What stands before, between and behind what
was put in is the markup. What is derived is no more than a guess until `engine.text.formats.proof`
has read back with it what the template writes.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.text.formats.argument_types import ALL_TYPES
from engine.text.formats.call_format import LIST, CallFormat, Written, of_syntax
from engine.text.formats.patterns import NAME, SPACE, Element, Pattern, Space, Word
from engine.text.formats.syntax_calls import CallSyntax
from engine.text.formats.tagged_input import TagSyntax

Show = Callable[[Sequence[dict[str, Any]]], str | None]
"""The turn that a template writes for calls with these inputs, from its first character on."""

_KEYS, _VALUES = ("first_key", "other_key"), ("first value", "other value")
_ONE, _TWO = dict(zip(_KEYS, _VALUES, strict=True)), {"first_key": "third value"}
_KEY = Word("key", r'[^"<>]')
_OTHER_VALUES: dict[str, Any] = {
    "integer": 3, "number": 1.5, "boolean": True, "null": None, "array": ["x"], "object": {"k": "z"}
}  # fmt: skip
_MIN_MARKER = 3


class _Atom(NamedTuple):
    """A piece of markup that is not cut: `shape` is what equals, `text` what was written."""

    shape: str
    text: str


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
        before, behind = self._atoms(one[: at[0]]), self._atoms(self._cut(one[at[1] :]))
        first = None if two is None else _find_json(two, _ONE)
        second = None if two is None or first is None else _find_json(two, _TWO, first[1])
        middle: list[_Atom] | None = None
        if two is not None and first is not None and second is not None:
            middle = self._atoms(two[first[1] : second[0]])
        parts = _parts(before, behind, middle)
        if parts is None:
            return None
        written = parts.written()
        head = _text(parts.head)
        begin = _object_begin(head, _text(parts.tail))
        if begin is None and '"name"' in head:
            return None
        if begin is None:
            syntax = CallSyntax(
                opens=_pattern(parts.opens),
                head=_pattern(parts.head),
                tail=_pattern(parts.tail),
                separator=_separator(parts.separator),
                closes=_pattern(parts.closes),
                is_opened=bool(parts.opens),
            )
        else:
            # A call that is one object of JSON is read as such, whatever the order of its keys.
            tail = _text(parts.tail)
            behind_object = self._atoms(tail[tail.index("}") + 1 :])
            syntax = CallSyntax(
                opens=_pattern(parts.opens),
                head=_pattern(self._atoms(head[:begin])),
                tail=_pattern(behind_object),
                separator=_separator(parts.separator),
                closes=_pattern(parts.closes),
                is_opened=bool(parts.opens),
            )
        return _usable(syntax, written)

    def _tagged_calls(self, one: str, two: str | None) -> CallFormat | None:
        """Calls whose arguments stand in them one by one, each between tags."""
        found = _Arguments.find(one)
        if found is None:
            return None
        between, before = self._atoms(found.between), self._atoms(found.before)
        num_open = _num_alike(before[::-1], between[::-1])
        opened, closed = between[len(between) - num_open :], between[: len(between) - num_open]
        close = _text(closed).rstrip()
        if not num_open or not close.strip() or not found.behind.startswith(close):
            return None
        gap = _text(closed)[len(close) :]
        kinds = self._kinds(found.assign, close)
        if kinds is None:
            return None
        behind = self._atoms(self._cut(found.behind[len(close) :]))
        parts = _parts(before[: len(before) - num_open], behind, self._middle(found, two, num_open,
                                                                             close))  # fmt: skip
        if parts is None or not _text(parts.tail).strip():
            return None
        has_lines = found.assign.endswith("\n") and close.startswith("\n")
        assign = found.assign[:-1] if has_lines else found.assign
        tags = TagSyntax(
            open=(*_pattern(opened), _KEY, *_assigned(assign, kinds)),
            close=close[1:] if has_lines else close,
            end=_text(parts.tail).strip(),
            others=tuple(filter(None, [_text(parts.closes).strip()])),
            has_lines=has_lines,
            kinds=kinds,
            has_cdata=self._has_cdata(),
            written=_text(opened) + "{key}" + _with_kind(assign, kinds),
        )
        written = parts.written(gap)
        syntax = CallSyntax(
            opens=_pattern(parts.opens),
            head=_pattern(parts.head),
            separator=_separator(parts.separator),
            closes=_pattern(parts.closes),
            arguments=tags,
            is_opened=bool(parts.opens),
        )
        return _usable(syntax, written)

    def _middle(
        self, found: "_Arguments", two: str | None, num_open: int, close: str
    ) -> list[_Atom] | None:
        """What stands between two calls' arguments."""
        begin = found.before + _KEYS[0] + found.assign + _VALUES[0] + found.between
        begin += _KEYS[1] + found.assign + _VALUES[1] + close
        if two is None or not two.startswith(begin):
            return None
        at = two.find(_KEYS[0], len(begin))
        if at < 0 or not two.startswith(_KEYS[0] + found.assign + _TWO[_KEYS[0]], at):
            return None
        middle = self._atoms(two[len(begin) : at])
        return middle[: len(middle) - num_open]

    def _kinds(self, assign: str, close: str) -> Mapping[str, str] | None:
        """The word that tells an argument's type, by JSON type; empty where there is none."""
        kinds: dict[str, str] = {}
        for kind, value in _OTHER_VALUES.items():
            shown = self.show([{_KEYS[0]: value, _KEYS[1]: _VALUES[1]}])
            at = -1 if shown is None else shown.find(_KEYS[0])
            if shown is None or at < 0:
                return None
            behind = shown[at + len(_KEYS[0]) :]
            if not behind.startswith(assign):
                word = _other_word(assign, behind)
                if word is None:
                    return None
                kinds["string"], kinds[kind] = word
        return kinds if not kinds or set(kinds) == ALL_TYPES else None

    def _has_cdata(self) -> bool:
        """Does the template write a string with markup as XML's character data?"""
        shown = self.show([{_KEYS[0]: "<x>&\n", _KEYS[1]: _VALUES[1]}])
        return shown is not None and "<![CDATA[<x>&\n]]>" in shown

    def _cut(self, text: str) -> str:
        """Up to where the turn ends, or behind its last control token where nothing else tells."""
        ends = [at for end in self.ends if (at := text.find(end)) >= 0]
        if not ends and self.controls is not None:
            ends = [found.end() for found in self.controls.finditer(text)][-1:]
        return text[: min(ends)] if ends else text

    def _atoms(self, text: str) -> list[_Atom]:
        control = "" if self.controls is None else f"(?:{self.controls.pattern})|"
        atom = re.compile(rf"{control}(?P<name>{re.escape(self.name)})|(?P<digits>\d+)|(?s:.)")
        found: list[_Atom] = []
        for one in atom.finditer(text):
            kind = "name" if one["name"] else "digits" if one["digits"] else ""
            found.append(_Atom(f"\0{kind}" if kind else one.group(), one.group()))
        return found


@dataclass(frozen=True, slots=True)
class _Parts:
    """The markup of a turn's calls."""

    opens: Sequence[_Atom]
    head: Sequence[_Atom]
    tail: Sequence[_Atom]
    separator: Sequence[_Atom]
    closes: Sequence[_Atom]

    def written(self, gap: str = "") -> Written:
        """`gap` is the white space behind an argument, which belongs to the input."""
        places = {"\0name": "{name}", "\0digits": "{digits}"}

        def text(atoms: Sequence[_Atom]) -> str:
            return "".join(places.get(atom.shape, atom.text) for atom in atoms)

        return Written(
            begin=text(self.opens),
            call=text(self.head) + "{input}" + text(self.tail).removeprefix(gap),
            separator=text(self.separator),
            end=text(self.closes),
        )


def _parts(
    before: Sequence[_Atom], behind: Sequence[_Atom], middle: Sequence[_Atom] | None
) -> _Parts | None:
    """None where no call's head has the name. `middle` is what stands between two calls' inputs."""
    if middle is None:
        return _Parts((), before, behind, (), ()) if _has_name(before) else None
    num_head = _num_alike(before[::-1], middle[::-1])
    head = before[len(before) - num_head :]
    if not _has_name(head):
        return None
    rest = middle[: len(middle) - num_head]
    num_tail = _num_alike(behind, rest)
    return _Parts(
        before[: len(before) - num_head], head, behind[:num_tail], rest[num_tail:],
        behind[num_tail:],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Arguments:
    """A rendered call around its two arguments; `assign` is between a key and its value."""

    before: str
    assign: str
    between: str
    behind: str

    @classmethod
    def find(cls, shown: str) -> "_Arguments | None":
        pieces: list[str] = []
        rest = shown
        for text in (_KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1]):
            piece, found, rest = rest.partition(text)
            if not found:
                return None
            pieces.append(piece)
        before, assign, between, again = pieces
        known = any(text in rest for text in (*_KEYS, *_VALUES))
        return cls(before, assign, between, rest) if assign == again and not known else None


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


def _object_begin(head: str, tail: str) -> int | None:
    """Where in the head the object of JSON begins that the whole call is."""
    for at in (found.start() for found in re.finditer(r"\{", head)):
        try:
            read, _ = json.JSONDecoder().raw_decode(head[at:] + '{"":0}' + tail)
        except ValueError:
            continue
        if isinstance(read, dict) and len(read) > 1:
            return at
    return None


def _other_word(assign: str, behind: str) -> tuple[str, str] | None:
    """The word of `assign` that is another one in `behind`, and that one."""
    pairs = zip(assign, behind, strict=False)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), 0)
    at -= len(assign[:at]) - len(assign[:at].rstrip("abcdefghijklmnopqrstuvwxyz"))
    words = [re.compile("[a-z]+").match(text, at) for text in (assign, behind)]
    if words[0] is None or words[1] is None:
        return None
    rest = assign[words[0].end() :]
    if not behind.startswith(rest, words[1].end()):
        return None
    return words[0].group(), words[1].group()


def _with_kind(assign: str, kinds: Mapping[str, str]) -> str:
    """What stands between key and value, with a place for the type's word."""
    if not kinds:
        return assign
    before, _, behind = assign.rpartition(kinds["string"])
    return f"{before}{{kind}}{behind}"


def _assigned(assign: str, kinds: Mapping[str, str]) -> Pattern:
    """What stands between key and value; the type's word is captured."""
    if not kinds:
        return _literal(assign)
    before, _, behind = _with_kind(assign, kinds).partition("{kind}")
    return (*_literal(before), Word("kind", "[a-z]"), *_literal(behind))


def _pattern(atoms: Sequence[_Atom]) -> Pattern:
    """Markup to look for. White space at the borders of tags may be any."""
    elements: list[Element] = []
    text = ""
    for atom in atoms:
        if atom.shape in ("\0name", "\0digits"):
            elements += _literal(text)
            elements.append(NAME if atom.shape == "\0name" else Word("index", r"\d"))
            text = ""
        else:
            text += atom.text
    elements += _literal(text)
    while elements and elements[0] == SPACE:
        del elements[0]
    return tuple(elements)


def _literal(text: str) -> Pattern:
    pieces = re.split(r"(\s*\n\s*|^\s+|\s+$|(?<=[>\]},:])\s+|\s+(?=[<\[{]))", text)
    return tuple(SPACE if piece.isspace() else piece for piece in pieces if piece)


def _separator(atoms: Sequence[_Atom]) -> Space:
    return LIST if _text(atoms).strip() in (",", ";") else SPACE


def _usable(syntax: CallSyntax, written: Written) -> CallFormat | None:
    """None where nothing tells a call from text that looks like one, or from another call."""
    starts = syntax.starts
    if not starts or any(len(start) < _MIN_MARKER or start[0].isalnum() for start in starts):
        return None
    between = re.sub(r"[\s,;]", "", written.separator)
    return of_syntax(syntax, written) if not between else None


def _has_name(atoms: Sequence[_Atom]) -> bool:
    return sum(atom.shape == "\0name" for atom in atoms) == 1


def _num_alike(one: Sequence[_Atom], other: Sequence[_Atom]) -> int:
    """How many first atoms are of the same shape."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a.shape != b.shape), min(len(one), len(other)))


def _text(atoms: Sequence[_Atom]) -> str:
    return "".join(atom.text for atom in atoms)
