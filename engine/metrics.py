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
    Counters,
    Distribution,
    InputUsage,
    LeaseStats,
    Stats,
    StoreStats,
)
from engine.traces import NO_SPANS, SpanCounts

PREFIX = "holdfast_engine_"
BLOCK_STATES = ("free", "active", "leased", "best_effort", "cached")
LEASE_ENDS = ("expired", "sacrificed", "yielded", "dropped", "damaged")
TOKEN_CLASSES = {
    name.removesuffix("_tokens"): name for name in (*InputUsage.__struct_fields__, "output_tokens")
}
# Of each struct: the metric's name, the field, and what it counts. Values that are None are left
# out: bounds that an engine does not have.
_Table = tuple[tuple[str, str, str], ...]
_WORK: _Table = (
    ("requests", "requests", "Requests whose response began"),
    ("sampling_steps", "sampling_steps", "Steps that drew tokens, counted for each choice"),
    ("draft_tokens", "draft_tokens", "Tokens that speculation proposed"),
    ("accepted_draft_tokens", "accepted_draft_tokens", "Those that were drawn"),
    ("copied_blocks", "copied_blocks", "Blocks copied on write"),
    ("evicted_blocks", "evicted_blocks", "Blocks with content reused"),
    ("evicted_entries", "evicted_entries", "Entries that lost content for room"),
    ("demoted_blocks", "demoted_blocks", "Blocks copied to the host"),
    ("promoted_blocks", "promoted_blocks", "Blocks copied back"),
    (
        "idle_leases_yielded",
        "leases_yielded_idle",
        "Leases that ended because idle ones held more than they may",
    ),
    ("leases_lowered", "leases_lowered", "Leases that moved from the device to the store"),
    ("preempted_requests", "preempted_requests", "Sequences preempted"),
)
_SECONDS: _Table = (("prefill_seconds", "prefill_seconds", "Time spent before first tokens"),)
_PRESENT: _Table = (
    ("running_sequences", "running", "Sequences being computed"),
    (
        "foreign_running_sequences",
        "foreign_running",
        "Those by another way than the gateway's",
    ),
    ("waiting_sequences", "waiting", "Sequences waiting for blocks"),
    ("host_blocks", "host_blocks", "KV blocks in the host tier"),
    ("host_blocks_used", "host_blocks_used", "Those with content"),
    ("entries", "num_entries", "Cache entries whose content is in memory"),
    ("leases", "num_leases", "Entries under a lease"),
    ("unacknowledged", "unacknowledged", "Final counts not yet acknowledged"),
)
_POOL: _Table = (
    ("kv_blocks_shared", "shared", "KV blocks with more than one reference"),
    (
        "kv_blocks_foreign",
        "foreign",
        "Active KV blocks of requests by another way than the gateway's",
    ),
)
_LEASES: _Table = (
    ("leased_blocks", "blocks", "KV blocks that leases hold, each counted once"),
    ("max_leased_blocks", "max_blocks", "The bound of those"),
    (
        "idle_leased_blocks",
        "idle_blocks",
        "KV blocks that only leases hold which nobody used for five minutes",
    ),
    ("max_idle_leased_blocks", "max_idle_blocks", "The bound of those"),
)
_HISTOGRAMS: _Table = (
    (
        "request_input_tokens",
        "input_tokens",
        "Prompt tokens of a request whose response began",
    ),
    (
        "request_output_tokens",
        "output_tokens",
        "Output tokens of such a request, when it has ended",
    ),
    (
        "inter_token_seconds",
        "inter_token_seconds",
        "From one output token of a choice to its next",
    ),
)
_STORE_PRESENT: _Table = (
    ("store_up", "is_up", "1 where the store can be written"),
    ("store_blocks", "blocks", "KV blocks that the store has room for"),
    ("store_blocks_used", "used_blocks", "Those with a file"),
    ("store_blocks_held", "held_blocks", "Those that entries hold"),
    ("store_max_bytes", "max_bytes", "Bytes that it may take on disk"),
    ("store_used_bytes", "used_bytes", "Bytes that it takes on disk"),
    ("store_leases", "leases", "Leases that outlive a restart"),
    ("store_entries", "entries", "Entries that outlive a restart"),
    ("store_pending_entries", "pending_entries", "Entries not yet written"),
    ("store_queued_bytes", "queued_bytes", "Bytes that wait to be written"),
)
_STORE_WORK: _Table = (
    ("store_written_bytes", "written_bytes", "Bytes of blocks written"),
    ("store_read_bytes", "read_bytes", "Bytes of blocks read"),
    ("store_written_blocks", "written_blocks", "Blocks written"),
    ("store_loaded_blocks", "loaded_blocks", "Blocks brought back"),
    ("store_failed_writes", "failed_writes", "Files that failed"),
    (
        "store_unsaved_entries",
        "unsaved_entries",
        "Entries that ended before they were written, or found no room",
    ),
    (
        "store_displaced_entries",
        "displaced_entries",
        "Entries whose copy made way for another workspace's",
    ),
    (
        "store_restored_leases",
        "restored_leases",
        "Leases of an earlier epoch that are readable again",
    ),
    ("store_lost_leases", "lost_leases", "Those that are not"),
)
_Struct = Counters | Stats | BlockStats | LeaseStats | StoreStats


