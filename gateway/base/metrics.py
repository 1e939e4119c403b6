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


class QueueMetrics:
    """Of the queue in front of the engines: the process has them that has the queue."""

    registry: CollectorRegistry

    def _add_queue(self) -> None:
        self.waiting_turns = Gauge(
            "holdfast_gateway_waiting_turns",
            "Turns that wait at the gateway for an engine with room",
            registry=self.registry,
        )
        self.waiting_tokens = Gauge(
            "holdfast_gateway_waiting_tokens",
            "What those may use, in tokens by estimate",
            registry=self.registry,
        )
        self.bounded_workspaces = Gauge(
            "holdfast_gateway_bounded_workspaces",
            "Workspaces with fewer turns at a time, since their clients left before first tokens",
            registry=self.registry,
        )
        self.waited_seconds = Histogram(
            "holdfast_gateway_waited_seconds",
            "How long turns waited for an engine with room; those that had not to are not counted",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.refused = Counter(
            "holdfast_gateway_refused_turns",
            "Turns refused because the engines are full: the queue is, or its workspace's share of"
            " it, another workspace's turn was let in, or the time to wait was over",
            ["reason"],
            registry=self.registry,
        )

    def watch_queue(
        self,
        num_turns: Callable[[], float],
        num_tokens: Callable[[], float],
        num_bounded: Callable[[], float],
    ) -> None:
        self.waiting_turns.set_function(num_turns)
        self.waiting_tokens.set_function(num_tokens)
        self.bounded_workspaces.set_function(num_bounded)


class Metrics(QueueMetrics):
    """`num_workspaces` are named in labels, the first ones that come; the others are `other`."""

    def __init__(self, num_workspaces: int = 0) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.turns = TurnMetrics(self.registry, num_workspaces)
        ProcessCollector(registry=self.registry)
        self._spans = _SpanCollector()
        self.registry.register(self._spans)
        self.requests = CounterTally(
            "holdfast_gateway_requests",
            "HTTP requests by route template and status",
            ["route", "status"],
            self.registry,
        )
        self.refused_connections = Counter(
            "holdfast_gateway_refused_connections",
            "Connections that were closed before or beside any route, by why",
            ["reason"],
            registry=self.registry,
        )
        self.nonces = Counter(
            "holdfast_gateway_removed_nonces",
            "Client nonces that were kept out of prompts",
            registry=self.registry,
        )
        self.engine_up = Gauge(
            "holdfast_gateway_engine_up", "1 while ready", ["engine"], registry=self.registry
        )
        self._add_routing()
        self._add_queue()
        self._add_journal()
        self.reconciled = Counter(
            "holdfast_gateway_reconciled_turns",
            "Turns closed from the engine's own counts, or given up",
            ["result"],
            registry=self.registry,
        )

    def _add_routing(self) -> None:
        self.engine_breaker = Gauge(
            "holdfast_gateway_engine_breaker",
            "Circuit breaker: 0 closed, 1 half-open, 2 open",
            ["engine"],
            registry=self.registry,
        )
        self.engine_draining = Gauge(
            "holdfast_gateway_engine_draining",
            "1 while it gets no new turns",
            ["engine"],
            registry=self.registry,
        )
        self.engine_names = Gauge(
            "holdfast_gateway_engine_names",
            "Prefixes that routing knows to be held there",
            ["engine"],
            registry=self.registry,
        )
        self.retries = Counter(
            "holdfast_gateway_retries",
            "Turns sent to another engine before their first byte, by what the one before did",
            ["reason"],
            registry=self.registry,
        )
        self.ignored_frames = Counter(
            "holdfast_gateway_ignored_frames",
            "Frames of engines that were late, double or another request's",
            registry=self.registry,
        )
        self.prefix_tokens = CounterTally(
            "holdfast_gateway_prefix_tokens",
            "Prompt tokens held by some engine (available), by the chosen one (captured),"
            " and reused (delivered)",
            ["stage"],
            self.registry,
        )

    def _add_journal(self) -> None:
        self.journal_backlog = Gauge(
            "holdfast_gateway_journal_backlog",
            "Turns in the journal that are not in the ledger yet",
            registry=self.registry,
        )
        self.drain_failures = Counter(
            "holdfast_gateway_drain_failures",
            "Failed attempts to copy the journal to the ledger",
            registry=self.registry,
        )
        self.journal_bytes = Gauge(
            "holdfast_gateway_journal_bytes",
            "Room that the journal's turns take; new ones are refused at the bound",
            registry=self.registry,
        )
        self.journal_max_bytes = Gauge(
            "holdfast_gateway_journal_max_bytes", "The journal's bound", registry=self.registry
        )
        self.journal_set_aside = Gauge(
            "holdfast_gateway_journal_set_aside",
            "Turns in the journal that can't go to the ledger, damaged or refused",
            registry=self.registry,
        )
        self.journal_has_room = Gauge(
            "holdfast_gateway_journal_has_room",
            "1 while another turn may be recorded",
            registry=self.registry,
        )
        self.journal_damaged = Gauge(
            "holdfast_gateway_journal_damaged",
            "Damaged files of the journal that are kept aside",
            registry=self.registry,
        )
        self.loop_restarts = Counter(
            "holdfast_gateway_loop_restarts",
            "Loops of the gateway that ended by an exception and were started again",
            ["loop"],
            registry=self.registry,
        )
        self.loops_failing = _loops_failing(self.registry)
        self.turns_set_aside = Counter(
            "holdfast_gateway_turns_set_aside",
            "Turns that the ledger can't hold; they stay in the journal",
            registry=self.registry,
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


def _loops_failing(registry: CollectorRegistry) -> Gauge:
    return Gauge(
        "holdfast_gateway_loops_failing",
        "Loops that stay down or end again and again; the gateway is not ready meanwhile",
        registry=registry,
    )
