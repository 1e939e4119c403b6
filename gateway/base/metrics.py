"""All metrics of the gateway, in its own registry.

Labels are bounded, and no client can make one: routes are templates, models are those that engines
serve, and workspaces are named only where a setting says how many.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from engine.traces import NO_SPANS, SpanCounts
from gateway.base.turn_metrics import SECONDS, CounterTally, TurnMetrics

_BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}


class EngineState(NamedTuple):
    """One engine's values at this moment."""

    is_ready: bool
    is_draining: bool
    breaker: str
    num_names: int
    model: str | None = None


class _SpanCollector(Collector):
    def __init__(self) -> None:
        self.counts: Callable[[], SpanCounts] = lambda: NO_SPANS

    def collect(self) -> Iterable[Metric]:
        spans = CounterMetricFamily(
            "holdfast_gateway_spans", "Spans of traces, by what became of them", labels=["result"]
        )
        for result, amount in self.counts()._asdict().items():
            spans.add_metric([result], amount)
        yield spans


class Metrics:
    """`num_workspaces` are named in labels, the first ones that come; the others are `other`."""

    def __init__(self, num_workspaces: int = 0) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.turns = TurnMetrics(registry, num_workspaces)
        ProcessCollector(registry=registry)
        self._spans = _SpanCollector()
        registry.register(self._spans)

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"holdfast_gateway_{name}", meaning, labels, registry=registry)

        def gauge(name: str, meaning: str, *labels: str) -> Gauge:
            return Gauge(f"holdfast_gateway_{name}", meaning, labels, registry=registry)

        def tally(name: str, meaning: str, *labels: str) -> CounterTally:
            return CounterTally(f"holdfast_gateway_{name}", meaning, labels, registry)

        self.requests = tally(
            "requests", "HTTP requests by route template and status", "route", "status"
        )
        self.refused_connections = counter(
            "refused_connections",
            "Connections that were closed before or beside any route, by why",
            "reason",
        )
        self.nonces = counter("removed_nonces", "Client nonces that were kept out of prompts")
        self.engine_up = gauge("engine_up", "1 while ready", "engine")
        self.engine_breaker = gauge(
            "engine_breaker", "Circuit breaker: 0 closed, 1 half-open, 2 open", "engine"
        )
        self.engine_draining = gauge("engine_draining", "1 while it gets no new turns", "engine")
        self.engine_names = gauge(
            "engine_names", "Prefixes that routing knows to be held there", "engine"
        )
        self.retries = counter(
            "retries",
            "Turns sent to another engine before their first byte, by what the one before did",
            "reason",
        )
        self.ignored_frames = counter(
            "ignored_frames", "Frames of engines that were late, double or another request's"
        )
        self.prefix_tokens = tally(
            "prefix_tokens",
            "Prompt tokens held by some engine (available), by the chosen one (captured),"
            " and reused (delivered)",
            "stage",
        )
        self.waiting_turns = gauge(
            "waiting_turns", "Turns that wait at the gateway for an engine with room"
        )
        self.waiting_tokens = gauge("waiting_tokens", "What those may use, in tokens by estimate")
        self.bounded_workspaces = gauge(
            "bounded_workspaces",
            "Workspaces with fewer turns at a time, since their clients left before first tokens",
        )
        self.waited_seconds = Histogram(
            "holdfast_gateway_waited_seconds",
            "How long turns waited for an engine with room; those that had not to are not counted",
            buckets=SECONDS,
            registry=registry,
        )
        self.refused = counter(
            "refused_turns",
            "Turns refused because the engines are full: the queue is, or its workspace's share of"
            " it, another workspace's turn was let in, or the time to wait was over",
            "reason",
        )
        self.journal_backlog = gauge(
            "journal_backlog", "Turns in the journal that are not in the ledger yet"
        )
        self.drain_failures = counter(
            "drain_failures", "Failed attempts to copy the journal to the ledger"
        )
        self.journal_bytes = gauge(
            "journal_bytes", "Room that the journal's turns take; new ones are refused at the bound"
        )
        self.journal_max_bytes = gauge("journal_max_bytes", "The journal's bound")
        self.journal_set_aside = gauge(
            "journal_set_aside",
            "Turns in the journal that can't go to the ledger, damaged or refused",
        )
        self.journal_has_room = gauge("journal_has_room", "1 while another turn may be recorded")
        self.journal_damaged = gauge(
            "journal_damaged", "Damaged files of the journal that are kept aside"
        )
        self.loop_restarts = counter(
            "loop_restarts",
            "Loops of the gateway that ended by an exception and were started again",
            "loop",
        )
        self.loops_failing = gauge(
            "loops_failing",
            "Loops that stay down or end again and again; the gateway is not ready meanwhile",
        )
        self.turns_set_aside = counter(
            "turns_set_aside", "Turns that the ledger can't hold; they stay in the journal"
        )
        self.reconciled = counter(
            "reconciled_turns", "Turns closed from the engine's own counts, or given up", "result"
        )

    def show_engines(self, engines: Mapping[str, EngineState]) -> None:
        """Show these engines, by name. A removed engine is no longer shown."""
        gauges = (self.engine_up, self.engine_draining, self.engine_breaker, self.engine_names)
        for gauge in gauges:
            gauge.clear()
        for name, state in engines.items():
            self.engine_up.labels(name).set(state.is_ready)
            self.engine_draining.labels(name).set(state.is_draining)
            self.engine_breaker.labels(name).set(_BREAKER_STATES[state.breaker])
            self.engine_names.labels(name).set(state.num_names)
            self.turns.model_of(state.model)

    def watch_spans(self, counts: Callable[[], SpanCounts]) -> None:
        self._spans.counts = counts

    def count_loop_end(self, kind: str) -> None:
        self.loop_restarts.labels(kind).inc()

    def watch_queue(
        self,
        num_turns: Callable[[], float],
        num_tokens: Callable[[], float],
        num_bounded: Callable[[], float],
    ) -> None:
        self.waiting_turns.set_function(num_turns)
        self.waiting_tokens.set_function(num_tokens)
        self.bounded_workspaces.set_function(num_bounded)

    def watch_journal(
        self,
        backlog: Callable[[], float],
        num_set_aside: Callable[[], float],
        num_bytes: Callable[[], float],
        has_room: Callable[[], bool],
        num_damaged: Callable[[], float],
        max_bytes: int,
    ) -> None:
        self.journal_backlog.set_function(backlog)
        self.journal_set_aside.set_function(num_set_aside)
        self.journal_bytes.set_function(num_bytes)
        self.journal_has_room.set_function(has_room)
        self.journal_damaged.set_function(num_damaged)
        self.journal_max_bytes.set(max_bytes)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
