"""Leases on vLLM's own /metrics, by engine: gauges of what is held, counters of what was lost."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

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
