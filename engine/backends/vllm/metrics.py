"""Leases on vLLM's own /metrics, by engine, and what vLLM tells our books after a step."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.loggers import StatLoggerBase

from engine.backends.vllm.arguments import NAME
from engine.backends.vllm.loop import StepCounts
from engine.backends.vllm.switch import Switch, guarded

GAUGES = {
    "num_leases": ("leases", "Leased cache entries"),
    "num_best_effort": ("best_effort_entries", "Cache entries without a lease"),
    "leased_blocks": ("leased_blocks", "KV blocks that leases hold, each counted once"),
    "max_leased_blocks": ("max_leased_blocks", "KV blocks that leases may hold"),
    "protected_blocks": ("protected_blocks", "KV blocks held for what waiting requests will read"),
}
COUNTERS = {
    "sacrificed": ("leases_sacrificed", "Leases ended because nothing else could run"),
    "yielded": ("leases_yielded", "Leases ended for a scope within its share"),
    "evicted": ("entries_evicted", "Entries whose blocks were reused"),
    "reset": ("entries_reset", "Entries ended by a reset of the prefix cache"),
    "denied": ("leases_denied", "Times that an entry found no room for a lease"),
}


class HoldfastStats(KVConnectorStats):
    """Figures as they are now, and totals since the start: the newest stand for all before."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return HoldfastStats(data={**self.data, **other.data})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class HoldfastPromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self.switch = Switch()
        self._gauges = {key: self._make(self._gauge_cls, *GAUGES[key]) for key in GAUGES}
        self._counters = {key: self._make(self._counter_cls, *COUNTERS[key]) for key in COUNTERS}
        self._totals: dict[tuple[str, int], int] = {}

    @guarded(None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, gauges in self._gauges.items():
            if key in transfer_stats_data:
                gauges[engine_idx].set(transfer_stats_data[key])
        for key, counters in self._counters.items():
            total = transfer_stats_data.get(key, 0)
            counters[engine_idx].inc(max(0, total - self._totals.get((key, engine_idx), 0)))
            self._totals[key, engine_idx] = total

    def _make(self, kind: Any, name: str, text: str) -> dict[int, Any]:
        metric = kind(name=f"vllm:holdfast_{name}", documentation=text, labelnames=self._labelnames)
        return {
            engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
        }


class HoldfastStatLogger(StatLoggerBase):
    """Made by vLLM: of the `vllm.stat_logger_plugins` entry point in a server that somebody else
    started, of `AsyncLLM(stat_loggers=...)` in ours."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.counts = StepCounts()
        self.switch = Switch()
        self.switch.give_back = self._tell

    @guarded(None)
    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        news = getattr(scheduler_stats, "kv_connector_stats", None) or {}
        # A MultiConnector tells the figures of each of its connectors by the connector's name.
        figures = news.get(NAME, news)
        self.counts.running = figures.get("tracked_running", self.counts.running)
        if iteration_stats is not None:
            self.counts.preempted += iteration_stats.num_preempted_reqs

    def _tell(self) -> None:
        self.counts.failure = self.switch.reason

    def log_engine_initialized(self) -> None:
        """There is nothing to tell."""


def find_counts(llm: Any) -> StepCounts | None:
    """Of the logger that an AsyncLLM made; None where it made none."""
    manager = llm.logger_manager
    for logger in () if manager is None else manager.stat_loggers:
        each = getattr(logger, "per_engine_stat_loggers", {}).values()
        for candidate in (logger, *each):
            if isinstance(candidate, HoldfastStatLogger):
                return candidate.counts
    return None
