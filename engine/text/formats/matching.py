"""Searches in a text that comes in pieces: for stop strings, all at once (Aho and Corasick, 1975),
and for the markup of formats, by patterns."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True, eq=False)
class StopState:
    """The longest end of the text so far that begins a stop string."""

    # The sorted stop strings from `low` to `high` begin so.
    low: int
    high: int
    # How many characters of the stop string came.
    depth: int = 0
    # The state of the next shorter such end, None at the start.
    fall: "StopState | None" = None
    # The length of the longest stop string that ends here, 0 where none does.
    longest: int = 0
    # The states behind characters that came here before.
    following: dict[str, "StopState"] = field(default_factory=dict)


class StopStrings:
    """A request's stop strings as one automaton: a step a character, however many there are.

    A state is made when a text first reaches it. So the cost grows with the text, not with the stop
    strings, of which a request may send many long ones.
    """

    __slots__ = ("_stops", "start")

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self._stops = sorted({stop for stop in stop_sequences if stop})
        self.start = StopState(0, len(self._stops))

    def __bool__(self) -> bool:
        return bool(self._stops)

    def step(self, state: StopState, character: str) -> StopState:
        """The state behind one more character; amortized O(1) states are looked at."""
        if character in state.following:
            return state.following[character]
        # Make the states behind the character: the shortest first, since longer ones fall to it.
        path: list[StopState] = []
        known: StopState | None = state
        while known is not None and character not in known.following:
            path.append(known)
            known = known.fall
        reached = self.start if known is None else known.following[character]
        for origin in reversed(path):
            reached = self._longer(origin, character, fall=reached) or reached
            origin.following[character] = reached
        return reached

    def _longer(self, state: StopState, character: str, *, fall: StopState) -> StopState | None:
        """The state of one more character of a stop string, None where none goes on so."""
        stops = self._stops
        depth = state.depth
        # The one that ends here is sorted before those that it begins.
        low = state.low + (state.low < state.high and len(stops[state.low]) == depth)
        low = bisect_left(stops, character, low, state.high, key=lambda stop: stop[depth])
        high = bisect_right(stops, character, low, state.high, key=lambda stop: stop[depth])
        if low == high:
            return None
        ends = len(stops[low]) == depth + 1
        return StopState(low, high, depth + 1, fall, depth + 1 if ends else fall.longest)


class StopFinder:
    """Passes text on, but never a stop string nor the beginning of what may become one.

    `found` is the stop string that was completed first, of several the longest; nothing behind it
    is passed on.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = stops.start
        self._pending = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        if self.found is not None:
            return ""
        stops = self._stops
        state = self._state
        if not stops:
            return text
        pending = self._pending + text
        for end, character in enumerate(text, len(self._pending) + 1):
            state = stops.step(state, character)
            if state.longest:
                begin = end - state.longest
                self.found = pending[begin:end]
                self._pending = ""
                return pending[:begin]
        self._state = state
        passed = pending[: len(pending) - state.depth]
        self._pending = pending[len(passed) :]
        return passed

    def flush(self) -> str:
        pending = self._pending
        self._pending = ""
        return pending


_CONTROL = re.compile(r"<\|[^<>|]+\|>|<｜[^<>｜]+｜>")


def is_begun_markup(pending: str) -> bool:
    """Whether text that begins a marker has a whole control token in it."""
    return _CONTROL.match(pending) is not None


def places_of(text: str, needles: Iterable[str]) -> list[tuple[int, str]]:
    """The first place of each needle that stands in the text, with the needle. The least is the
    first in the text."""
    places: list[tuple[int, str]] = []
    for needle in needles:
        at = text.find(needle)
        if at >= 0:
            places.append((at, needle))
    return places


def overlap(text: str, target: str) -> int:
    """How many characters at the text's end are the target's beginning, but not all of it."""
    for length in range(min(len(text), len(target) - 1), 0, -1):
        if text.endswith(target[:length]):
            return length
    return 0


_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class Space:
    """Any white space, or none. `more` are further characters that are passed over."""

    more: str = ""


@dataclass(frozen=True, slots=True)
class Maybe:
    """A part that may be missing."""

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
_PARTS = re.compile(r"(«[^«»]*»|‹[^‹›]*›|\{(?:name|digits|id|kind|word|key)\})")
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
            behind = parts[index + 1]
            before = parts[index - 1]
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
    return re.sub("‹[^‹›]*›|[«»]", "", text)


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
                outcome = match(inner, text[at:])
                if outcome == "partial":
                    return "partial"
                if isinstance(outcome, Match):
                    at += outcome.end
                    words |= outcome.words
            case Word(key, characters, may_be_empty):
                run = re.compile(f"{characters}{{0,{_MAX_WORD}}}").match(text, at)
                assert run is not None
                if run.end() == len(text) and len(run.group()) < _MAX_WORD:
                    return "partial"
                if not run.group() and not may_be_empty:
                    return "none"
                words[key] = run.group()
                at = run.end()
    return Match(at, words)


def literals(pattern: Pattern) -> set[str]:
    """The texts in a pattern, which may be control tokens."""
    texts: set[str] = set()
    for element in pattern:
        if isinstance(element, str):
            texts.add(element.strip())
        elif isinstance(element, Maybe):
            texts |= literals(element.pattern)
    return texts - {""}


def first_literal(pattern: Pattern) -> str:
    """The text that what the pattern matches is found by; empty where it may begin with others."""
    for element in pattern:
        if isinstance(element, str):
            return element
        if isinstance(element, Word):
            break
    return ""
