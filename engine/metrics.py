"""The engine's metrics in Prometheus text. Names no tenant and no content.

What a model does has its name as the label `model`, of which an engine has one.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.protocol import (
    BlockStats,
    Distribution,
    Distributions,
    InputUsage,
    LeaseStats,
    Stats,
    StoreStats,
)
from engine.traces import NO_SPANS, SpanCounts

BLOCK_STATES = ("free", "active", "leased", "best_effort", "cached")
TOKEN_CLASSES = {
    name.removesuffix("_tokens"): name for name in (*InputUsage.__struct_fields__, "output_tokens")
}


class _StatsCollector(Collector):
    def __init__(self, stats: Stats, model: str) -> None:
        self._stats = stats
        self._model = model

    def collect(self) -> Iterable[Metric]:
        for family in self._families():
            for index, sample in enumerate(family.samples):
                labels = {**sample.labels, "model": self._model}
                family.samples[index] = sample._replace(labels=labels)
            yield family

    def _families(self) -> Iterable[Metric]:
        stats, counters = self._stats, self._stats.counters
        yield from _pool(stats.blocks)
        tokens = CounterMetricFamily("holdfast_engine_tokens", "Tokens by class", labels=["class"])
        for label, name in TOKEN_CLASSES.items():
            tokens.add_metric([label], getattr(counters, name))
        yield tokens
        ended = CounterMetricFamily(
            "holdfast_engine_leases_ended", "Leases that ended, by reason", labels=["reason"]
        )
        for reason in ("expired", "sacrificed", "yielded", "dropped", "damaged"):
            ended.add_metric([reason], getattr(counters, f"leases_{reason}"))
        yield ended
        yield from _work(stats)
        yield from _present(stats)
        if stats.leases is not None:
            yield from _lease_budget(stats.leases)
        if stats.distributions is not None:
            yield from _histograms(stats.distributions)
        if stats.store is not None:
            yield from _store(stats.store)


def _work(stats: Stats) -> Iterable[Metric]:
    """What was done since the start."""
    for name, text, value in (
        ("holdfast_engine_requests", "Requests whose response began", stats.counters.requests),
        (
            "holdfast_engine_sampling_steps",
            "Steps that drew tokens, counted for each choice",
            stats.counters.sampling_steps,
        ),
        (
            "holdfast_engine_draft_tokens",
            "Tokens that speculation proposed",
            stats.counters.draft_tokens,
        ),
        (
            "holdfast_engine_accepted_draft_tokens",
            "Those that were drawn",
            stats.counters.accepted_draft_tokens,
        ),
        ("holdfast_engine_copied_blocks", "Blocks copied on write", stats.counters.copied_blocks),
        (
            "holdfast_engine_evicted_blocks",
            "Blocks with content reused",
            stats.counters.evicted_blocks,
        ),
        (
            "holdfast_engine_evicted_entries",
            "Entries that lost content for room",
            stats.counters.evicted_entries,
        ),
        (
            "holdfast_engine_demoted_blocks",
            "Blocks copied to the host",
            stats.counters.demoted_blocks,
        ),
        ("holdfast_engine_promoted_blocks", "Blocks copied back", stats.counters.promoted_blocks),
        (
            "holdfast_engine_idle_leases_yielded",
            "Leases that ended because idle ones held more than they may",
            stats.counters.leases_yielded_idle,
        ),
        (
            "holdfast_engine_leases_lowered",
            "Leases that moved from the device to the store",
            stats.counters.leases_lowered,
        ),
        (
            "holdfast_engine_preempted_requests",
            "Sequences preempted",
            stats.counters.preempted_requests,
        ),
        (
            "holdfast_engine_prefill_seconds",
            "Time spent before first tokens",
            stats.prefill_seconds,
        ),
    ):
        yield CounterMetricFamily(name, text, value)


def _present(stats: Stats) -> Iterable[Metric]:
    """What is so at this moment."""
    for name, text, value in (
        ("holdfast_engine_running_sequences", "Sequences being computed", stats.running),
        (
            "holdfast_engine_foreign_running_sequences",
            "Those by another way than the gateway's",
            stats.foreign_running,
        ),
        ("holdfast_engine_waiting_sequences", "Sequences waiting for blocks", stats.waiting),
        ("holdfast_engine_host_blocks", "KV blocks in the host tier", stats.host_blocks),
        ("holdfast_engine_host_blocks_used", "Those with content", stats.host_blocks_used),
        (
            "holdfast_engine_entries",
            "Cache entries whose content is in memory",
            stats.num_entries,
        ),
        ("holdfast_engine_leases", "Entries under a lease", stats.num_leases),
        (
            "holdfast_engine_unacknowledged",
            "Final counts not yet acknowledged",
            stats.unacknowledged,
        ),
    ):
        yield GaugeMetricFamily(name, text, value)


def _pool(found: BlockStats) -> Iterable[Metric]:
    """The pool's blocks by what holds them, and what cuts across."""
    blocks = GaugeMetricFamily(
        "holdfast_engine_kv_blocks", "KV blocks by what holds them", labels=["state"]
    )
    for state in BLOCK_STATES:
        blocks.add_metric([state], getattr(found, state))
    yield blocks
    yield GaugeMetricFamily(
        "holdfast_engine_kv_blocks_shared", "KV blocks with more than one reference", found.shared
    )
    yield GaugeMetricFamily(
        "holdfast_engine_kv_blocks_foreign",
        "Active KV blocks of requests by another way than the gateway's",
        found.foreign,
    )


