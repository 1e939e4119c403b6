"""Chooses the engine for a turn: the cheapest by `cost.py`, from this gateway's knowledge."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from engine.protocol import Description, Started
from gateway.base.errors import DemandRefused, GatewayError, InvalidRequest, NoEngineReady
from gateway.prompt.ask import Ask
from gateway.routing.breaker import Breaker
from gateway.routing.cost import Candidate, Load, Placement, PromptSizes, Weights, place
from gateway.routing.held import PrefixEnd, ResidencyIndex

# The assumed rate of a model that has not answered yet: 4 bytes a token, weighted as so many
# tokens.
_FIRST_TOKENS = 1024.0
_FIRST_BYTES = 4096.0
_KEPT = 0.98


class Routable(Protocol):
    """The parts of an engine that routing reads."""

    url: str
    description: Description | None
    is_draining: bool
    holdings: ResidencyIndex
    load: Load
    breaker: Breaker


EngineT = TypeVar("EngineT", bound=Routable)
HeldT = TypeVar("HeldT", bound=Routable, covariant=True)


class TokenRates:
    """Tokens per byte of content for each engine model, learned from answers.

    The gateway has no tokenizer. A rate is the sum of tokens over the sum of bytes, in which older
    prompts fade. So long prompts count more than short ones, which are mostly template.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def of(self, model: str) -> float:
        tokens, num_bytes = self._sums.get(model, (_FIRST_TOKENS, _FIRST_BYTES))
        return tokens / num_bytes

    def learn(self, model: str, num_bytes: int, num_tokens: int) -> None:
        """Learn from one prompt's bytes and tokens."""
        tokens, before = self._sums.get(model, (_FIRST_TOKENS, _FIRST_BYTES))
        self._sums[model] = (_KEPT * tokens + num_tokens, _KEPT * before + num_bytes)


class Route(NamedTuple, Generic[HeldT]):
    """The engine for a turn, the tokens it was expected to hold, and the most that any engine held.

    `tokens` is the whole prompt. All are estimates, in tokens.
    """

    engine: HeldT
    ends: Sequence[PrefixEnd]
    tokens: int
    to_prefill: int
    captured: int
    available: int

    def exact(self, held: int, started: Started) -> int:
        """Turn an estimate of held tokens into the engine's count at the same name."""
        if held == 0:
            return 0
        index = bisect_left(self.ends, held, key=lambda end: end.size)
        offsets = started.receipt.name_tokens
        return offsets[index] if index < len(offsets) else started.usage.prompt_tokens


@dataclass(slots=True)
class Router:
    weights: Weights = field(default_factory=Weights)
    rates: TokenRates = field(default_factory=TokenRates)

    def choose(
        self, ask: Ask, ready: Iterable[EngineT], now: float, tried: Collection[str] = ()
    ) -> Route[EngineT]:
        """Choose the cheapest engine that can serve the turn.

        Engines with URLs in `tried` are left out.

        Raise NoEngineReady if none is left, and InvalidRequest if no engine can serve it at all.
        """
        serving = [
            engine
            for engine in ready
            if engine.description and ask.model.is_served_by(engine.description.model)
        ]
        able = _able(ask, [e for e in serving if not e.is_draining and e.url not in tried])
        # If every breaker is open, trying is better than refusing.
        taking = _answering([engine for engine in able if engine.breaker.allows(now)] or able)
        assert taking[0].description is not None
        prompt = self._prompt(ask, taking[0].description.model)
        placement = place(prompt, [candidate_of(engine) for engine in taking], self.weights, now)
        elsewhere = [e for e in serving if e not in taking and not e.holdings.is_stale(now)]
        held = [engine.holdings.coverage(prompt.ends, now).held for engine in elsewhere]
        return _choice(taking[placement.chosen], prompt, placement, held)

    def _prompt(self, ask: Ask, model: str) -> PromptSizes:
        """The request's names in their order, with estimated depths in tokens."""
        rate = self.rates.of(model)
        plan = ask.plan
        ends = [
            PrefixEnd(name.digest, int(num_bytes * rate) + 1)
            for name, num_bytes in zip(plan.names, plan.name_bytes, strict=True)
        ]
        affinity = None
        if ask.routing_key is not None:
            affinity = f"{ask.principal.scope} {ask.routing_key}"
        return PromptSizes(ends=ends, tokens=ends[-1].size if ends else 1, affinity=affinity)


