"""Chooses the engine for a turn: the cheapest, in tokens of prefill, from this gateway's knowledge.

The formula stands in `_offer`. *Waiting prefill* belongs to turns that were sent to the engine and
have no answer yet. *Recent load* is the prefill that the engine was given lately, fading with
`fade_seconds`: it spreads conversations before queues form. Content without a lease may be gone
when the prompt arrives, so it counts a little less. Engines whose costs are within TIE of each
other are equally good; among them rendezvous hashing decides, over the first prefix that no engine
holds, as on every gateway.

A long prompt that nobody holds delays every answer that runs beside its prefill. An engine with the
role `prefill` has no answers beside it: it writes what the prompt's breakpoints mark to the store
that the engines share, and the answering engine reads that (`prefill_elsewhere`).
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from engine.protocol import Started
from engine.protocol.reports import Description
from gateway.base.errors import DemandRefused, GatewayError, InvalidRequest, NoEngineReady
from gateway.prompt.ask import Ask
from gateway.routing.breaker import Breaker
from gateway.routing.held import NOTHING, Coverage, PrefixEnd, ResidencyIndex

UNLEASED_CREDIT = 0.97
DECODE_TOKENS = 16.0
"""The cost of one running answer to a prompt that joins it, in tokens of prefill."""
TIE = 0.02
"""A share of the prompt. Costs that differ by less are equal."""
MIN_TOKENS = 2048
"""A shorter prefill is not worth two requests."""
HAND_OVER_TOKENS = 512.0
"""The cost of writing to the store, telling it and a second request, in tokens of prefill."""
# The assumed rate of a model that has not answered yet: 4 bytes a token, weighted as so many
# tokens.
_FIRST_TOKENS = 1024.0
_FIRST_BYTES = 4096.0
_KEPT = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of the cost.

    `load_weight` and the costs have no unit: a copied token costs `host_cost` computed ones, one
    that is read from a store `disk_cost`. A token of prefill costs each answer that runs beside it
    `delay_cost`.
    """

    queue_weight: float = 0.1
    load_weight: float = 0.5
    load_band: float = 0.05
    band_tokens: int = 2048
    host_cost: float = 0.1
    disk_cost: float = 0.3
    delay_cost: float = 0.25
    fade_seconds: float = 600.0


class Load:
    """The work that one engine was given, in tokens of prefill."""

    def __init__(self, fade_seconds: float) -> None:
        self._fade_seconds = fade_seconds
        self._recent = 0.0
        self._recent_at = 0.0
        self._waiting: dict[str, int] = {}
        self._num_waiting_tokens = 0
        self._decoding: set[str] = set()
        self._rows: set[str] = set()
        # Of turns that wait for their first token.
        self._workspace_of: dict[str, str] = {}
        self._unanswered: Counter[str] = Counter()
        self._had_turns = False
        self._had_turns_at = -math.inf
        self._others_computed: int | None = None
        self._own_computed = 0

    def recent(self, now: float) -> float:
        elapsed = max(now - self._recent_at, 0.0)
        return self._recent * math.exp(-elapsed / self._fade_seconds)

    @property
    def num_waiting_tokens(self) -> int:
        return self._num_waiting_tokens

    @property
    def num_running(self) -> int:
        return len(self._waiting) + len(self._decoding)

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    @property
    def num_rows(self) -> int:
        """How many of the turns are rows of batches."""
        return len(self._rows)

    @property
    def num_unanswered(self) -> int:
        """How many turns that are no rows wait for their first token."""
        return sum(turn not in self._rows for turn in self._waiting)

    def has_unanswered(self, workspace: str) -> bool:
        """Whether a turn of this workspace that is no row waits for its first token."""
        return workspace in self._unanswered

    def seconds_without_turns(self, now: float) -> float:
        """For how long the engine has had nothing but rows of batches from this gateway."""
        if self._had_turns:
            self._had_turns_at = now
            self._had_turns = self.num_running > self.num_rows
        return now - self._had_turns_at

    def assign(
        self, turn: str, tokens: int, now: float, *, is_batch: bool = False, workspace: str = ""
    ) -> None:
        """A turn was sent that needs this many computed tokens, as far as is known."""
        if is_batch:
            self._rows.add(turn)
        else:
            self._had_turns = True
            self._workspace_of[turn] = workspace
            self._unanswered[workspace] += 1
        self._waiting[turn] = tokens
        self._num_waiting_tokens += tokens
        self._add(tokens, now)

    def started(self, turn: str, computed: int, now: float) -> None:
        """A turn's answer began. `computed` is the exact number of computed tokens."""
        self._answered(turn)
        assigned = self._waiting.pop(turn, None)
        if assigned is not None:
            self._num_waiting_tokens -= assigned
            self._decoding.add(turn)
            self._add(computed - assigned, now)
        self._own_computed += computed

    def ended(self, turn: str) -> None:
        """A turn ended in any way. Its tokens stay in the recent load."""
        self._answered(turn)
        self._num_waiting_tokens -= self._waiting.pop(turn, 0)
        self._decoding.discard(turn)
        self._rows.discard(turn)

    def returned(self, turn: str, now: float) -> None:
        """The engine refused a turn. None of its tokens are computed there."""
        self._answered(turn)
        assigned = self._waiting.pop(turn, 0)
        self._rows.discard(turn)
        self._num_waiting_tokens -= assigned
        self._add(-assigned, now)

    def observe(self, total_computed: int, now: float) -> None:
        """Take in the engine's own total: what is not ours was sent by other gateways. The total
        may already contain a turn of ours whose answer has not reached us, so each token counts for
        others once, when the difference to our own count first exceeds its former maximum."""
        others = total_computed - self._own_computed
        if self._others_computed is None:
            self._others_computed = others
        elif others > self._others_computed:
            self._add(others - self._others_computed, now)
            self._others_computed = others

    def reset(self) -> None:
        """Another process runs at the engine's address. Forget the load."""
        self._recent = 0.0
        self._others_computed, self._own_computed = None, 0

    def _answered(self, turn: str) -> None:
        workspace = self._workspace_of.pop(turn, None)
        if workspace is not None:
            self._unanswered[workspace] -= 1
            if not self._unanswered[workspace]:
                del self._unanswered[workspace]

    def _add(self, tokens: float, now: float) -> None:
        self._recent = max(self.recent(now) + tokens, 0.0)
        self._recent_at = now


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that could take the prompt. `identity` is the same on every gateway."""

    identity: str
    holdings: ResidencyIndex
    load: Load


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine would have to do, in tokens; `coverage` too."""

    coverage: Coverage
    to_prefill: float
    cost: float


