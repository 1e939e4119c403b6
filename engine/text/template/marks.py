"""Private-use characters that travel through a chat template and come out where a segment lies.

A *cut* is put inside every control token's text that a client wrote, so that neither the template
nor the tokenizer takes it for the real one. *Marks* go around each segment's content. Both are
characters that do not occur in the prompt, so taking them out again gives the text itself.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest

# The two private planes come first: their characters are the rarest in real text.
_RANGES = ((0xF0000, 0xFFFFD), (0x100000, 0x10FFFD), (0xE000, 0xF8FF))
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")


class MarkAlphabet:
    """Characters that do not occur in the given texts."""

    def __init__(self, texts: Iterator[str]) -> None:
        used = {character for text in texts for character in _PRIVATE.findall(text)}
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
        return mark


@dataclass(frozen=True, slots=True)
class SegmentMarks:
    """The pair of marks around one segment's content."""

    begin: str
    end: str


class MarkedDict(dict[str, Any]):
    """A dictionary that the `tojson` filter surrounds with marks; otherwise an ordinary one."""

    def __init__(self, content: dict[str, Any], marks: SegmentMarks) -> None:
        super().__init__(content)
        self.marks = marks


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
    """A text without its marks, and at which of its characters each mark stood."""

    text: str
    positions: dict[str, int]


def take_out(text: str, marks: frozenset[str]) -> Unmarked:
    """Remove the marks. A mark that occurs twice (a template that repeats a text) has no place."""
    pieces: list[str] = []
    positions: dict[str, int] = {}
    repeated: set[str] = set()
    length = last = 0
    for match in _PRIVATE.finditer(text):
        mark = match.group()
        if mark not in marks:
            continue
        piece = text[last : match.start()]
        pieces.append(piece)
        length += len(piece)
        last = match.end()
        if mark in positions:
            repeated.add(mark)
        positions[mark] = length
    pieces.append(text[last:])
    for mark in repeated:
        del positions[mark]
    return Unmarked("".join(pieces), positions)


def cut_controls(text: str, controls: re.Pattern[str] | None, cut: str) -> str:
    """Put `cut` after the first character of every control token's text."""
    if controls is None:
        return text
    pieces: list[str] = []
    last = 0
    match = controls.search(text)
    while match is not None:
        pieces.append(text[last : match.start() + 1])
        last = match.start() + 1
        # The rest is searched again: a shorter control token may begin inside.
        match = controls.search(text, last)
    pieces.append(text[last:])
    return cut.join(pieces)


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
