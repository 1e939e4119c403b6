"""Markup to look for in text that is still coming: a pattern matches, fails, or may yet match.

`re` can't tell "no" from "not yet", and the markup around calls is simple enough for less: literal
texts, white space, optional parts and captured words, one after the other.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class Space:
    """Any white space, or none. `more` are further characters that are passed over."""

    more: str = ""


@dataclass(frozen=True, slots=True)
class Maybe:
    """What may be missing."""

    pattern: "Pattern"


@dataclass(frozen=True, slots=True)
class Word:
    """A run of characters that is captured under a key; at least one unless `may_be_empty`."""

    key: str
    characters: str
    may_be_empty: bool = False


Element = str | Space | Maybe | Word
Pattern = tuple[Element, ...]
SPACE = Space()
_MAX_WORD = 128
_PLACES = {
    "{name}": Word("name", r"[\w.\-]"),
    "{digits}": Word("digits", r"\d", may_be_empty=True),
    "{id}": Word("id", r"\w", may_be_empty=True),
    "{kind}": Word("kind", "[a-z]"),
    "{word}": Word("word", r"[^\s=:,(){}\[\]<>\"']"),
}
_PARTS = re.compile(r"(«[^»]*»|‹[^›]*›|\{(?:name|digits|id|kind|word|key)\})")
# White space at the borders of tags may be any.
_BORDERS = re.compile(r"(\s*\n\s*|^\s+|\s+$|(?<=[>\]},:])\s+|\s+(?=[<\[{]))")


@dataclass(frozen=True, slots=True)
class Match:
    """`end` is the number of characters that the pattern took."""

    end: int
    words: dict[str, str] = field(default_factory=dict)


Outcome = Match | Literal["partial", "none"]


def pattern_of(text: str) -> Pattern:
    """The pattern of a format's text: places in braces, «what may be missing», ‹what models may
    write and templates do not›."""
    elements: list[Element] = []
    parts = _PARTS.split(text)
    for index, part in enumerate(parts):
        if part in _PLACES:
            elements.append(_PLACES[part])
        elif part == "{key}":
            behind, before = parts[index + 1], parts[index - 1]
            others = '"<>' if behind.startswith('"') else "<>/" if before.endswith("<") else "<>"
            elements.append(Word("key", f"[^{others}]"))
        elif part[:1] in ("«", "‹"):
            inner = pattern_of(part[1:-1])
            elements.append(SPACE if inner == (SPACE,) else Maybe(inner))
        else:
            pieces = (piece for piece in _BORDERS.split(part) if piece)
            elements += [SPACE if piece.isspace() else piece for piece in pieces]
    return tuple(elements)


def written(text: str) -> str:
    """A format's text as templates write it, its places left."""
    return re.sub("‹[^›]*›|[«»]", "", text)


def match(pattern: Pattern, text: str) -> Outcome:
    """Match at the text's beginning. `partial`: all of the text fits, and more of it may match.

    Greedy and without steps back: linear in the text that is taken.
    """
    at = 0
    words: dict[str, str] = {}
    for element in pattern:
        match element:
            case str():
                if not text.startswith(element, at):
                    return "partial" if element.startswith(text[at:]) else "none"
                at += len(element)
            case Space(more):
                while at < len(text) and text[at] in _SPACE + more:
                    at += 1
            case Maybe(inner):
                found = match(inner, text[at:])
                if found == "partial":
                    return "partial"
                if isinstance(found, Match):
                    at += found.end
                    words |= found.words
            case Word(key, characters, may_be_empty):
                run = re.compile(f"{characters}{{0,{_MAX_WORD}}}").match(text, at)
                assert run is not None
                if run.end() == len(text) and len(run.group()) < _MAX_WORD:
                    return "partial"
                if not run.group() and not may_be_empty:
                    return "none"
                words[key], at = run.group(), run.end()
    return Match(at, words)


def literals(pattern: Pattern) -> set[str]:
    """The texts in a pattern, which may be control tokens."""
    found: set[str] = set()
    for element in pattern:
        if isinstance(element, str):
            found.add(element.strip())
        elif isinstance(element, Maybe):
            found |= literals(element.pattern)
    return found - {""}


def first_literal(pattern: Pattern) -> str:
    """The text that what the pattern matches is found by; empty where it may begin with others."""
    for element in pattern:
        if isinstance(element, str):
            return element
        if isinstance(element, Word):
            break
    return ""