class PromptSizes(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to be placed. `ends` are shallowest first; sizes are in tokens as far as they are
    known, `tokens` is the whole prompt's. `affinity`, the client's key, comes before the prefix if
    no engine holds any."""

    ends: Sequence[PrefixEnd]
    tokens: int
    affinity: str | None = None


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen engine, what it holds, and the most that any engine holds."""

    chosen: int
    offers: list[Offer]

    @property
    def offer(self) -> Offer:
        return self.offers[self.chosen]

    @property
    def available(self) -> int:
        """The most tokens of the prompt that one engine holds."""
        return max(offer.coverage.held for offer in self.offers)


def place(
    prompt: PromptSizes, candidates: Sequence[Candidate], weights: Weights, now: float
) -> Placement:
    """Choose the cheapest candidate. There must be at least one."""
    if len(candidates) == 1:
        return Placement(chosen=0, offers=[_offer(prompt, candidates[0], weights, 0.0, now)])
    mean = sum(candidate.load.recent(now) for candidate in candidates) / len(candidates)
    fair = mean + max(weights.load_band * mean, weights.band_tokens)
    offers = [_offer(prompt, candidate, weights, fair, now) for candidate in candidates]
    best = min(offer.cost for offer in offers)
    slack = TIE * prompt.tokens
    equal = [index for index, offer in enumerate(offers) if offer.cost <= best + slack]
    if len(equal) == 1:
        return Placement(chosen=equal[0], offers=offers)
    # By the first prefix of the prompt that no engine holds.
    held = max(offer.coverage.held for offer in offers)
    key = prompt.ends[-1].digest if prompt.ends else ""
    key = next((end.digest for end in prompt.ends if end.size > held), key)
    if held == 0 and prompt.affinity is not None:
        key = prompt.affinity

    def weight(index: int) -> bytes:
        """Highest random weight (Thaler and Ravishankar 1998)."""
        return blake2b(f"{key} {candidates[index].identity}".encode(), digest_size=8).digest()

    return Placement(chosen=max(equal, key=weight), offers=offers)


def _offer(
    prompt: PromptSizes, candidate: Candidate, weights: Weights, fair: float, now: float
) -> Offer:
    holdings, load = candidate.holdings, candidate.load
    held = NOTHING if holdings.is_stale(now) else holdings.coverage(prompt.ends, now)
    unleased = max(held.held - held.leased, 0)
    credit = held.held - (1 - UNLEASED_CREDIT) * unleased - weights.host_cost * held.host
    credit -= weights.disk_cost * held.disk
    to_prefill = max(prompt.tokens - held.held, 0)
    cost = (
        prompt.tokens
        - credit
        + weights.queue_weight * load.num_waiting_tokens
        + weights.load_weight * max(load.recent(now) - fair, 0.0)
        + DECODE_TOKENS * load.num_decoding
    )
    return Offer(coverage=held, to_prefill=to_prefill, cost=cost)


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
    """Tokens per byte of content for each engine model: the sum of tokens of answered prompts over
    the sum of their bytes, in which older ones fade. The gateway has no tokenizer."""

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
        """Choose the cheapest engine that can serve the turn, without those with URLs in `tried`.
        Raise NoEngineReady if none is left, InvalidRequest if none can serve it at all."""
        serving = [
            engine
            for engine in ready
            if engine.description and ask.model.is_served_by(engine.description.model)
        ]
        able: list[EngineT] = []
        refusal: GatewayError = NoEngineReady()
        for engine in serving:
            if engine.description and not engine.is_draining and engine.url not in tried:
                try:
                    check_capabilities(ask, engine.description)
                    able.append(engine)
                except InvalidRequest as error:
                    refusal = error
        if not able:
            raise refusal
        # If every breaker is open, trying is better than refusing.
        allowed = [engine for engine in able if engine.breaker.allows(now)] or able
        # Those that prefill for others answer only where there are no others.
        others = [e for e in allowed if e.description and e.description.role != "prefill"]
        taking = others or allowed
        assert taking[0].description is not None
        rate = self.rates.of(taking[0].description.model)
        # The request's names in their order, with estimated depths in tokens.
        ends = [
            PrefixEnd(name.digest, int(num_bytes * rate) + 1)
            for name, num_bytes in zip(ask.plan.names, ask.plan.name_bytes, strict=True)
        ]
        key = ask.routing_key
        prompt = PromptSizes(
            ends=ends,
            tokens=ends[-1].size if ends else 1,
            affinity=None if key is None else f"{ask.principal.scope} {key}",
        )
        placement = place(prompt, [candidate_of(engine) for engine in taking], self.weights, now)
        elsewhere = [e for e in serving if e not in taking and not e.holdings.is_stale(now)]
        held = [engine.holdings.coverage(prompt.ends, now).held for engine in elsewhere]
        return Route(
            engine=taking[placement.chosen],
            ends=ends,
            tokens=prompt.tokens,
            to_prefill=int(placement.offer.to_prefill),
            captured=placement.offer.coverage.held,
            available=max([placement.available, *held]),
        )


def candidate_of(engine: Routable) -> Candidate:
    return Candidate(identity=engine.url, holdings=engine.holdings, load=engine.load)


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
    for demanded in ("output_schema", "output_pattern"):
        if getattr(ask, demanded) is not None and "structured_output" not in can:
            raise DemandRefused(f"{demanded}: not supported by this model")
    for name, capability in ask.sampling.needs:
        # In the Responses API log probabilities are a wish.
        if capability not in can and (ask.dialect, name) != ("responses", "logprobs"):
            raise InvalidRequest(f"{ask.path_of(name)}: not supported by this model")
    if description.upstream is not None and "own_template" not in can:
        # Raise InvalidRequest for a field that a server which renders prompts itself can't be told.
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


def marked_tokens(ask: Ask, ends: Sequence[PrefixEnd]) -> int:
    """The estimated tokens of the longest prefix that a breakpoint marks, 0 without one."""
    marked = ask.plan.deepest_marked()
    sizes = (end.size for end in ends if marked is not None and end.digest == marked[0])
    return next(sizes, 0)


def prefill_elsewhere(
    ask: Ask, route: Route[EngineT], ready: Iterable[EngineT], weights: Weights, now: float
) -> Route[EngineT] | None:
    """The engine that prefills for the engine of `route`; None if that one prefills it itself."""
    marked = marked_tokens(ask, route.ends)
    if ask.is_batch or marked - route.captured < MIN_TOKENS:
        return None
    other, engines = route.engine, list[EngineT]()
    for engine in ready:
        mine, theirs = engine.description, other.description
        # By its events an engine tells that it can read what another one wrote.
        if other.holdings.is_stale(now) or engine.is_draining or mine is None:
            continue
        is_prefill = mine.role == "prefill" and engine.breaker.allows(now)
        if is_prefill and theirs is not None and theirs.role != "prefill":
            if (mine.model, mine.kv_dtype) == (theirs.model, theirs.kv_dtype):
                engines.append(engine)
    if not engines:
        return None
    prompt = PromptSizes(ends=route.ends, tokens=route.tokens)
    here = place(prompt, [candidate_of(route.engine)], weights, now).offer
    placement = place(prompt, [candidate_of(engine) for engine in engines], weights, now)
    there = placement.offer.cost + weights.disk_cost * (marked - route.captured)
    there += route.tokens - marked + HAND_OVER_TOKENS
    delay = weights.delay_cost * here.to_prefill * route.engine.load.num_decoding
    if here.cost + delay <= there:
        return None
    return Route(
        engine=engines[placement.chosen],
        ends=route.ends,
        tokens=route.tokens,
        to_prefill=int(placement.offer.to_prefill),
        captured=placement.offer.coverage.held,
        available=max(route.available, placement.available),
    )
