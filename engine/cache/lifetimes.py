"""Histograms of how long entries live and rest, in constant memory."""

from bisect import bisect_left

from engine.protocol import Histogram, Lifetimes

EDGES_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0)


class LifetimeCounts:
    """Counts of lifetimes. `num_evicted` entries lost content for room."""

    def __init__(self) -> None:
        self._expired, self._evicted, self._idle, self._gaps = (
            [0] * (len(EDGES_SECONDS) + 1) for _ in range(4)
        )

    @property
    def num_evicted(self) -> int:
        return sum(self._evicted)

    def expired(self, age_seconds: float) -> None:
        _count(self._expired, age_seconds)

    def evicted(self, age_seconds: float, idle_seconds: float) -> None:
        _count(self._evicted, age_seconds)
        _count(self._idle, idle_seconds)

    def used_again(self, gap_seconds: float) -> None:
        _count(self._gaps, gap_seconds)

    def report(self) -> Lifetimes:
        return Lifetimes(
            expired=_histogram(self._expired),
            evicted=_histogram(self._evicted),
            idle_before_eviction=_histogram(self._idle),
            reuse_gaps=_histogram(self._gaps),
        )


def _count(counts: list[int], seconds: float) -> None:
    counts[bisect_left(EDGES_SECONDS, seconds)] += 1


def _histogram(counts: list[int]) -> Histogram:
    return Histogram(edges_seconds=list(EDGES_SECONDS), counts=list(counts))
