"""What vLLM tells our books after a step. Leases are told on our own /metrics."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.loggers import StatLoggerBase

from engine.backends.vllm.arguments import NAME
from engine.backends.vllm.loop import StepCounts
from engine.backends.vllm.switch import Switch, guarded


class HoldfastStats(KVConnectorStats):
    """Figures as they are now: the newest stand for all before."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return HoldfastStats(data={**self.data, **other.data})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class NoMetrics(KVConnectorPromMetrics):
    """A MultiConnector asks each connector that has statistics for such."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        return


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
