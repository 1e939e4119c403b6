"""All metrics of the gateway, in its own registry: one table, and what is counted of a closed turn.

Labels are bounded, and no client can make one: routes are templates, models are those that engines
serve, and workspaces are named only where a setting says how many.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.protocol import WRITE_FIELDS
from engine.protocol.reports import (
    SECONDS_PER_TOKEN,
    TOKENS_PER_REQUEST,
    BlockStats,
    Description,
)
from gateway.base.record import TurnRecord

# Name, labels, meaning. A series exists from the start, with 0, for each value that stands behind
# a label. The histograms' buckets are in `_BUCKETS`.
_COUNTERS = """
requests | route, status | HTTP requests by route template and status
refused_connections | reason: head_too_large head_timeout too_many malformed made_way
    stalled_reader | Connections that were closed before or beside any route, by why
turns | outcome, model | Turns closed, by outcome and by the model of the engine
tokens | class, model | Tokens by billing class and by the model of the engine; input is neither
    read nor written: reused automatically, or computed
workspace_turns | workspace | Turns closed, by workspace; only with HOLDFAST_METRICS_WORKSPACES
workspace_tokens | class, workspace | Tokens by billing class and workspace; only with
    HOLDFAST_METRICS_WORKSPACES
removed_nonces | | Client nonces that were kept out of prompts
retries | reason: timeout lost failed refused | Turns sent to another engine before their
    first byte, by what the one before did
ignored_frames | | Frames of engines that were late, double or another request's
prefix_tokens | stage: available captured delivered | Prompt tokens held by some engine
    (available), by the chosen one (captured), and reused (delivered)
approximate_turns | method | Turns that were computed behind a compressed prefix or blocks
refused_turns | reason: queue_full workspace_full made_way deadline | Turns refused because the
    engines are full: the queue is, or its workspace's share of it, another workspace's turn was let
    in, or the time to wait was over
forgotten_names | | Names of held prefixes that routing forgot because its index was full
asked_engines | result: found nothing silent | Engines that were asked for a prefix that routing may
    have forgotten, by what they said
drain_failures | | Failed attempts to copy the journal to the ledger
loop_restarts | loop | Loops of the gateway that ended by an exception and were started again
turns_set_aside | | Turns that the ledger can't hold; they stay in the journal
reconciled_turns | result: engine_counts lost retried | Turns closed from the engine's own counts,
    or given up
"""
_GAUGES = """
engine_up | engine | 1 while ready
engine_breaker | engine | Circuit breaker: 0 closed, 1 half-open, 2 open
engine_draining | engine | 1 while it gets no new turns
engine_names | engine | Prefixes that routing knows to be held there
routing_names | | Names of prefixes in the routing index, of all engines together
routing_max_names | | The index's bound
waiting_turns | | Turns that wait at the gateway for an engine with room
waiting_tokens | | What those may use, in tokens by estimate
journal_backlog | | Turns in the journal that are not in the ledger yet
journal_bytes | | Room that the journal's turns take; new ones are refused at the bound
journal_max_bytes | | The journal's bound
journal_set_aside | | Turns in the journal that can't go to the ledger, damaged or refused
journal_has_room | | 1 while another turn may be recorded
journal_damaged | | Damaged files of the journal that are kept aside
loops_failing | | Loops that stay down or end again and again; the gateway is not ready meanwhile
"""
# vLLM's names, by which an endpoint picker reads a model server's load (llm-d's
# model-server-protocol). A pool of gateways has its own turns to tell of, and its engines' blocks.
_SERVER_GAUGES = """
vllm:num_requests_waiting | | Turns that wait at this gateway for an engine with room
vllm:num_requests_running | | Turns of this gateway that engines have
vllm:kv_cache_usage_perc | | Share of the ready engines' KV blocks that no request can take now: in
    use or leased
vllm:cache_config_info | block_size, num_gpu_blocks | 1; the ready engines' KV blocks, by their size
"""
_HISTOGRAMS = """
waited_seconds | | How long turns waited for an engine with room; those that had not to are not
    counted
turn_seconds | model | From arrival to close
first_token_seconds | cache, model | From arrival to the engine's first frame
turn_input_tokens | model | Prompt tokens of a turn, of all classes; turns without tokens are not
    counted
