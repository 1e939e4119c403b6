"""Metrics that every turn changes, as plain numbers behind a collector.

prometheus_client takes a lock for each number and looks at a histogram's buckets one by one. That
takes four times as long. Only the event loop changes these numbers, so they need no lock.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class CounterTally(Collector):
    """A counter with labels. A child exists from its first `add` on, also of 0."""

    def __init__(
        self, name: str, meaning: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._meaning = meaning
        self._labels = labels
        self._values: dict[Labels, float] = {}
        registry.register(self)

    def add(self, labels: Labels, amount: float = 1) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount

    def describe(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._meaning, labels=self._labels)

    def collect(self) -> Iterator[CounterMetricFamily]:
        for family in self.describe():
            for labels, value in list(self._values.items()):
                family.add_metric(labels, value)
            yield family


class HistogramTally(Collector):
    """A histogram with labels. `edges` are the upper edges of its buckets, in order."""

    def __init__(
        self,
        name: str,
        meaning: str,
        labels: Sequence[str],
        edges: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._meaning = meaning
        self._labels = labels
        self._edges = tuple(edges)
        self._names = [*map(floatToGoString, self._edges), "+Inf"]
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        registry.register(self)

    def observe(self, labels: Labels, value: float) -> None:
        """Count a value. One that equals an edge is in the bucket below it."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * len(self._names)
            self._sums[labels] = 0.0
        counts[bisect_left(self._edges, value)] += 1
        self._sums[labels] += value

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield HistogramMetricFamily(self._name, self._meaning, labels=self._labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        for family in self.describe():
            for labels, counts in list(self._counts.items()):
                upto = zip(self._names, map(float, accumulate(counts)), strict=True)
                family.add_metric(labels, list(upto), self._sums[labels])
            yield family
