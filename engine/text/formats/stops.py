"""Stop strings across token borders, all looked for at once (Aho and Corasick, 1975)."""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """A request's stop strings as one automaton: a step a character, however many there are.

    State 0 is the beginning. A state stands for the longest end of the text so far that begins a
    stop string: `depth` characters. `longest` is the length of the longest stop string that ends
    there, 0 where none does. Built once a request, in time linear in all their characters.
    """

    __slots__ = ("_fall", "_next", "depth", "longest")

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fall = [0]
        self.depth = [0]
        self.longest = [0]
        for stop in stop_sequences:
            self._add(stop)
        self._link()

    def __bool__(self) -> bool:
        return len(self.depth) > 1

    def step(self, state: int, character: str) -> int:
        """The state behind one more character; amortized O(1)."""
        while (following := self._next[state].get(character)) is None:
            if not state:
                return 0
            state = self._fall[state]
        return following

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._fall.append(0)
                self.depth.append(self.depth[state] + 1)
                self.longest.append(0)
            state = following
        self.longest[state] = self.depth[state]

    def _link(self) -> None:
        """Where to go on from each state when its next character does not come; nearest first."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for character, following in self._next[state].items():
                self._fall[following] = self.step(self._fall[state], character)
                if not self.longest[following]:
                    self.longest[following] = self.longest[self._fall[following]]
                states.append(following)


class StopFinder:
    """Passes text on, but never a stop string nor the beginning of what may become one.

    `found` is the stop string that was completed first, of several the longest; nothing behind it
    is passed on.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        if self.found is not None:
            return ""
        stops, state = self._stops, self._state
        if not stops:
            return text
        held = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            state = stops.step(state, character)
            if length := stops.longest[state]:
                self.found, self._held = held[end - length : end], ""
                return held[: end - length]
        self._state = state
        passed = held[: len(held) - stops.depth[state]]
        self._held = held[len(passed) :]
        return passed

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, target: str) -> int:
    """How many characters at the text's end are the target's beginning, but not all of it."""
    for length in range(min(len(text), len(target) - 1), 0, -1):
        if text.endswith(target[:length]):
            return length
    return 0
