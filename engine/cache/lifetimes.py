"""Counts of values by the edges of their buckets, and how long entries live: in constant memory."""

from bisect import bisect_left
from collections.abc import Sequence

from engine.protocol.reports import Histogram, Lifetimes

EDGES_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0)


class ValueCounts:
    """`counts[i]` values were at most `edges[i]`; the last count is of all above."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = list(edges)
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    def histogram(self) -> Histogram:
        return Histogram(edges_seconds=self.edges, counts=list(self.counts))


class LifetimeCounts:
    """The times of `engine.protocol.Lifetimes`. `num_evicted` entries lost content for room."""

    def __init__(self) -> None:
        self._expired, self._evicted, self._idle, self._gaps = (
            ValueCounts(EDGES_SECONDS) for _ in range(4)
        )

    @property
    def num_evicted(self) -> int:
        return sum(self._evicted.counts)

    def expired(self, age_seconds: float) -> None:
        self._expired.add(age_seconds)

    def evicted(self, age_seconds: float, idle_seconds: float) -> None:
        self._evicted.add(age_seconds)
        self._idle.add(idle_seconds)

    def used_again(self, gap_seconds: float) -> None:
        self._gaps.add(gap_seconds)

    def report(self) -> Lifetimes:
        return Lifetimes(
            expired=self._expired.histogram(),
            evicted=self._evicted.histogram(),
            idle_before_eviction=self._idle.histogram(),
            reuse_gaps=self._gaps.histogram(),
        )
