"""Plain tallies show what prometheus_client's own metrics would show."""

import random

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from gateway.base.metrics import Metrics
from gateway.base.turn_metrics import CounterTally, HistogramTally

_EDGES = (0.005, 0.5, 1, 2.5, 300)


def test_tallies_are_shown_as_the_librarys_metrics_are() -> None:
    Metrics()  # it turns the times of creation off, which tallies do not have
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter = Counter("turns", "Turns\nclosed", ["outcome", "model"], registry=theirs)
    histogram = Histogram("seconds", "Until then", ["model"], buckets=_EDGES, registry=theirs)
    counts = CounterTally("turns", "Turns\nclosed", ["outcome", "model"], ours)
    seconds = HistogramTally("seconds", "Until then", ["model"], _EDGES, ours)
    assert generate_latest(ours) == generate_latest(theirs), "nothing was counted yet"
    counter.labels("end", "idle").inc(0)
    counts.add(("end", "idle"), 0)
    values = [*_EDGES, 0.0, 1e-9, 301.0, *(random.Random(1).expovariate(0.5) for _ in range(500))]
    for number, value in enumerate(values):
        labels = ("end" if number % 3 else "error", f'a "model" {number % 4}')
        counter.labels(*labels).inc(number)
        counts.add(labels, number)
        histogram.labels(labels[1]).observe(value)
        seconds.observe(labels[1:], value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_a_name_is_registered_once() -> None:
    registry = CollectorRegistry()
    CounterTally("turns", "Turns", ["model"], registry)
    try:
        Counter("turns", "Other turns", registry=registry)
    except ValueError as error:
        assert "turns" in str(error)
    else:
        raise AssertionError("two metrics have one name")