turn_output_tokens | model | Output tokens of the same turns
time_per_output_token_seconds | model | A whole answer's seconds after its first token, for each
    further token
"""
# OpenTelemetry's names for some of them (semantic conventions for generative AI), with its labels.
_OF_CONVENTIONS = {
    "turn_seconds": ("gen_ai_server_request_duration_seconds", {}),
    "first_token_seconds": ("gen_ai_server_time_to_first_token_seconds", {}),
    "time_per_output_token_seconds": ("gen_ai_server_time_per_output_token_seconds", {}),
    "turn_input_tokens": ("gen_ai_client_token_usage", {"gen_ai_token_type": "input"}),
    "turn_output_tokens": ("gen_ai_client_token_usage", {"gen_ai_token_type": "output"}),
}
_CONVENTIONAL = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "holdfast"}
# Prometheus' own buckets up to 10 s, and beyond: cold prompts and long answers take minutes.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# What OpenTelemetry's conventions for generative AI ask for.
_BUCKETS: dict[str, Iterable[float]] = {
    "turn_input_tokens": TOKENS_PER_REQUEST,
    "turn_output_tokens": TOKENS_PER_REQUEST,
    "time_per_output_token_seconds": SECONDS_PER_TOKEN,
}
TOKEN_CLASSES = {
    name.removesuffix("_tokens"): name
    for name in ("input_tokens", "cache_read_tokens", *WRITE_FIELDS.values(), "output_tokens")
}
MAX_MODELS = 100
MetricT = TypeVar("MetricT", Counter, Histogram)
_UNKNOWN, _OTHER = "unknown", "other"
_BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}


class EngineState(NamedTuple):
    """One engine's values at this moment."""

    is_ready: bool
    is_draining: bool
    breaker: str
    num_names: int
    model: str | None = None
    description: Description | None = None
    num_running: int = 0
    blocks: BlockStats | None = None


class _ConventionalCollector(Collector):
    """The histograms that OpenTelemetry has names for, once more by these."""

    def __init__(self, histograms: Mapping[str, Histogram]) -> None:
        self._histograms = histograms

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for own, (name, labels) in _OF_CONVENTIONS.items():
            for metric in self._histograms[own].collect():
                family = found.setdefault(name, Metric(name, metric.documentation, "histogram"))
                for sample in metric.samples:
                    renamed = _CONVENTIONAL | labels | sample.labels
                    if "model" in renamed:
                        renamed["gen_ai_response_model"] = renamed.pop("model")
                    suffix = sample.name.removeprefix(metric.name)
                    family.add_sample(name + suffix, renamed, sample.value)
        return found.values()


