"""Markup to look for in text that is still coming: a pattern matches, fails, or may yet match.

`re` can't tell "no" from "not yet", and the markup around calls is simple enough for less: literal
texts, white space, optional texts and captured words, one after the other.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class Space:
    """Any white space, or none. `more` are further characters that are passed over."""

    more: str = ""


@dataclass(frozen=True, slots=True)
class Maybe:
    """A text that may be missing."""

    text: str


@dataclass(frozen=True, slots=True)
class Either:
    """One of several texts; no text is the beginning of another one."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Word:
    """A run of characters that is captured under a key; at least one unless `may_be_empty`."""

    key: str
    characters: str = r"[\w.\-]"
    may_be_empty: bool = False
    max_length: int = 128


Element = str | Space | Maybe | Either | Word
Pattern = tuple[Element, ...]
SPACE = Space()
NAME = Word("name")


@dataclass(frozen=True, slots=True)
class Match:
    """`end` is the number of characters that the pattern took."""

    end: int
    words: dict[str, str] = field(default_factory=dict)


Outcome = Match | Literal["partial", "none"]


def match(pattern: Pattern, text: str) -> Outcome:
    """Match at the text's beginning. `partial`: all of the text fits, and more of it may match.

    Greedy and without steps back: linear in the text that is taken.
    """
    at = 0
    words: dict[str, str] = {}
    for element in pattern:
        match element:
            case str():
                found = _literal(element, text, at)
            case Space(more):
                found = _run(_SPACE + more, text, at)
            case Maybe(literal):
                found = _literal(literal, text, at)
                found = at if found is None else found
            case Either(texts):
                found = _either(texts, text, at)
            case Word():
                found = _word(element, text, at)
                if isinstance(found, int) and found >= 0:
                    words[element.key] = text[at:found]
        if found is None:
            return "none"
        if found == _WAITS:
            return "partial"
        at = found
    return Match(at, words)


_WAITS = -1


def _literal(literal: str, text: str, at: int) -> int | None:
    """Where the literal ends, None where it is not, `_WAITS` where the text ends inside it."""
    if text.startswith(literal, at):
        return at + len(literal)
    return _WAITS if literal.startswith(text[at:]) else None


def _either(texts: Sequence[str], text: str, at: int) -> int | None:
    outcomes = [_literal(literal, text, at) for literal in texts]
    whole = [end for end in outcomes if end is not None and end >= 0]
    if whole:
        return whole[0]
    return _WAITS if _WAITS in outcomes else None


def _run(characters: str, text: str, at: int) -> int:
    """A run at the text's end may go on, which only matters to what comes behind it."""
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _word(word: Word, text: str, at: int) -> int | None:
    found = re.compile(f"{word.characters}{{0,{word.max_length}}}").match(text, at)
    assert found is not None
    end = found.end()
    if end == len(text) and end - at < word.max_length:
        return _WAITS
    return end if end > at or word.may_be_empty else None


def literals(*patterns: Pattern) -> frozenset[str]:
    """The texts in patterns that look like markup, which may be control tokens."""
    found: set[str] = set()
    for pattern in patterns:
        for element in pattern:
            match element:
                case str() | Maybe():
                    found.add(element if isinstance(element, str) else element.text)
                case Either(texts):
                    found.update(texts)
    return frozenset(text.strip() for text in found if text.strip())


def first_literal(pattern: Pattern) -> str:
    return next((element for element in pattern if isinstance(element, str)), "")
