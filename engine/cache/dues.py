"""Entries in the order of a time at which something is due."""

from heapq import heappop, heappush

from engine.cache.block import Entry


class Dues:
    """A heap. What is due may have changed meanwhile: who takes an entry out checks it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry]] = []
        self._pushes = 0

    def push(self, at: float, entry: Entry) -> None:
        self._pushes += 1
        heappush(self._heap, (at, self._pushes, entry))

    def pop(self) -> tuple[float, Entry]:
        at, _, entry = heappop(self._heap)
        return at, entry

    def pop_due(self, now: float) -> tuple[float, Entry] | None:
        """Take out what is due by now. None if nothing is."""
        return self.pop() if self._heap and self._heap[0][0] <= now else None
