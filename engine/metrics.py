"""The engine's metrics in Prometheus text. Names no tenant and no content.

What a model does has its name as the label `model`, of which an engine has one. (vLLM's own name of
that label is `model_name`.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.protocol import InputUsage
from engine.protocol.reports import (
    LEASE_ENDS,
    Counters,
    Distribution,
    Distributions,
    LeaseStats,
    Stats,
    StoreStats,
)

PREFIX = "holdfast_engine_"
VLLM_PREFIX = "vllm:"
BLOCK_STATES = ("free", "active", "leased", "best_effort", "cached")
TOKEN_CLASSES = {
    name.removesuffix("_tokens"): name for name in (*InputUsage.__struct_fields__, "output_tokens")
}
StatsT = TypeVar("StatsT")


class _Metric(NamedTuple, Generic[StatsT]):
    name: str
    # Reads it off the stats.
    value: Callable[[StatsT], float]
    text: str


_GAUGES: tuple[_Metric[Stats], ...] = (
    _Metric(
        "kv_blocks_shared", lambda s: s.blocks.shared, "KV blocks with more than one reference"
    ),
    _Metric(
        "kv_blocks_foreign",
        lambda s: s.blocks.foreign,
        "Active KV blocks of requests by another way than the gateway's",
    ),
    _Metric("running_sequences", lambda s: s.running, "Sequences being computed"),
    _Metric(
        "foreign_running_sequences",
        lambda s: s.foreign_running,
        "Sequences being computed that came by another way than the gateway's",
    ),
    _Metric("waiting_sequences", lambda s: s.waiting, "Sequences waiting for blocks"),
    _Metric("host_blocks", lambda s: s.host_blocks, "KV blocks in the host tier"),
    _Metric(
        "host_blocks_used", lambda s: s.host_blocks_used, "KV blocks of the host tier with content"
    ),
    _Metric("entries", lambda s: s.num_entries, "Cache entries whose content is in memory"),
    _Metric("leases", lambda s: s.num_leases, "Entries under a lease"),
    _Metric("automatic_entries", lambda s: s.num_automatic, "Entries that nobody asked to lease"),
    _Metric("unacknowledged", lambda s: s.unacknowledged, "Final counts not yet acknowledged"),
)
# Left out where the engine does not tell.
_LEASE_GAUGES: tuple[_Metric[LeaseStats], ...] = (
    _Metric("leased_blocks", lambda s: s.blocks, "Leased KV blocks, each counted once"),
    _Metric("max_leased_blocks", lambda s: s.max_blocks, "The most blocks that may be leased"),
)
# Left out where the engine has no store.
_STORE_GAUGES: tuple[_Metric[StoreStats], ...] = (
    _Metric("store_up", lambda s: s.is_up, "1 where the store can be written"),
    _Metric("store_blocks", lambda s: s.blocks, "KV blocks that the store has room for"),
    _Metric("store_blocks_used", lambda s: s.used_blocks, "KV blocks of the store with a file"),
    _Metric(
        "store_blocks_held", lambda s: s.held_blocks, "KV blocks of entries' copies in the store"
    ),
    _Metric("store_max_bytes", lambda s: s.max_bytes, "Bytes that the store may take on disk"),
    _Metric("store_used_bytes", lambda s: s.used_bytes, "Bytes that the store takes on disk"),
    _Metric("store_leases", lambda s: s.leases, "Leases that outlive a restart"),
    _Metric("store_entries", lambda s: s.entries, "Entries that outlive a restart"),
    _Metric(
        "store_pending_entries", lambda s: s.pending_entries, "Entries not yet written to the store"
    ),
    _Metric(
        "store_queued_bytes", lambda s: s.queued_bytes, "Bytes that wait to be written to the store"
    ),
)
_COUNTERS: tuple[_Metric[Counters], ...] = (
    _Metric("requests", lambda c: c.requests, "Requests whose response began"),
    _Metric(
        "sampling_steps",
        lambda c: c.sampling_steps,
        "Steps that drew tokens, counted for each choice",
    ),
    _Metric("draft_tokens", lambda c: c.draft_tokens, "Tokens that speculation proposed"),
    _Metric(
        "accepted_draft_tokens",
        lambda c: c.accepted_draft_tokens,
        "Proposed tokens that were drawn",
    ),
    _Metric("copied_blocks", lambda c: c.copied_blocks, "Blocks copied on write"),
    _Metric("evicted_blocks", lambda c: c.evicted_blocks, "Blocks whose content made way"),
    _Metric(
        "evicted_entries", lambda c: c.evicted_entries, "Entries that lost content to other content"
    ),
    _Metric("demoted_blocks", lambda c: c.demoted_blocks, "Blocks copied to the host"),
    _Metric("promoted_blocks", lambda c: c.promoted_blocks, "Blocks copied back from the host"),
    _Metric(
        "leases_lowered",
        lambda c: c.leases_lowered,
        "Leases that moved from the device to the store",
    ),
    _Metric(
        "leases_granted",
        lambda c: c.leases_granted,
        "Leases that began, or that the store brought back",
    ),
    _Metric("preempted_requests", lambda c: c.preempted_requests, "Sequences preempted"),
)
# Left out where the engine has no store.
_STORE_COUNTERS: tuple[_Metric[StoreStats], ...] = (
    _Metric(
        "store_written_bytes", lambda s: s.written_bytes, "Bytes of blocks written to the store"
    ),
    _Metric("store_read_bytes", lambda s: s.read_bytes, "Bytes of blocks read from the store"),
    _Metric("store_written_blocks", lambda s: s.written_blocks, "Blocks written to the store"),
    _Metric("store_loaded_blocks", lambda s: s.loaded_blocks, "Blocks brought back from the store"),
    _Metric(
        "store_failed_writes",
        lambda s: s.failed_writes,
        "Files of the store that could not be written",
    ),
    _Metric(
        "store_unsaved_entries",
        lambda s: s.unsaved_entries,
        "Entries that ended unwritten, or found no room",
    ),
    _Metric(
        "store_displaced_entries",
        lambda s: s.displaced_entries,
        "Entries whose copy made way for another workspace's",
    ),
    _Metric(
        "store_restored_leases",
        lambda s: s.restored_leases,
        "Leases of an earlier epoch that are readable again",
    ),
    _Metric(
        "store_lost_leases",
        lambda s: s.lost_leases,
        "Leases of an earlier epoch that are not readable",
    ),
)


class _Families(Collector):
    """Metrics that were made for one scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _counters(metrics: Iterable[_Metric[StatsT]], stats: StatsT) -> Iterator[Metric]:
    for metric in metrics:
        yield CounterMetricFamily(PREFIX + metric.name, metric.text, float(metric.value(stats)))


