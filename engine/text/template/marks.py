"""Characters that travel through a chat template and come out where a segment lies.

A *cut* is put into every control token's text that a client wrote, so that neither the template
nor the tokenizer takes it for the real one. *Marks*, of the private-use planes, go around each
segment's content. Both are characters that do not occur in the prompt, so taking them out again
gives the text itself.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest

# The two private planes come first: their characters are the rarest in real text.
_RANGES = ((0xF0000, 0xFFFFD), (0x100000, 0x10FFFD), (0xE000, 0xF8FF))
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_RARE = re.compile("[\U0002a000-\U0002a6dd]")


# Rare letters: Python's own picture of a text, which some templates write, keeps them as they are.
_CUTS = range(0x2A000, 0x2A6DE)


def choose_cut(texts: Iterator[str]) -> str:
    """A character for cuts that occurs in none of the texts."""
    used = {character for text in texts for character in _RARE.findall(text)}
    cut = next((chr(code) for code in _CUTS if chr(code) not in used), "")
    if not cut:
        raise InvalidRequest("the prompt has too many rare letters")
    return cut


class MarkAlphabet:
    """Characters for marks that do not occur in the given texts; `num_free` are left."""

    def __init__(self, texts: Iterator[str]) -> None:
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


class MarkedDict(dict[str, Any]):
    """A dictionary that text forms of it, `tojson` and `str`, surround with marks.

    `plain` is what `tojson` writes: the content without inner marks. Keys and values that a
    template reads are those given.
    """

    def __init__(self, content: dict[str, Any], marks: SegmentMarks, plain: dict[str, Any]) -> None:
        super().__init__(content)
        self.marks = marks
        self.plain = plain

    def __str__(self) -> str:
        return f"{self.marks.begin}{self.plain}{self.marks.end}"


class MarkedList(list[Any]):
    """A list that text forms of it surround with marks."""

    def __init__(self, content: list[Any], marks: SegmentMarks) -> None:
        super().__init__(content)
        self.marks = marks
        self.plain = content

    def __str__(self) -> str:
        return f"{self.marks.begin}{self.plain}{self.marks.end}"


class MarkedInt(int):
    """A number that text forms of it surround with marks."""

    marks: SegmentMarks

    @property
    def plain(self) -> int:
        return int(self)

    def __str__(self) -> str:
        return f"{self.marks.begin}{int(self)}{self.marks.end}"


class MarkedFloat(float):
    """As `MarkedInt`."""

    marks: SegmentMarks

    @property
    def plain(self) -> float:
        return float(self)

    def __str__(self) -> str:
        return f"{self.marks.begin}{float(self)}{self.marks.end}"


Marked = MarkedDict | MarkedList | MarkedInt | MarkedFloat


def mark_value(value: Any, marks: SegmentMarks) -> Any:
    """A JSON value whose text forms have the marks around it; true, false and null have none."""
    if isinstance(value, str):
        return surround(value, marks)
    if isinstance(value, dict):
        return MarkedDict(value, marks, value)
    if isinstance(value, list):
        return MarkedList(value, marks)
    if isinstance(value, int) and not isinstance(value, bool):
        number = MarkedInt(value)
        number.marks = marks
        return number
    if isinstance(value, float):
        real = MarkedFloat(value)
        real.marks = marks
        return real
    return value


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


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string in it, keys too, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [map_strings(inner, change) for inner in value]
    return value


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings_in(inner)