def _choice(
    engine: EngineT, prompt: PromptSizes, placement: Placement, elsewhere: list[int]
) -> Route[EngineT]:
    return Route(
        engine=engine,
        ends=prompt.ends,
        tokens=prompt.tokens,
        to_prefill=int(placement.offer.to_prefill),
        captured=placement.offer.coverage.held,
        available=max([placement.available, *elsewhere]),
    )


def candidate_of(engine: Routable) -> Candidate:
    return Candidate(identity=engine.url, holdings=engine.holdings, load=engine.load)


def _answering(engines: list[EngineT]) -> list[EngineT]:
    """The engines without those that prefill for others, unless there are no others."""
    others = [e for e in engines if e.description and e.description.role != "prefill"]
    return others or engines


def _able(ask: Ask, engines: Sequence[EngineT]) -> list[EngineT]:
    """The engines that can serve the request. If none can, raise the first one's refusal."""
    able: list[EngineT] = []
    refusal: GatewayError = NoEngineReady()
    for engine in engines:
        assert engine.description is not None
        try:
            check_capabilities(ask, engine.description)
        except InvalidRequest as error:
            refusal = error
        else:
            able.append(engine)
    if not able:
        raise refusal
    return able


def check_capabilities(ask: Ask, description: Description) -> None:
    """Raise InvalidRequest that names the first thing that this engine can't do."""
    can = description.capabilities
    mode = ask.tool_choice.mode
    if ask.plan.prompt.tools and "tools" not in can:
        raise InvalidRequest(
            "tools: not supported by this model: its chat template takes none, or writes calls in "
            "a format that the engine does not know"
        )
    if mode in ("any", "tool") and "forced_tools" not in can:
        raise InvalidRequest("tool_choice: forcing a tool call is not supported by this model")
    if ask.output_schema is not None and "structured_output" not in can:
        raise DemandRefused("output_schema: not supported by this model")
    if ask.sampling.has_penalties and "penalties" not in can:
        raise InvalidRequest(f"{_penalty(ask)}: not supported by this model")
    if ask.sampling.logprobs is not None and "logprobs" not in can and ask.dialect != "responses":
        field = "generationConfig.responseLogprobs" if ask.dialect == "gemini" else "logprobs"
        raise InvalidRequest(f"{field}: not supported by this model")
    if ask.sampling.num_choices > 1 and "multiple_choices" not in can:
        raise InvalidRequest("n: more than one choice is not supported by this model")
    if description.upstream is not None and "own_template" not in can:
        _check_for_server(ask)


def _check_for_server(ask: Ask) -> None:
    """Raise InvalidRequest for a field that a server which renders prompts itself can't be told."""
    prompt = ask.plan.prompt
    turns = {"gemini": "contents", "responses": "input"}.get(ask.dialect, "messages")
    checks = (
        (prompt.text is not None, "prompt: raw prompts are"),
        (
            bool(prompt.messages) and prompt.messages[-1].role == "assistant",
            f"{turns}: going on with a last message of the assistant is",
        ),
        (ask.sampling.ignore_eos, "ignore_eos:"),
    )
    for is_asked, what in checks:
        if is_asked:
            raise InvalidRequest(f"{what} not supported by this model's server")


def _penalty(ask: Ask) -> str:
    """The field of the request, by its dialect's name."""
    sampling = ask.sampling
    if sampling.logit_bias:
        return "logit_bias"
    kind = "presence" if sampling.presence_penalty else "frequency"
    return f"generationConfig.{kind}Penalty" if ask.dialect == "gemini" else f"{kind}_penalty"