def _gauges(metrics: Iterable[_Metric[StatsT]], stats: StatsT) -> Iterator[Metric]:
    for metric in metrics:
        yield GaugeMetricFamily(PREFIX + metric.name, metric.text, float(metric.value(stats)))


def _by(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    amounts: Mapping[str, float],
) -> Metric:
    family = kind(PREFIX + name, text, labels=[label])
    for value, amount in amounts.items():
        family.add_metric([value], amount)
    return family


def _histogram(name: str, values: Distribution, text: str) -> Metric:
    edges = [*map(floatToGoString, values.edges), "+Inf"]
    # Prometheus' buckets: each has all values up to its edge.
    buckets = list(zip(edges, map(float, accumulate(values.counts)), strict=True))
    family = HistogramMetricFamily(name, text)
    family.add_metric([], buckets, values.total)
    return family


def _of_stats(stats: Stats) -> Iterable[Metric]:
    counters = stats.counters
    blocks = stats.blocks
    by_state = {state: getattr(blocks, state) for state in BLOCK_STATES}
    yield _by(GaugeMetricFamily, "kv_blocks", "KV blocks by what holds them", "state", by_state)
    by_class = {label: getattr(counters, name) for label, name in TOKEN_CLASSES.items()}
    yield _by(CounterMetricFamily, "tokens", "Tokens by class", "class", by_class)
    ends: dict[str, float] = {end: getattr(counters, f"leases_{end}") for end in LEASE_ENDS}
    yield _by(CounterMetricFamily, "leases_ended", "Leases that ended, by reason", "reason", ends)
    yield from _counters(_COUNTERS, counters)
    text = "Time spent before first tokens"
    yield CounterMetricFamily(PREFIX + "prefill_seconds", text, stats.prefill_seconds)
    yield from _gauges(_GAUGES, stats)
    if stats.leases is not None:
        yield from _gauges(_LEASE_GAUGES, stats.leases)
    if stats.distributions is not None:
        yield from _of_distributions(stats.distributions)
    if stats.store is not None:
        yield from _of_store(stats.store)


