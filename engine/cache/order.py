"""Entries in the order of a key that changes while they are in it, such as their last use.

A heap whose items may be out of date. Taking the first costs O(log n) for each key that grew since
the item was pushed. A look at all entries would cost a large cache milliseconds a step.
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace

from engine.cache.block import Entry

Key = tuple[float, float]
KeyOf = Callable[[Entry], Key | None]

_SLACK = 64


class EntryOrder:
    """`key_of` gives an entry's key now, None for one that is no longer in the order.

    A key that grew is noticed when its entry comes first. `push` must tell the others: an entry
    that is new or comes back, and a key that became less.
    """

    def __init__(self, key_of: KeyOf) -> None:
        self._key_of = key_of
        self._heap: list[tuple[Key, int, Entry]] = []
        self._pushes = 0
        self._limit = _SLACK

    def push(self, entry: Entry) -> None:
        """Nothing happens if the entry has no key now."""
        if (key := self._key_of(entry)) is None:
            return
        self._pushes += 1
        heappush(self._heap, (key, self._pushes, entry))
        if len(self._heap) > self._limit:
            self._compact()

    def first(self) -> Entry | None:
        """The entry with the least key; of equal ones, that which was pushed first."""
        while self._heap:
            told, number, entry = self._heap[0]
            key = self._key_of(entry)
            if key == told:
                return entry
            if key is None or key < told:  # a lesser key was pushed again
                heappop(self._heap)
            else:
                heapreplace(self._heap, (key, number, entry))
        return None

    def pop(self) -> Entry | None:
        """Take out the first."""
        entry = self.first()
        if entry is not None:
            heappop(self._heap)
        return entry

    def check(self, entries: Iterable[Entry]) -> None:
        """Prove that the first of these entries is found; raises AssertionError."""
        keys = [key for entry in entries if (key := self._key_of(entry)) is not None]
        first = self.first()
        assert (first is None) == (not keys)
        assert first is None or self._key_of(first) == min(keys), "the first is not found"

    def _compact(self) -> None:
        """Keep one item of each entry."""
        numbers: dict[Entry, int] = {}
        for _, number, entry in self._heap:
            numbers[entry] = min(number, numbers.get(entry, number))
        keys = ((self._key_of(entry), number, entry) for entry, number in numbers.items())
        self._heap = [(key, number, entry) for key, number, entry in keys if key is not None]
        heapify(self._heap)
        self._limit = 2 * len(self._heap) + _SLACK
