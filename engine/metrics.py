"""The engine's metrics in Prometheus text. Names no tenant and no content.

What a model does has its name as the label `model`, of which an engine has one. (vLLM's own name of
that label is `model_name`.)
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

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
from engine.protocol.reports import LEASE_ENDS, Distribution, Stats

PREFIX = "holdfast_engine_"
VLLM_PREFIX = "vllm:"
BLOCK_STATES = ("free", "active", "leased", "best_effort", "cached")
TOKEN_CLASSES = {
    name.removesuffix("_tokens"): name for name in (*InputUsage.__struct_fields__, "output_tokens")
}
# One metric a line: its name, its place in `Stats`, and what it is. What an engine does not have is
# None there, and is left out.
_GAUGES = """
kv_blocks_shared blocks.shared KV blocks with more than one reference
kv_blocks_foreign blocks.foreign Active KV blocks of requests by another way than the gateway's
running_sequences running Sequences being computed
foreign_running_sequences foreign_running Those by another way than the gateway's
waiting_sequences waiting Sequences waiting for blocks
host_blocks host_blocks KV blocks in the host tier
host_blocks_used host_blocks_used Those with content
entries num_entries Cache entries whose content is in memory
leases num_leases Entries under a lease
automatic_entries num_automatic Entries that nobody asked to hold
unacknowledged unacknowledged Final counts not yet acknowledged
leased_blocks leases.blocks KV blocks that leases hold, each counted once
max_leased_blocks leases.max_blocks The bound of those
store_up store.is_up 1 where the store can be written
store_blocks store.blocks KV blocks that the store has room for
store_blocks_used store.used_blocks Those with a file
store_blocks_held store.held_blocks Those that entries hold
store_max_bytes store.max_bytes Bytes that it may take on disk
store_used_bytes store.used_bytes Bytes that it takes on disk
store_leases store.leases Leases that outlive a restart
store_entries store.entries Entries that outlive a restart
store_pending_entries store.pending_entries Entries not yet written
store_queued_bytes store.queued_bytes Bytes that wait to be written
"""
_COUNTERS = """
requests counters.requests Requests whose response began
sampling_steps counters.sampling_steps Steps that drew tokens, counted for each choice
draft_tokens counters.draft_tokens Tokens that speculation proposed
accepted_draft_tokens counters.accepted_draft_tokens Those that were drawn
copied_blocks counters.copied_blocks Blocks copied on write
evicted_blocks counters.evicted_blocks Blocks with content reused
evicted_entries counters.evicted_entries Entries that lost content for room
demoted_blocks counters.demoted_blocks Blocks copied to the host
promoted_blocks counters.promoted_blocks Blocks copied back
leases_lowered counters.leases_lowered Leases that moved from the device to the store
leases_granted counters.leases_granted Leases that began, or that the store brought back
preempted_requests counters.preempted_requests Sequences preempted
prefill_seconds prefill_seconds Time spent before first tokens
store_written_bytes store.written_bytes Bytes of blocks written
store_read_bytes store.read_bytes Bytes of blocks read
store_written_blocks store.written_blocks Blocks written
store_loaded_blocks store.loaded_blocks Blocks brought back
store_failed_writes store.failed_writes Files that failed
store_unsaved_entries store.unsaved_entries Entries that ended unwritten, or found no room
store_displaced_entries store.displaced_entries Entries whose copy made way for another workspace's
store_restored_leases store.restored_leases Leases of an earlier epoch that are readable again
store_lost_leases store.lost_leases Those that are not
"""
_HISTOGRAMS = """
request_input_tokens distributions.input_tokens Prompt tokens of a request whose response began
request_output_tokens distributions.output_tokens Output tokens of such a request at its end
inter_token_seconds distributions.inter_token_seconds From one output token of a choice to its next
"""


class _Families(Collector):
    """Metrics that were made for one scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _of_table(table: str, stats: Stats) -> Iterable[tuple[str, Any, str]]:
    """The lines of a table whose values are there."""
    for line in table.strip().splitlines():
        name, place, text = line.split(maxsplit=2)
        value: Any = stats
        for part in place.split("."):
            value = getattr(value, part, None)
        if value is not None:
            yield PREFIX + name, value, text


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
    for name, amount, text in _of_table(_COUNTERS, stats):
        yield CounterMetricFamily(name, text, amount)
    for name, value, text in _of_table(_GAUGES, stats):
        yield GaugeMetricFamily(name, text, float(value))
    for name, values, text in _of_table(_HISTOGRAMS, stats):
        yield _histogram(name, values, text)
    store = stats.store
    if store is not None:
        text = "Files and journal lines of the store that were not what they must be"
        misses = dict(sorted(store.misses.items()))
        yield _by(CounterMetricFamily, "store_misses", text, "reason", misses)
        text = "1 for the reason why the engine runs without the store of its settings"
        refused: dict[str, float] = {store.refused: 1} if store.refused is not None else {}
        yield _by(GaugeMetricFamily, "store_refused", text, "reason", refused)


def _as_vllm(stats: Stats) -> Iterable[Metric]:
    """What vLLM tells of itself by these names too (`vllm/v1/metrics/loggers.py`), so that its
    Grafana board and what reads its metrics show this engine.

    As there, a prompt's tokens are all queries of the prefix cache, and those that were reused are
    its hits, read or not. What a lease holds is used: no request can take it.
    """
    counters = stats.counters
    blocks = stats.blocks
    reused = counters.cache_read_tokens + counters.automatic_tokens
    for name, amount, text in (
        ("prefix_cache_queries", counters.prompt_tokens, "Prompt tokens of started requests"),
        ("prefix_cache_hits", reused, "Those of them that were reused from memory"),
        ("prompt_tokens", counters.prompt_tokens, "Prompt tokens of started requests"),
        ("prompt_tokens_cached", reused, "Those of them that were reused from memory"),
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
    """The same with one label more."""
    labelled = list(families)
    for family in labelled:
        for index, sample in enumerate(family.samples):
            labels = {**sample.labels, label: value}
            family.samples[index] = sample._replace(labels=labels)
    return labelled


def render(
    stats: Stats | None, loop_ends: Mapping[str, int], model: str = "", *, as_vllm: bool = False
) -> bytes:
    """The exposition text of one moment. `stats` is None while the engine has none. `as_vllm`: some
    of it once more, by the names of vLLM."""
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