class _Families(Collector):
    """Metrics that were made for one scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _counters(table: _Table, struct: _Struct) -> Iterable[Metric]:
    for name, field, text in table:
        yield CounterMetricFamily(PREFIX + name, text, getattr(struct, field))


def _gauges(table: _Table, struct: _Struct) -> Iterable[Metric]:
    for name, field, text in table:
        if (value := getattr(struct, field)) is not None:
            yield GaugeMetricFamily(PREFIX + name, text, float(value))


def _counter_by(name: str, text: str, label: str, amounts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value, amount in amounts.items():
        family.add_metric([value], amount)
    return family


def _gauge_by(name: str, text: str, label: str, amounts: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=[label])
    for value, amount in amounts.items():
        family.add_metric([value], amount)
    return family


def _of_stats(stats: Stats) -> Iterable[Metric]:
    counters, blocks = stats.counters, stats.blocks
    by_state = {state: getattr(blocks, state) for state in BLOCK_STATES}
    yield _gauge_by("kv_blocks", "KV blocks by what holds them", "state", by_state)
    yield from _gauges(_POOL, blocks)
    by_class = {label: getattr(counters, name) for label, name in TOKEN_CLASSES.items()}
    yield _counter_by("tokens", "Tokens by class", "class", by_class)
    ends = {reason: getattr(counters, f"leases_{reason}") for reason in LEASE_ENDS}
    yield _counter_by("leases_ended", "Leases that ended, by reason", "reason", ends)
    yield from _counters(_WORK, counters)
    yield from _counters(_SECONDS, stats)
    yield from _gauges(_PRESENT, stats)
    if stats.leases is not None:
        yield from _gauges(_LEASES, stats.leases)
    if stats.distributions is not None:
        for name, field, text in _HISTOGRAMS:
            values: Distribution = getattr(stats.distributions, field)
            edges = [*map(floatToGoString, values.edges), "+Inf"]
            # Prometheus' buckets: each has all values up to its edge.
            buckets = list(zip(edges, map(float, accumulate(values.counts)), strict=True))
            family = HistogramMetricFamily(PREFIX + name, text)
            family.add_metric([], buckets, values.total)
            yield family
    if (store := stats.store) is not None:
        text = "Files and journal lines of the store that were not what they must be"
        misses = dict(sorted(store.misses.items()))
        yield _counter_by("store_misses", text, "reason", misses)
        text = "1 for the reason why the engine runs without the store of its settings"
        refused: dict[str, float] = {store.refused: 1} if store.refused is not None else {}
        yield _gauge_by("store_refused", text, "reason", refused)
        yield from _gauges(_STORE_PRESENT, store)
        yield from _counters(_STORE_WORK, store)


def render(
    stats: Stats | None, loop_ends: Mapping[str, int], spans: SpanCounts = NO_SPANS, model: str = ""
) -> bytes:
    """The exposition text of one moment. `stats` is None while the engine has none."""
    registry = CollectorRegistry(auto_describe=False)
    if stats is not None:
        families = list(_of_stats(stats))
        for family in families:
            for index, sample in enumerate(family.samples):
                labels = {**sample.labels, "model": model}
                family.samples[index] = sample._replace(labels=labels)
        registry.register(_Families(families))
    text = "Loops of the process that ended by an error"
    ends = _counter_by("loop_ends", text, "loop", dict(sorted(loop_ends.items())))
    text = "Spans of traces, by what became of them"
    sent = _counter_by("spans", text, "result", spans._asdict())
    registry.register(_Families([ends, sent]))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
