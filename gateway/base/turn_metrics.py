"""The metrics of turns, by the model of the engine that served them.

prometheus_client takes a lock for each number and looks at a histogram's buckets one by one. That
takes four times as long as `CounterTally` and `HistogramTally` do. Only the event loop changes
their numbers, so they need no lock.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.protocol import SECONDS_PER_TOKEN, TOKENS_PER_REQUEST, WRITE_FIELDS
from gateway.base.record import TurnRecord

TOKEN_CLASSES = {
    name.removesuffix("_tokens"): name
    for name in ("input_tokens", "cache_read_tokens", *WRITE_FIELDS.values(), "output_tokens")
}
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Prometheus' own buckets up to 10 s, and beyond: cold prompts and long answers take minutes."""
MAX_MODELS = 100
UNKNOWN, OTHER = "unknown", "other"


Labels = tuple[str, ...]


class CounterTally(Collector):
    """A counter with labels. A child exists from its first `add` on, also of 0."""

    def __init__(
        self, name: str, meaning: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._meaning = meaning
        self._labels = labels
        self._values: dict[Labels, float] = {}
        registry.register(self)

    def add(self, labels: Labels, amount: float = 1) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount

    def describe(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._meaning, labels=self._labels)

    def collect(self) -> Iterator[CounterMetricFamily]:
        for family in self.describe():
            for labels, value in list(self._values.items()):
                family.add_metric(labels, value)
            yield family


class HistogramTally(Collector):
    """A histogram with labels. `edges` are the upper edges of its buckets, in order."""

    def __init__(
        self,
        name: str,
        meaning: str,
        labels: Sequence[str],
        edges: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._meaning = meaning
        self._labels = labels
        self._edges = tuple(edges)
        self._names = [*map(floatToGoString, self._edges), "+Inf"]
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        registry.register(self)

    def observe(self, labels: Labels, value: float) -> None:
        """Count a value. One that equals an edge is in the bucket below it."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * len(self._names)
            self._sums[labels] = 0.0
        counts[bisect_left(self._edges, value)] += 1
        self._sums[labels] += value

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield HistogramMetricFamily(self._name, self._meaning, labels=self._labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        for family in self.describe():
            for labels, counts in list(self._counts.items()):
                upto = zip(self._names, map(float, accumulate(counts)), strict=True)
                family.add_metric(labels, list(upto), self._sums[labels])
            yield family


class TurnMetrics:
    """`num_workspaces` are named in labels, the first ones that come; the others are `other`."""

    def __init__(self, registry: CollectorRegistry, num_workspaces: int) -> None:
        self._registry = registry
        self._models: set[str] = set()
        self._num_workspaces = num_workspaces
        self._workspaces: set[str] = set()
        self._add_totals()
        self._add_histograms()
        self._add_workspaces()

    def _add_totals(self) -> None:
        self._turns = CounterTally(
            "holdfast_gateway_turns",
            "Turns closed, by outcome and by the model of the engine",
            ["outcome", "model"],
            self._registry,
        )
        self._tokens = CounterTally(
            "holdfast_gateway_tokens",
            "Tokens by billing class and by the model of the engine",
            ["class", "model"],
            self._registry,
        )
        self._turn_seconds = HistogramTally(
            "holdfast_gateway_turn_seconds",
            "From arrival to close",
            ["model"],
            SECONDS,
            self._registry,
        )
        self._first_token = HistogramTally(
            "holdfast_gateway_first_token_seconds",
            "From arrival to the engine's first frame",
            ["cache", "model"],
            SECONDS,
            self._registry,
        )

    def _add_histograms(self) -> None:
        """What OpenTelemetry's conventions for generative AI ask for, with their buckets."""
        self._turn_input = HistogramTally(
            "holdfast_gateway_turn_input_tokens",
            "Prompt tokens of a turn, of all classes; turns without tokens are not counted",
            ["model"],
            TOKENS_PER_REQUEST,
            self._registry,
        )
        self._turn_output = HistogramTally(
            "holdfast_gateway_turn_output_tokens",
            "Output tokens of the same turns",
            ["model"],
            TOKENS_PER_REQUEST,
            self._registry,
        )
        self._per_token = HistogramTally(
            "holdfast_gateway_time_per_output_token_seconds",
            "A whole answer's seconds after its first token, for each further token",
            ["model"],
            SECONDS_PER_TOKEN,
            self._registry,
        )

    def _add_workspaces(self) -> None:
        self._workspace_turns = CounterTally(
            "holdfast_gateway_workspace_turns",
            "Turns closed, by workspace; only with HOLDFAST_METRICS_WORKSPACES",
            ["workspace"],
            self._registry,
        )
        self._workspace_tokens = CounterTally(
            "holdfast_gateway_workspace_tokens",
            "Tokens by billing class and workspace; only with HOLDFAST_METRICS_WORKSPACES",
            ["class", "workspace"],
            self._registry,
        )

    def count(self, record: TurnRecord) -> None:
        """Count a closed turn. It must be called once for each turn."""
        model = self.model_of(record.engine_model)
        self._turns.add((record.outcome, model))
        self._turn_seconds.observe((model,), record.duration_seconds or 0.0)
        tokens = _tokens_of(record)
        for token_class, amount in tokens.items():
            if amount:
                self._tokens.add((token_class, model), amount)
        if num_tokens := sum(tokens.values()):
            self._turn_input.observe((model,), num_tokens - record.output_tokens)
            self._turn_output.observe((model,), record.output_tokens)
        if record.decode_seconds is not None and record.output_tokens > 1:
            seconds = record.decode_seconds / (record.output_tokens - 1)
            self._per_token.observe((model,), seconds)
        if self._num_workspaces:
            self._count_workspace(record.workspace, tokens)

    def _count_workspace(self, workspace: str, tokens: Mapping[str, int]) -> None:
        name = _within(self._workspaces, self._num_workspaces, workspace) or OTHER
        self._workspace_turns.add((name,))
        for token_class, amount in tokens.items():
            self._workspace_tokens.add((token_class, name), amount)

    def count_first_token(self, cache: str, engine_model: str | None, seconds: float) -> None:
        self._first_token.observe((cache, self.model_of(engine_model)), seconds)

    def model_of(self, engine_model: str | None) -> str:
        """The label of a model that an engine described, or `unknown` for a turn without engine."""
        if engine_model is None:
            return UNKNOWN
        if engine_model in self._models:
            return engine_model
        if _within(self._models, MAX_MODELS, engine_model) is None:
            return UNKNOWN
        # Every class exists from the beginning, so that a query that adds them up finds none
        # missing.
        for token_class in TOKEN_CLASSES:
            self._tokens.add((token_class, engine_model), 0)
        return engine_model


def _tokens_of(record: TurnRecord) -> dict[str, int]:
    return {label: getattr(record, name) for label, name in TOKEN_CLASSES.items()}


def _within(known: set[str], most: int, name: str) -> str | None:
    """The name, if it is known or there is room for one more."""
    if name not in known:
        if len(known) >= most:
            return None
        known.add(name)
    return name