def _of_distributions(distributions: Distributions) -> Iterator[Metric]:
    yield _histogram(
        PREFIX + "request_input_tokens",
        distributions.input_tokens,
        "Prompt tokens of a request whose response began",
    )
    yield _histogram(
        PREFIX + "request_output_tokens",
        distributions.output_tokens,
        "Output tokens of a request whose response began, at its end",
    )
    yield _histogram(
        PREFIX + "inter_token_seconds",
        distributions.inter_token_seconds,
        "From one output token of a choice to its next",
    )


def _of_store(store: StoreStats) -> Iterator[Metric]:
    yield from _counters(_STORE_COUNTERS, store)
    yield from _gauges(_STORE_GAUGES, store)
    text = "Files and journal lines of the store that were not what they must be"
    misses = dict(sorted(store.misses.items()))
    yield _by(CounterMetricFamily, "store_misses", text, "reason", misses)
    text = "1 for the reason why the engine runs without the store of its settings"
    refused: dict[str, float] = {store.refused: 1} if store.refused is not None else {}
    yield _by(GaugeMetricFamily, "store_refused", text, "reason", refused)


def _as_vllm(stats: Stats) -> Iterable[Metric]:
    """The counts that vLLM has too, by its names (`vllm/v1/metrics/loggers.py`).

    So vLLM's Grafana board, and programs that read its metrics, show this engine. As in vLLM, all
    of a prompt's tokens are queries of the prefix cache. The reused tokens are its hits, whether
    they were read from an entry or not. A leased block counts as used, because no request can take
    it.
    """
    counters = stats.counters
    blocks = stats.blocks
    reused = counters.cache_read_tokens + counters.automatic_tokens
    for name, amount, text in (
        ("prefix_cache_queries", counters.prompt_tokens, "Prompt tokens of started requests"),
        (
            "prefix_cache_hits",
            reused,
            "Prompt tokens of started requests that were reused from memory",
        ),
        ("prompt_tokens", counters.prompt_tokens, "Prompt tokens of started requests"),
        (
            "prompt_tokens_cached",
            reused,
            "Prompt tokens of started requests that were reused from memory",
        ),
        ("generation_tokens", counters.output_tokens, "Output tokens"),
        ("num_preemptions", counters.preempted_requests, "Sequences preempted"),
    ):
        yield CounterMetricFamily(VLLM_PREFIX + name, text, amount)
    usage = (blocks.active + blocks.leased) / max(blocks.total, 1)
    for name, value, text in (
        ("num_requests_running", stats.running, "Sequences being computed"),
        ("num_requests_waiting", stats.waiting, "Sequences waiting for blocks"),
        ("kv_cache_usage_perc", usage, "Share of KV blocks in use or leased"),
    ):
        yield GaugeMetricFamily(VLLM_PREFIX + name, text, float(value))
    distributions = stats.distributions
    if distributions is not None:
        for name, values, text in (
            ("request_prompt_tokens", distributions.input_tokens, "Prompt tokens of a request"),
            ("request_generation_tokens", distributions.output_tokens, "Output tokens of one"),
            (
                "inter_token_latency_seconds",
                distributions.inter_token_seconds,
                "From one output token of a choice to its next",
            ),
        ):
            yield _histogram(VLLM_PREFIX + name, values, text)


def _label(families: Iterable[Metric], label: str, value: str) -> list[Metric]:
    """The metrics with one more label."""
    labelled = list(families)
    for family in labelled:
        for index, sample in enumerate(family.samples):
            labels = {**sample.labels, label: value}
            family.samples[index] = sample._replace(labels=labels)
    return labelled


def render(
    stats: Stats | None, loop_ends: Mapping[str, int], model: str = "", *, as_vllm: bool = False
) -> bytes:
    """The exposition text of one moment. `stats` is None while the engine has none.

    With `as_vllm` some of the counts are there once more, by vLLM's names.
    """
    registry = CollectorRegistry(auto_describe=False)
    if stats is not None:
        registry.register(_Families(_label(_of_stats(stats), "model", model)))
        if as_vllm:
            registry.register(_Families(_label(_as_vllm(stats), "model_name", model)))
    text = "Loops of the process that ended by an error"
    ends = _by(CounterMetricFamily, "loop_ends", text, "loop", dict(sorted(loop_ends.items())))
    registry.register(_Families([ends]))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
