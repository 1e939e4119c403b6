"""Stop strings across token borders."""

from collections.abc import Sequence


class StopFinder:
    """Passes text on, but never a stop string nor the beginning of what may become one.

    `found` is the stop string that was completed first; nothing behind it is passed on.
    """

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self._stops = [stop for stop in stop_sequences if stop]
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        if self.found is not None:
            return ""
        held = self._held + text
        ends = [(at + len(s), at, s) for s in self._stops if (at := held.find(s)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return held[:at]
        num_kept = max((overlap(held, stop) for stop in self._stops), default=0)
        passed = held[: len(held) - num_kept]
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
