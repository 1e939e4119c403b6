"""All metrics of the gateway, in its own registry, and what is counted of a closed turn.

Labels are bounded, and no client can make one: routes are templates, models are those that engines
serve, and workspaces are named only where a setting says how many.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
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
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.protocol import WRITE_FIELDS
from engine.protocol.reports import SECONDS_PER_TOKEN, TOKENS_PER_REQUEST, BlockStats, Description
from gateway.base.record import TurnRecord

TABLE = Path(__file__).parents[1] / "monitoring" / "metrics.tsv"
"""Every metric with its type, labels and meaning. Where values stand behind a label, their series
exist from the start, with 0. Metrics without one of the two prefixes below are other programs'."""
_PREFIX = "holdfast_gateway_"
_OF_VLLM = "vllm:"
"""An endpoint picker reads a model server's load by vLLM's names (llm-d's model-server-protocol).
So do boards and autoscalers made for vLLM (`vllm/v1/metrics/loggers.py`). A gateway shows its own
turns and its engines' blocks under these names."""
# OpenTelemetry's names for some histograms (semantic conventions for generative AI), with its
# labels.
_OF_CONVENTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "turn_seconds": ("gen_ai_server_request_duration_seconds", {}),
    "first_token_seconds": ("gen_ai_server_time_to_first_token_seconds", {}),
    "time_per_output_token_seconds": ("gen_ai_server_time_per_output_token_seconds", {}),
    "turn_input_tokens": ("gen_ai_client_token_usage", {"gen_ai_token_type": "input"}),
    "turn_output_tokens": ("gen_ai_client_token_usage", {"gen_ai_token_type": "output"}),
}
_CONVENTIONAL = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "holdfast"}
# vLLM's names for some histograms.
_HISTOGRAMS_OF_VLLM: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "turn_seconds": ("vllm:e2e_request_latency_seconds", {}),
    "first_token_seconds": ("vllm:time_to_first_token_seconds", {}),
    "time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds", {}),
    "turn_input_tokens": ("vllm:request_prompt_tokens", {}),
    "turn_output_tokens": ("vllm:request_generation_tokens", {}),
}
# What a gateway counts and measures by vLLM's names, with its labels. Gauges are of the whole
# gateway: an endpoint picker expects one series of each.
_LABELS_OF_VLLM: Mapping[str, tuple[str, ...]] = {
    "vllm:num_requests_waiting": (),
    "vllm:num_requests_running": (),
    "vllm:kv_cache_usage_perc": (),
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
    "vllm:prefix_cache_hits_total": ("model_name",),
    "vllm:num_preemptions_total": ("model_name",),
}
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
_INPUT_CLASSES = TOKEN_CLASSES.keys() - {"output"}
# vLLM's names for sums of our classes of tokens.
_SUMS_OF_VLLM: Mapping[str, Collection[str]] = {
    "vllm:prompt_tokens": _INPUT_CLASSES,
    "vllm:prefix_cache_queries": _INPUT_CLASSES,
    "vllm:generation_tokens": {"output"},
}
FAULT_OUTCOMES = ("api_error", "timeout_error", "gateway_killed")
"""Outcomes that are a fault of an engine or a gateway, whatever status was sent before.

They are not the failed turns of the ledger (`is_error`): an error may be the client's fault, and a
gateway that was killed answered with none.
"""
MAX_MODELS = 100
MetricT = TypeVar("MetricT", Counter, Histogram)
_UNKNOWN = "unknown"
_OTHER = "other"
_BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}


class EngineState(NamedTuple):
    """One engine's values at this moment."""

    is_ready: bool
    is_draining: bool
    breaker: str
    # How many prefixes the engine holds; None where that is not known.
    num_names: int | None
    model: str | None = None
    description: Description | None = None
    num_running: int = 0
    blocks: BlockStats | None = None
    epoch: str = ""
    # Sequences preempted since the epoch began.
    num_preempted: int = 0


class _RenamingCollector(Collector):
    """Shows some metrics once more, by the names that other programs have for them.

    `names` has the other name of each metric, and labels that come with it. The label `model` is
    called `model_label` there.
    """

    def __init__(
        self,
        sources: Mapping[str, Counter | Histogram],
        names: Mapping[str, tuple[str, Mapping[str, str]]],
        model_label: str,
        labels: Mapping[str, str],
    ) -> None:
        self._sources = sources
        self._names = names
        self._model_label = model_label
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        metrics: dict[str, Metric] = {}
        for source, (name, labels) in self._names.items():
            for metric in self._sources[source].collect():
                family = metrics.setdefault(name, Metric(name, metric.documentation, metric.type))
                for sample in metric.samples:
                    renamed = {**self._labels, **labels, **sample.labels}
                    if "model" in renamed:
                        renamed[self._model_label] = renamed.pop("model")
                    suffix = sample.name.removeprefix(metric.name)
                    family.add_sample(name + suffix, renamed, sample.value)
        return metrics.values()


