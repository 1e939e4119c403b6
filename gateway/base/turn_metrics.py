"""The metrics of turns, by the model of the engine that served them."""

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from engine.protocol import SECONDS_PER_TOKEN, TOKENS_PER_REQUEST
from gateway.base.record import TurnRecord

KeyT = TypeVar("KeyT", str, tuple[str, str])
MetricT = TypeVar("MetricT", Counter, Histogram)
TokenClass = Literal["input", "cache_read", "cache_write_5m", "cache_write_1h", "output"]
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Prometheus' own buckets up to 10 s, and beyond: cold prompts and long answers take minutes."""
MAX_MODELS = 100
UNKNOWN, OTHER = "unknown", "other"


class Children(dict[KeyT, MetricT]):
    """A metric's children by label, kept because looking one up takes longer than counting."""

    def __init__(self, parent: MetricT) -> None:
        super().__init__()
        self._parent: MetricT = parent

    def __missing__(self, labels: KeyT) -> MetricT:
        values = labels if isinstance(labels, tuple) else (labels,)
        child: MetricT = self._parent.labels(*values)
        self[labels] = child
        return child


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
        turns = Counter(
            "holdfast_gateway_turns",
            "Turns closed, by outcome and by the model of the engine",
            ["outcome", "model"],
            registry=self._registry,
        )
        tokens = Counter(
            "holdfast_gateway_tokens",
            "Tokens by billing class and by the model of the engine",
            ["class", "model"],
            registry=self._registry,
        )
        turn_seconds = Histogram(
            "holdfast_gateway_turn_seconds",
            "From arrival to close",
            ["model"],
            buckets=SECONDS,
            registry=self._registry,
        )
        first_token = Histogram(
            "holdfast_gateway_first_token_seconds",
            "From arrival to the engine's first frame",
            ["cache", "model"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._turns: Children[tuple[str, str], Counter] = Children(turns)
        self._tokens: Children[tuple[str, str], Counter] = Children(tokens)
        self._turn_seconds: Children[str, Histogram] = Children(turn_seconds)
        self._first_token: Children[tuple[str, str], Histogram] = Children(first_token)

    def _add_histograms(self) -> None:
        """What OpenTelemetry's conventions for generative AI ask for, with their buckets."""
        turn_input = Histogram(
            "holdfast_gateway_turn_input_tokens",
            "Prompt tokens of a turn, of all classes; turns without tokens are not counted",
            ["model"],
            buckets=TOKENS_PER_REQUEST,
            registry=self._registry,
        )
        turn_output = Histogram(
            "holdfast_gateway_turn_output_tokens",
            "Output tokens of the same turns",
            ["model"],
            buckets=TOKENS_PER_REQUEST,
            registry=self._registry,
        )
        per_token = Histogram(
            "holdfast_gateway_time_per_output_token_seconds",
            "A whole answer's seconds after its first token, for each further token",
            ["model"],
            buckets=SECONDS_PER_TOKEN,
            registry=self._registry,
        )
        self._turn_input: Children[str, Histogram] = Children(turn_input)
        self._turn_output: Children[str, Histogram] = Children(turn_output)
        self._per_token: Children[str, Histogram] = Children(per_token)

    def _add_workspaces(self) -> None:
        self._workspace_turns = Counter(
            "holdfast_gateway_workspace_turns",
            "Turns closed, by workspace; only with HOLDFAST_METRICS_WORKSPACES",
            ["workspace"],
            registry=self._registry,
        )
        self._workspace_tokens = Counter(
            "holdfast_gateway_workspace_tokens",
            "Tokens by billing class and workspace; only with HOLDFAST_METRICS_WORKSPACES",
            ["class", "workspace"],
            registry=self._registry,
        )

    def count(self, record: TurnRecord) -> None:
        """Count a closed turn. It must be called once for each turn."""
        model = self.model_of(record.engine_model)
        self._turns[record.outcome, model].inc()
        self._turn_seconds[model].observe(record.duration_seconds or 0.0)
        tokens = _tokens_of(record)
        for token_class, amount in tokens.items():
            if amount:
                self._tokens[token_class, model].inc(amount)
        if num_tokens := sum(tokens.values()):
            self._turn_input[model].observe(num_tokens - record.output_tokens)
            self._turn_output[model].observe(record.output_tokens)
        if record.decode_seconds is not None and record.output_tokens > 1:
            seconds = record.decode_seconds / (record.output_tokens - 1)
            self._per_token[model].observe(seconds)
        if self._num_workspaces:
            self._count_workspace(record.workspace, tokens)

    def _count_workspace(self, workspace: str, tokens: Mapping[TokenClass, int]) -> None:
        name = _within(self._workspaces, self._num_workspaces, workspace) or OTHER
        self._workspace_turns.labels(name).inc()
        for token_class, amount in tokens.items():
            self._workspace_tokens.labels(token_class, name).inc(amount)

    def count_first_token(self, cache: str, engine_model: str | None, seconds: float) -> None:
        self._first_token[cache, self.model_of(engine_model)].observe(seconds)

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
        for token_class in get_args(TokenClass):
            self._tokens[token_class, engine_model].inc(0)
        return engine_model


def _tokens_of(record: TurnRecord) -> dict[TokenClass, int]:
    return {
        "input": record.input_tokens,
        "cache_read": record.cache_read_tokens,
        "cache_write_5m": record.cache_write_5m_tokens,
        "cache_write_1h": record.cache_write_1h_tokens,
        "output": record.output_tokens,
    }


def _within(known: set[str], most: int, name: str) -> str | None:
    """The name, if it is known or there is room for one more."""
    if name not in known:
        if len(known) >= most:
            return None
        known.add(name)
    return name
