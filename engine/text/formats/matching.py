"""Searches a text that comes in pieces.

Stop strings are searched all at once (Aho and Corasick, 1975). The markup of formats is searched by
patterns.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True, eq=False)
class StopState:
    """The longest end of the text so far that is the beginning of a stop string."""

    # The sorted stop strings [low, high) have this beginning.
    low: int
    high: int
    # The length of the beginning, in characters.
    depth: int = 0
    # The state of the next shorter end that begins a stop string; None at the start.
    fall: "StopState | None" = None
    # The length of the longest stop string that ends here; 0 if none does.
    longest: int = 0
    # The next state, for each character that came here before.
    following: dict[str, "StopState"] = field(default_factory=dict)


class StopStrings:
    """A request's stop strings as one automaton. It takes one step for each character of a text.

    A state is made when a text first reaches it. So the cost grows with the text, and not with the
    stop strings. A request may send many long ones.
    """

    __slots__ = ("_stops", "start")

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self._stops = sorted({stop for stop in stop_sequences if stop})
        self.start = StopState(0, len(self._stops))

    def __bool__(self) -> bool:
        return bool(self._stops)

    def step(self, state: StopState, character: str) -> StopState:
        """The state after one more character. It takes amortized O(1) states."""
        if character in state.following:
            return state.following[character]
        # The states after the character are made from the shortest to the longest, because a longer
        # one falls to a shorter one.
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
        """The state with one more character; None if no stop string continues with it."""
        stops = self._stops
        depth = state.depth
        # A stop string that ends here is sorted before the stop strings that continue.
        low = state.low + (state.low < state.high and len(stops[state.low]) == depth)
        low = bisect_left(stops, character, low, state.high, key=lambda stop: stop[depth])
        high = bisect_right(stops, character, low, state.high, key=lambda stop: stop[depth])
        if low == high:
            return None
        ends = len(stops[low]) == depth + 1
        return StopState(low, high, depth + 1, fall, depth + 1 if ends else fall.longest)


class StopFinder:
    """Passes text on up to the first stop string.

    It holds back an end of the text that may become a stop string. `found` is the stop string that
    was completed first. If several were completed at once, it is the longest. Nothing behind it is
    passed on.
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
    """Whether the beginning of a marker starts with a whole control token."""
    return _CONTROL.match(pending) is not None


def places_of(text: str, needles: Iterable[str]) -> list[tuple[int, str]]:
    """The first place of each needle in the text, with the needle. Needles that are not in the text
    are left out."""
    places: list[tuple[int, str]] = []
    for needle in needles:
        at = text.find(needle)
        if at >= 0:
            places.append((at, needle))
    return places


def overlap(text: str, target: str) -> int:
    """The length of the longest end of the text that begins the target. The whole target does not
    count."""
    for length in range(min(len(text), len(target) - 1), 0, -1):
        if text.endswith(target[:length]):
            return length
    return 0


_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class Space:
    """Any white space, or none."""

    # Further characters that are passed over like white space.
    more: str = ""


@dataclass(frozen=True, slots=True)
class Maybe:
    """A part that may be missing."""

    pattern: "Pattern"


@dataclass(frozen=True, slots=True)
class Word:
    """A run of characters that is captured."""

    # The name of the captured text.
    key: str
    # The characters that the run may have, as a regular expression for one character.
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
# White space at the borders of tags. It matches any other white space.
_BORDERS = re.compile(r"(\s*\n\s*|^\s+|\s+$|(?<=[>\]},:])\s+|\s+(?=[<\[{]))")


@dataclass(frozen=True, slots=True)
class Match:
    """A pattern that matched."""

    # The number of characters that the pattern took.
    end: int
    # The captured texts, by key.
    words: dict[str, str] = field(default_factory=dict)


Outcome = Match | Literal["partial", "none"]
"""`partial`: the whole text fits the beginning of the pattern, and more text may match."""


def pattern_of(text: str) -> Pattern:
    """The pattern of a format's text.

    Braces hold places. «…» holds a part that models may leave out. ‹…› holds a part that models may
    write and templates do not write.
    """
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


def template_text(text: str) -> str:
    """A format's text as templates write it. Its places stay."""
    return re.sub("‹[^‹›]*›|[«»]", "", text)


def match(pattern: Pattern, text: str) -> Outcome:
    """Match at the text's beginning.

    Matching is greedy and never steps back. So its time is linear in the text that is taken.
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
    """The texts in a pattern. They may be control tokens."""
    texts: set[str] = set()
    for element in pattern:
        if isinstance(element, str):
            texts.add(element.strip())
        elif isinstance(element, Maybe):
            texts |= literals(element.pattern)
    return texts - {""}


def first_literal(pattern: Pattern) -> str:
    """The text by which matches of the pattern are found; empty if a match may begin otherwise."""
    for element in pattern:
        if isinstance(element, str):
            return element
        if isinstance(element, Word):
            break
    return ""