def _lease_budget(leases: LeaseStats) -> Iterable[Metric]:
    """The lease budget's metrics. Bounds that the engine does not have are left out."""
    for name, text, value in (
        (
            "holdfast_engine_leased_blocks",
            "KV blocks that leases hold, each counted once",
            leases.blocks,
        ),
        ("holdfast_engine_max_leased_blocks", "The bound of those", leases.max_blocks),
        (
            "holdfast_engine_idle_leased_blocks",
            "KV blocks that only leases hold which nobody used for five minutes",
            leases.idle_blocks,
        ),
        ("holdfast_engine_max_idle_leased_blocks", "The bound of those", leases.max_idle_blocks),
    ):
        if value is not None:
            yield GaugeMetricFamily(name, text, value)


def _histograms(found: Distributions) -> Iterable[Metric]:
    for name, text, values in (
        (
            "holdfast_engine_request_input_tokens",
            "Prompt tokens of a request whose response began",
            found.input_tokens,
        ),
        (
            "holdfast_engine_request_output_tokens",
            "Output tokens of such a request, when it has ended",
            found.output_tokens,
        ),
        (
            "holdfast_engine_inter_token_seconds",
            "From one output token of a choice to its next",
            found.inter_token_seconds,
        ),
    ):
        family = HistogramMetricFamily(name, text)
        family.add_metric([], _cumulative(values), values.total)
        yield family


def _cumulative(values: Distribution) -> list[tuple[str, float]]:
    """Prometheus' buckets: each has all values up to its edge."""
    edges = [*map(floatToGoString, values.edges), "+Inf"]
    return list(zip(edges, map(float, accumulate(values.counts)), strict=True))


def _store(store: StoreStats) -> Iterable[Metric]:
    """The store's metrics, where the engine has one."""
    misses = CounterMetricFamily(
        "holdfast_engine_store_misses",
        "Files and journal lines of the store that were not what they must be",
        labels=["reason"],
    )
    for reason, amount in sorted(store.misses.items()):
        misses.add_metric([reason], amount)
    yield misses
    refused = GaugeMetricFamily(
        "holdfast_engine_store_refused",
        "1 for the reason why the engine runs without the store of its settings",
        labels=["reason"],
    )
    if store.refused is not None:
        refused.add_metric([store.refused], 1)
    yield refused
    yield from _store_gauges(store)
    yield from _store_counters(store)


def _store_gauges(store: StoreStats) -> Iterable[Metric]:
    for name, text, value in (
        ("holdfast_engine_store_up", "1 where the store can be written", int(store.is_up)),
        ("holdfast_engine_store_blocks", "KV blocks that the store has room for", store.blocks),
        ("holdfast_engine_store_blocks_used", "Those with a file", store.used_blocks),
        ("holdfast_engine_store_blocks_held", "Those that entries hold", store.held_blocks),
        ("holdfast_engine_store_max_bytes", "Bytes that it may take on disk", store.max_bytes),
        ("holdfast_engine_store_used_bytes", "Bytes that it takes on disk", store.used_bytes),
        ("holdfast_engine_store_leases", "Leases that outlive a restart", store.leases),
        ("holdfast_engine_store_entries", "Entries that outlive a restart", store.entries),
        ("holdfast_engine_store_pending_entries", "Entries not yet written", store.pending_entries),
        ("holdfast_engine_store_queued_bytes", "Bytes that wait to be written", store.queued_bytes),
        (
            "holdfast_engine_store_clock_moved_seconds",
            "How far the wall clock was moved before the start",
            store.clock_moved_seconds,
        ),
    ):
        yield GaugeMetricFamily(name, text, value)


def _store_counters(store: StoreStats) -> Iterable[Metric]:
    for name, text, value in (
        ("holdfast_engine_store_written_bytes", "Bytes of blocks written", store.written_bytes),
        ("holdfast_engine_store_read_bytes", "Bytes of blocks read", store.read_bytes),
        ("holdfast_engine_store_written_blocks", "Blocks written", store.written_blocks),
        ("holdfast_engine_store_loaded_blocks", "Blocks brought back", store.loaded_blocks),
        ("holdfast_engine_store_failed_writes", "Files that failed", store.failed_writes),
        (
            "holdfast_engine_store_unsaved_entries",
            "Entries that ended before they were written, or found no room",
            store.unsaved_entries,
        ),
        (
            "holdfast_engine_store_displaced_entries",
            "Entries whose copy made way for another workspace's",
            store.displaced_entries,
        ),
        (
            "holdfast_engine_store_restored_leases",
            "Leases of an earlier epoch that are readable again",
            store.restored_leases,
        ),
        ("holdfast_engine_store_lost_leases", "Those that are not", store.lost_leases),
    ):
        yield CounterMetricFamily(name, text, value)


class _LoopCollector(Collector):
    def __init__(self, ends: Mapping[str, int]) -> None:
        self._ends = ends

    def collect(self) -> Iterable[Metric]:
        ended = CounterMetricFamily(
            "holdfast_engine_loop_ends",
            "Loops of the process that ended by an error",
            labels=["loop"],
        )
        for name, amount in sorted(self._ends.items()):
            ended.add_metric([name], amount)
        yield ended


class _SpanCollector(Collector):
    def __init__(self, spans: SpanCounts) -> None:
        self._spans = spans

    def collect(self) -> Iterable[Metric]:
        spans = CounterMetricFamily(
            "holdfast_engine_spans", "Spans of traces, by what became of them", labels=["result"]
        )
        for result, amount in self._spans._asdict().items():
            spans.add_metric([result], amount)
        yield spans


def render(
    stats: Stats | None, loop_ends: Mapping[str, int], spans: SpanCounts = NO_SPANS, model: str = ""
) -> bytes:
    """The exposition text of one moment. `stats` is None while the engine has none."""
    registry = CollectorRegistry(auto_describe=False)
    if stats is not None:
        registry.register(_StatsCollector(stats, model))
    registry.register(_LoopCollector(loop_ends))
    registry.register(_SpanCollector(spans))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
