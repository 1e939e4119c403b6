"""Characters that travel through a chat template and come out where a segment lies.

A *cut* is put into every control token's text that a client wrote, so that neither the template
nor the tokenizer takes it for the real one. *Marks*, of the private-use planes, go around each
segment's content. Both are characters that do not occur in the prompt, so taking them out again
gives the text itself.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest

# The two private planes come first: their characters are the rarest in real text.
_RANGES = ((0xF0000, 0xFFFFD), (0x100000, 0x10FFFD), (0xE000, 0xF8FF))
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_RARE = re.compile("[\U0002a000-\U0002a6dd]")
# Rare letters: Python's own picture of a text, which some templates write, keeps them as they are.
_CUTS = range(0x2A000, 0x2A6DE)


def choose_cut(texts: Iterable[str]) -> str:
    """A character for cuts that occurs in none of the texts."""
    used = {character for text in texts for character in _RARE.findall(text)}
    cut = next((chr(code) for code in _CUTS if chr(code) not in used), "")
    if not cut:
        raise InvalidRequest("the prompt has too many rare letters")
    return cut


class MarkAlphabet:
    """Characters for marks that do not occur in the given texts; `num_free` are left."""

    def __init__(self, texts: Iterable[str]) -> None:
        used = {character for text in texts for character in _PRIVATE.findall(text)}
        self.num_free = sum(last - first + 1 for first, last in _RANGES) - len(used)
        self._free = (
            chr(code)
            for first, last in _RANGES
            for code in range(first, last + 1)
            if chr(code) not in used
        )

    def take(self) -> str:
        mark = next(self._free, None)
        if mark is None:
            raise InvalidRequest("the prompt has too many private-use characters")
        self.num_free -= 1
        return mark


@dataclass(frozen=True, slots=True)
class SegmentMarks:
    """The pair of marks around one segment's content.

    `inner` are further pairs for the parts of a segment that is a JSON object: a template that
    writes an object key by key loses the pair around the whole.
    """

    begin: str
    end: str
    inner: "tuple[SegmentMarks, ...]" = ()


class Marked:
    """A JSON value that text forms of it, `tojson` and `str`, surround with marks.

    `plain` is what `tojson` writes: the content without inner marks. Keys and values that a
    template reads are the value's own.
    """

    marks: SegmentMarks
    plain: Any

    def __str__(self) -> str:
        return f"{self.marks.begin}{self.plain}{self.marks.end}"


class _MarkedDict(Marked, dict[str, Any]):
    pass


class _MarkedList(Marked, list[Any]):
    pass


class _MarkedInt(Marked, int):
    pass


class _MarkedFloat(Marked, float):
    pass


_MARKED = {dict: _MarkedDict, list: _MarkedList, int: _MarkedInt, float: _MarkedFloat}


def mark_value(value: Any, marks: SegmentMarks, plain: Any = None) -> Any:
    """A JSON value whose text forms have the marks around it; true, false and null have none."""
    if isinstance(value, str):
        return surround(value, marks)
    kind = _MARKED.get(type(value))
    if kind is None:
        return value
    marked: Marked = kind(value)
    marked.marks, marked.plain = marks, value if plain is None else plain
    return marked


def surround(text: str, marks: SegmentMarks) -> str:
    """Put the marks around the text, inside its outer white space.

    A template that trims then trims the same with and without them.
    """
    body = text.strip()
    if not body:
        return text
    begin = text.index(body)
    end = begin + len(body)
    return text[:begin] + marks.begin + body + marks.end + text[end:]


@dataclass(frozen=True, slots=True)
class Unmarked:
    """A text without its marks, and at which of its characters each mark stood, in order."""

    text: str
    positions: dict[str, list[int]]


def take_out(text: str, marks: frozenset[str]) -> Unmarked:
    """Remove the marks."""
    pieces: list[str] = []
    positions: dict[str, list[int]] = {}
    length = last = 0
    for match in _PRIVATE.finditer(text):
        mark = match.group()
        if mark not in marks:
            continue
        piece = text[last : match.start()]
        pieces.append(piece)
        length += len(piece)
        last = match.end()
        positions.setdefault(mark, []).append(length)
    pieces.append(text[last:])
    return Unmarked("".join(pieces), positions)