class Metrics:
    """`num_workspaces` are named in labels, the first ones that come; the others are `other`."""

    def __init__(self, num_workspaces: int = 0) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._counters = {
            name: Counter(f"holdfast_gateway_{name}", meaning, labels, registry=registry)
            for name, labels, meaning, _ in _rows(_COUNTERS)
        }
        self._gauges = {
            name: Gauge(f"holdfast_gateway_{name}", meaning, labels, registry=registry)
            for name, labels, meaning, _ in _rows(_GAUGES)
        }
        self._gauges |= {
            name: Gauge(name, meaning, labels, registry=registry)
            for name, labels, meaning, _ in _rows(_SERVER_GAUGES)
        }
        self._histograms = {
            name: Histogram(
                f"holdfast_gateway_{name}",
                meaning,
                labels,
                buckets=tuple(_BUCKETS.get(name, _SECONDS)),
                registry=registry,
            )
            for name, labels, meaning, _ in _rows(_HISTOGRAMS)
        }
        registry.register(_ConventionalCollector(self._histograms))
        self._known: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._models: set[str] = set()
        self._num_workspaces = num_workspaces
        for name, _, _, values in _rows(_COUNTERS):
            for value in values:
                self.count(name, value, amount=0)
        self._workspaces: set[str] = set()

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        """Add to a counter. A series with labels exists from then on, also with an amount of 0."""
        self._series(self._counters[name], name, labels).inc(amount)

    def observe(self, name: str, value: float, *labels: str) -> None:
        self._series(self._histograms[name], name, labels).observe(value)

    def _series(self, metric: MetricT, name: str, labels: tuple[str, ...]) -> MetricT:
        """`labels()` takes a lock and more time than the counting itself."""
        if not labels:
            return metric
        if (found := self._known.get((name, labels))) is None:
            found = self._known[name, labels] = metric.labels(*labels)
        return found

    def set(self, name: str, value: float) -> None:
        self._gauges[name].set(value)

    def watch(self, **gauges: Callable[[], float]) -> None:
        """Ask these functions for the values of gauges whenever they are shown."""
        for name, value in gauges.items():
            self._gauges[name].set_function(value)

    def count_loop_ends(self, kind: str, amount: int) -> None:
        self.count("loop_restarts", kind, amount=amount)

    def show_engines(self, engines: Mapping[str, EngineState]) -> None:
        """Show these engines, by name. A removed engine is no longer shown."""
        up, draining, breaker, names = (
            self._gauges[f"engine_{what}"] for what in ("up", "draining", "breaker", "names")
        )
        for gauge in (up, draining, breaker, names):
            gauge.clear()
        for name, state in engines.items():
            up.labels(name).set(state.is_ready)
            draining.labels(name).set(state.is_draining)
            breaker.labels(name).set(_BREAKER_STATES[state.breaker])
            names.labels(name).set(state.num_names)
            self._model_of(state.model)
        ready = [state for state in engines.values() if state.is_ready]
        blocks = [state.blocks for state in ready if state.blocks]
        used = sum(each.active + each.leased for each in blocks)
        self.set("vllm:kv_cache_usage_perc", used / max(sum(each.total for each in blocks), 1))
        self.set("vllm:num_requests_running", sum(each.num_running for each in engines.values()))
        sizes: dict[int, int] = {}
        for told in (state.description for state in ready):
            if told is not None:
                sizes[told.block_size] = sizes.get(told.block_size, 0) + told.num_blocks
        config = self._gauges["vllm:cache_config_info"]
        config.clear()
        for size, num_blocks in sizes.items():
            config.labels(str(size), str(num_blocks)).set(1)

    def count_turn(self, record: TurnRecord) -> None:
        """Count a closed turn. It must be called once for each turn."""
        model = self._model_of(None if record.engine_model is None else record.model)
        self.count("turns", record.outcome, model)
        self.observe("turn_seconds", record.duration_seconds or 0.0, model)
        tokens = {label: getattr(record, name) for label, name in TOKEN_CLASSES.items()}
        for token_class, amount in tokens.items():
            if amount:
                self.count("tokens", token_class, model, amount=amount)
        if num_tokens := sum(tokens.values()):
            self.observe("turn_input_tokens", num_tokens - record.output_tokens, model)
            self.observe("turn_output_tokens", record.output_tokens, model)
        if record.decode_seconds is not None and record.output_tokens > 1:
            seconds = record.decode_seconds / (record.output_tokens - 1)
            self.observe("time_per_output_token_seconds", seconds, model)
        if self._num_workspaces:
            known = _has_place(self._workspaces, self._num_workspaces, record.workspace)
            name = record.workspace if known else _OTHER
            self.count("workspace_turns", name)
            for token_class, amount in tokens.items():
                self.count("workspace_tokens", token_class, name, amount=amount)

    def count_first_token(self, cache: str, model: str, seconds: float) -> None:
        self.observe("first_token_seconds", seconds, cache, self._model_of(model))

    def _model_of(self, name: str | None) -> str:
        """The label of an engine's model by its one name; `unknown` for a turn without engine."""
        if name in self._models:
            return name
        if name is None or not _has_place(self._models, MAX_MODELS, name):
            return _UNKNOWN
        # Every class exists from the beginning, so that a query that adds them up finds none
        # missing.
        for token_class in TOKEN_CLASSES:
            self.count("tokens", token_class, name, amount=0)
        return name

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


def _rows(table: str) -> Iterable[tuple[str, list[str], str, list[str]]]:
    """Name, labels, meaning, and the values of the label. An indented line goes on with a row."""
    for row in table.strip().replace("\n    ", " ").splitlines():
        name, labels, meaning = (cell.strip() for cell in row.split("|"))
        labels, _, values = labels.partition(":")
        yield name, labels.split(", ") if labels else [], meaning, values.split()


def _has_place(known: set[str], most: int, name: str) -> bool:
    """Whether the name is among the first `most` that came."""
    if len(known) < most:
        known.add(name)
    return name in known
