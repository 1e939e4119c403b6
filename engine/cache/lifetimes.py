"""Histograms in constant memory, and those of the lifetimes of entries."""

from bisect import bisect_left
from collections.abc import Sequence

from engine.protocol.reports import Distribution, Histogram, Lifetimes

EDGES_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 43_200.0)


class ValueCounts:
    """`counts[i]` values were at most `edges[i]`; the last count is of all above."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = list(edges)
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    def distribution(self) -> Distribution:
        return Distribution(edges=self.edges, counts=list(self.counts), total=self.total)

    def histogram(self) -> Histogram:
        return Histogram(edges_seconds=self.edges, counts=list(self.counts))


class LifetimeCounts:
    """The times of `engine.protocol.Lifetimes`."""

    def __init__(self) -> None:
        self.expired = ValueCounts(EDGES_SECONDS)
        self.evicted = ValueCounts(EDGES_SECONDS)
        self.idle = ValueCounts(EDGES_SECONDS)
        self.gaps = ValueCounts(EDGES_SECONDS)

    @property
    def num_evicted(self) -> int:
        """Entries that lost content for room."""
        return sum(self.evicted.counts)

    def report(self) -> Lifetimes:
        return Lifetimes(
            expired=self.expired.histogram(),
            evicted=self.evicted.histogram(),
            idle_before_eviction=self.idle.histogram(),
            reuse_gaps=self.gaps.histogram(),
        )