class _TokensOfVllm(Collector):
    """Shows the counted tokens once more, by vLLM's names for their sums. `meanings` are those of
    all metrics, by their full names."""

    def __init__(self, tokens: Counter, meanings: Mapping[str, str]) -> None:
        self._tokens = tokens
        self._meanings = meanings

    def collect(self) -> Iterable[Metric]:
        sums: dict[tuple[str, str], float] = {}
        for metric in self._tokens.collect():
            for sample in metric.samples:
                for name, classes in _SUMS_OF_VLLM.items():
                    key = name, sample.labels["model"]
                    amount = sample.value if sample.labels["class"] in classes else 0.0
                    sums[key] = sums.get(key, 0.0) + amount
        families = {
            name: CounterMetricFamily(name, self._meanings[f"{name}_total"], labels=["model_name"])
            for name in _SUMS_OF_VLLM
        }
        for (name, model), amount in sums.items():
            families[name].add_metric([model], amount)
        return families.values()


class Metrics:
    """The gateway's metrics.

    The first `num_workspaces` workspaces that come are named in labels. The others are `other`.
    With `as_vllm` some metrics are shown by vLLM's names too.
    """

    def __init__(self, num_workspaces: int = 0, *, as_vllm: bool = True) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._vllm_registry = CollectorRegistry()
        self._as_vllm = as_vllm
        ProcessCollector(registry=self.registry)
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        # `labels()` takes a lock and more time than the counting itself, so each series is kept.
        self._labelled: dict[tuple[str, tuple[str, ...]], Any] = {}
        meanings: dict[str, str] = {}
        for row in TABLE.read_text("utf-8").splitlines():
            if not row.startswith((_PREFIX, _OF_VLLM)):
                continue
            # A single label may have its values behind it: `cache: hit miss`.
            full, kind, labels_text, _, meaning = row.split("\t")
            meanings[full] = meaning
            names_text, _, values_text = labels_text.partition(": ")
            labels = names_text.split(", ") if names_text else []
            values = values_text.split()
            name = full.removeprefix(_PREFIX)
            registry = self.registry
            if full.startswith(_OF_VLLM):
                if full not in _LABELS_OF_VLLM:
                    continue  # shown by a collector below, or an engine's
                labels = list(_LABELS_OF_VLLM[full])
                registry = self._vllm_registry
            if kind == "counter":
                name = name.removesuffix("_total")
                self._counters[name] = Counter(full, meaning, labels, registry=registry)
                for value in values:
                    self.count(name, value, amount=0)
            elif kind == "gauge":
                self._gauges[name] = Gauge(full, meaning, labels, registry=registry)
            else:
                buckets = tuple(_BUCKETS.get(name, _SECONDS))
                histogram = Histogram(full, meaning, labels, buckets=buckets, registry=registry)
                self._histograms[name] = histogram
        self.registry.register(
            _RenamingCollector(
                self._histograms, _OF_CONVENTIONS, "gen_ai_response_model", _CONVENTIONAL
            )
        )
        self._vllm_registry.register(
            _RenamingCollector(self._histograms, _HISTOGRAMS_OF_VLLM, "model_name", {})
        )
        self._vllm_registry.register(_TokensOfVllm(self._counters["tokens"], meanings))
        self._models: set[str] = set()
        self._num_workspaces = num_workspaces
        self._workspaces: set[str] = set()
        self._preempted: dict[tuple[str, str], int] = {}

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        """Add to a counter. A series with labels exists from then on, also with an amount of 0."""
        self._series(self._counters[name], name, labels).inc(amount)

    def observe(self, name: str, value: float, *labels: str) -> None:
        self._series(self._histograms[name], name, labels).observe(value)

    def _series(self, metric: MetricT, name: str, labels: tuple[str, ...]) -> MetricT:
        if not labels:
            return metric
        series = self._labelled.get((name, labels))
        if series is None:
            series = metric.labels(*labels)
            self._labelled[name, labels] = series
        return series

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._gauges[name].set(value)

    def watch(self, **gauges: Callable[[], float]) -> None:
        """Whenever these gauges are shown, ask these functions for their values."""
        for name, value in gauges.items():
            self._gauges[name].set_function(value)

    def show_engines(self, engines: Mapping[str, EngineState]) -> None:
        """Show these engines, by name. A removed engine is no longer shown."""
        up = self._gauges["engine_up"]
        draining = self._gauges["engine_draining"]
        breaker = self._gauges["engine_breaker"]
        names = self._gauges["engine_names"]
        for gauge in (up, draining, breaker, names):
            gauge.clear()
        for name, state in engines.items():
            up.labels(name).set(state.is_ready)
            draining.labels(name).set(state.is_draining)
            breaker.labels(name).set(_BREAKER_STATES[state.breaker])
            if state.num_names is not None:
                names.labels(name).set(state.num_names)
            self._model_of(state.model)
        ready = [state for state in engines.values() if state.is_ready]
        blocks = [state.blocks for state in ready if state.blocks]
        num_in_use = sum(tier.active + tier.leased for tier in blocks)
        num_blocks = sum(tier.total for tier in blocks)
        # An endpoint picker takes the gateway with the most room. A gateway without an engine has
        # no room.
        self.set("vllm:kv_cache_usage_perc", num_in_use / max(num_blocks, 1) if ready else 1.0)
        self.set(
            "vllm:num_requests_running", sum(engine.num_running for engine in engines.values())
        )
        self._count_preempted(engines)
        sizes: dict[int, int] = {}
        for description in (state.description for state in ready):
            if description is not None:
                sizes[description.block_size] = (
                    sizes.get(description.block_size, 0) + description.num_blocks
                )
        config = self._gauges["vllm:cache_config_info"]
        config.clear()
        for size, num_blocks in sizes.items():
            config.labels(str(size), str(num_blocks)).set(1)

    def _count_preempted(self, engines: Mapping[str, EngineState]) -> None:
        """Add what engines preempted since they were last shown. The first time adds nothing."""
        preempted: dict[tuple[str, str], int] = {}
        for name, state in engines.items():
            if not state.epoch:
                continue
            engine = (name, state.epoch)
            preempted[engine] = state.num_preempted
            increase = state.num_preempted - self._preempted.get(engine, state.num_preempted)
            self.count("vllm:num_preemptions", self._model_of(state.model), amount=increase)
        self._preempted = preempted

    def show_conditions(self, numbers: Mapping[tuple[str, str], int]) -> None:
        """Show how many conditions there are, by kind and severity."""
        gauge = self._gauges["conditions"]
        for labels, number in numbers.items():
            gauge.labels(*labels).set(number)

    def count_turn(self, record: TurnRecord) -> None:
        """Count a closed turn. It must be called once for each turn."""
        model = self._model_of(None if record.engine_model is None else record.model)
        self.count("turns", record.outcome, model)
        self.observe("turn_seconds", record.duration_seconds or 0.0, model)
        tokens = {label: getattr(record, name) for label, name in TOKEN_CLASSES.items()}
        for token_class, amount in tokens.items():
            if amount:
                self.count("tokens", token_class, model, amount=amount)
        num_tokens = sum(tokens.values())
        if num_tokens:
            num_input = num_tokens - record.output_tokens
            self.count(
                "vllm:prefix_cache_hits",
                model,
                amount=record.cache_read_tokens + record.automatic_tokens,
            )
            self.observe("turn_input_tokens", num_input, model)
            self.observe("turn_output_tokens", record.output_tokens, model)
        if record.decode_seconds is not None and record.output_tokens > 1:
            seconds = record.decode_seconds / (record.output_tokens - 1)
            self.observe("time_per_output_token_seconds", seconds, model)
        if self._num_workspaces:
            is_named = _has_place(self._workspaces, self._num_workspaces, record.workspace)
            name = record.workspace if is_named else _OTHER
            self.count("workspace_turns", name)
            for token_class, amount in tokens.items():
                self.count("workspace_tokens", token_class, name, amount=amount)

    def count_first_token(self, cache: str, model: str, seconds: float) -> None:
        self.observe("first_token_seconds", seconds, cache, self._model_of(model))

    def _model_of(self, name: str | None) -> str:
        """The label of an engine's model; `unknown` for a turn without an engine."""
        if name in self._models:
            return name
        if name is None or not _has_place(self._models, MAX_MODELS, name):
            return _UNKNOWN
        # Every class exists from the beginning, so that a query that adds them up misses none. So
        # do the outcomes of failures: without a failure their share is 0, and not unknown.
        for token_class in TOKEN_CLASSES:
            self.count("tokens", token_class, name, amount=0)
        for outcome in FAULT_OUTCOMES:
            self.count("turns", outcome, name, amount=0)
        return name

    def exposition(self) -> bytes:
        page = generate_latest(self.registry)
        return page + generate_latest(self._vllm_registry) if self._as_vllm else page


def _has_place(names: set[str], max_names: int, name: str) -> bool:
    """Whether the name is among the first `max_names` that came."""
    if len(names) < max_names:
        names.add(name)
    return name in names
