"""Chooses the engine for a turn: the cheapest, in tokens of prefill, from this gateway's knowledge.

The formula stands in `place`. *Waiting prefill* belongs to turns that were sent to the engine and
have no answer yet. *Recent load* is the prefill that the engine was given lately, fading with
`fade_seconds`. It spreads conversations before queues form. Content without a lease may be gone
when the prompt arrives, so it counts a little less. Engines whose costs are within TIE of each
other are equally good. Rendezvous hashing over the first prefix that no engine holds decides among
them, and decides the same on every gateway.

The prefill of a long prompt that no engine holds delays every answer that runs beside it. An engine
with the role `prefill` runs no answers. It writes what the prompt's breakpoints mark to the store
that the engines share, and the answering engine reads it there (`prefill_elsewhere`).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from heapq import nlargest
from math import exp, inf
from typing import Generic, NamedTuple, Protocol, TypeVar

from xxhash import xxh3_64_intdigest

from engine.protocol import OwnTemplateField, Started, needs_own_template
from engine.protocol.reports import STILL_MEASURING, Description, why_refused
from gateway.base.errors import DemandRefused, InvalidRequest, NoEngineReady, StillMeasuring
from gateway.prompt.ask import Api, Ask
from gateway.routing.breaker import Breaker
from gateway.routing.held import NOTHING, STALE_SECONDS, Copied, Coverage, Ends, Holdings

UNLEASED_CREDIT = 0.97
DECODE_TOKENS = 16.0
"""The cost of one running answer to a prompt that joins it, in tokens of prefill."""
TIE = 0.02
"""A share of the prompt. Costs that differ by less are equal."""
MIN_TOKENS = 2048
"""A prefill with fewer tokens is not worth two requests."""
MIN_ASKED_TOKENS = 512
"""Engines are not asked for fewer tokens than these."""
NUM_LIKELY = 4
"""How many engines are asked for a prefix that the index may have forgotten."""
HAND_OVER_TOKENS = 512.0
"""The cost of writing to the store, telling it and a second request, in tokens of prefill."""
# The assumed rate of a model that has not answered yet is 4 bytes a token. It weighs as much as a
# prompt of this many tokens.
_FIRST_TOKENS = 1024.0
_FIRST_BYTES = 4096.0
_FADING = 0.98
"""Each answered prompt multiplies the sums of the prompts before it by this."""
_WISHES: frozenset[tuple[Api, str]] = frozenset({("responses", "logprobs"), ("gemini", "top_k")})
"""Fields of the sampling that an engine may ignore, by API. Gemini's clients send `top_k` by
themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of the cost, in computed tokens (`place`)."""

    # The cost of a token of waiting prefill.
    queue_weight: float = 0.1
    # The cost of a token of recent load above the fair load.
    load_weight: float = 0.5
    # The fair load is the engines' mean load, plus this share of it or this number of tokens,
    # whichever is larger.
    load_band: float = 0.05
    band_tokens: int = 2048
    # The cost of a token that is copied from host memory.
    host_cost: float = 0.1
    # The cost of a token that is read from a store.
    disk_cost: float = 0.3
    # The cost of a token of prefill for each answer that runs beside it.
    delay_cost: float = 0.25
    # The time in which recent load fades to 1/e.
    fade_seconds: float = 600.0


class Load:
    """The work that one engine was given, in tokens of prefill."""

    def __init__(self, fade_seconds: float) -> None:
        self._fade_seconds = fade_seconds
        self._recent = 0.0
        self._recent_at = 0.0
        self._waiting: dict[str, int] = {}
        self.num_waiting_tokens = 0
        self._decoding: set[str] = set()
        self.num_decoding = 0
        # The turns that are rows of batches.
        self._rows: set[str] = set()
        # The workspace of each other turn that waits for its first token, by turn.
        self._workspace_of: dict[str, str] = {}
        # How many such turns each workspace has.
        self._unanswered: Counter[str] = Counter()
        # Whether the engine had turns other than rows at the last call of `seconds_without_turns`,
        # and when it last had some.
        self._had_turns = False
        self._had_turns_at = -inf
        # The tokens that the engine computed for other gateways, and for this one.
        self._others_computed: int | None = None
        self._our_computed = 0

    def recent(self, now: float) -> float:
        recent = self._recent
        elapsed = now - self._recent_at
        if not recent or elapsed <= 0.0:
            return recent
        return recent * exp(-elapsed / self._fade_seconds)

    @property
    def num_running(self) -> int:
        return len(self._waiting) + self.num_decoding

    @property
    def num_rows(self) -> int:
        """How many of the turns are rows of batches."""
        return len(self._rows)

    @property
    def num_unanswered(self) -> int:
        """How many turns wait for their first token, without rows of batches."""
        return sum(turn not in self._rows for turn in self._waiting)

    def has_unanswered(self, workspace: str) -> bool:
        """Whether a turn of this workspace, other than a row, waits for its first token."""
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
        """Note a turn that was sent to the engine. `tokens` are those that it needs computed, as
        far as is known."""
        if is_batch:
            self._rows.add(turn)
        else:
            self._had_turns = True
            self._workspace_of[turn] = workspace
            self._unanswered[workspace] += 1
        self._waiting[turn] = tokens
        self.num_waiting_tokens += tokens
        self._add(tokens, now)

    def started(self, turn: str, computed: int, now: float) -> None:
        """Note that a turn's answer began. `computed` is the exact number of computed tokens."""
        self._answered(turn)
        assigned = self._waiting.pop(turn, None)
        if assigned is not None:
            self.num_waiting_tokens -= assigned
            self._decoding.add(turn)
            self.num_decoding = len(self._decoding)
            self._add(computed - assigned, now)
        self._our_computed += computed

    def ended(self, turn: str) -> None:
        """Note that a turn ended, however it did. Its tokens stay in the recent load."""
        self._answered(turn)
        self.num_waiting_tokens -= self._waiting.pop(turn, 0)
        self._decoding.discard(turn)
        self.num_decoding = len(self._decoding)
        self._rows.discard(turn)

    def returned(self, turn: str, now: float) -> None:
        """Note that the engine refused a turn, so that it computes none of its tokens."""
        self._add(-self._waiting.get(turn, 0), now)
        self.ended(turn)

    def observe(self, total_computed: int, now: float) -> None:
        """Take in the engine's total. The tokens that are not ours came from other gateways.

        The total may already contain a turn of ours whose answer has not reached us. So a token
        counts for other gateways only when the difference to our count exceeds its former maximum.
        """
        others = total_computed - self._our_computed
        if self._others_computed is None:
            self._others_computed = others
        elif others > self._others_computed:
            self._add(others - self._others_computed, now)
            self._others_computed = others

    def reset(self, recent: float, now: float) -> None:
        """Begin anew, because another process runs at the engine's address. It begins with the
        `recent` load of its peers, in tokens. Without it the engine would get every turn for
        minutes."""
        self._recent = recent
        self._recent_at = now
        self._others_computed = None
        self._our_computed = 0

    def _answered(self, turn: str) -> None:
        workspace = self._workspace_of.pop(turn, None)
        if workspace is not None:
            self._unanswered[workspace] -= 1
            if not self._unanswered[workspace]:
                del self._unanswered[workspace]

    def _add(self, tokens: float, now: float) -> None:
        self._recent = max(self.recent(now) + tokens, 0.0)
        self._recent_at = now


class Candidate(Protocol):
    """An engine that could take the prompt."""

    # The hash of its URL, which is the same on every gateway.
    seed: int
    holdings: Holdings
    load: Load


CandidateT = TypeVar("CandidateT", bound=Candidate)
HeldT = TypeVar("HeldT", bound=Candidate, covariant=True)


class PromptSizes(NamedTuple):
    """A prompt to be placed."""

    # Its prefixes, in tokens by the model's rate.
    ends: Ends
    # The size of the whole prompt.
    tokens: int
    # The client's routing key, which is hashed in place of a prefix if no engine holds any.
    affinity: str | None = None

    def key(self, held: int) -> str:
        """What rendezvous hashing hashes: the first prefix that is longer than the `held`
        tokens."""
        if held == 0 and self.affinity is not None:
            return self.affinity
        digests = self.ends.digests
        first = self.ends.first_above(held)
        return digests[min(first, len(digests) - 1)] if digests else ""


class Route(NamedTuple, Generic[HeldT]):
    """The engine for a turn. All sizes are estimates, in tokens."""

    engine: HeldT
    prompt: PromptSizes
    cost: float
    # What this engine is expected to hold of the prompt.
    captured: Coverage
    # The most that any engine holds of the prompt.
    available: Coverage

    @property
    def tokens(self) -> int:
        """The whole prompt."""
        return self.prompt.tokens

    @property
    def to_prefill(self) -> int:
        return max(self.tokens - self.captured.held, 0)

    @property
    def expected(self) -> Sequence[str]:
        """The names that the engine will hold in addition when it has answered."""
        ends = self.prompt.ends
        captured = self.captured
        documents = (document.digest for document in ends.documents)
        lacking = (name for number, name in enumerate(documents) if not captured.holds(number))
        return [*ends.digests[ends.first_above(captured.prefix) :], *lacking]

    def exact(self, held: Coverage, started: Started) -> int:
        """Turn an estimate of held tokens into the engine's count at the same names."""
        prefix = 0
        receipt = started.receipt
        if held.prefix:
            index = self.prompt.ends.first_above(held.prefix - 1)
            offsets = receipt.name_tokens
            prefix = offsets[index] if index < len(offsets) else started.usage.prompt_tokens
        copied = (Copied("", *place) for place in receipt.copied)
        return prefix + sum(
            document.behind(prefix) for number, document in enumerate(copied) if held.holds(number)
        )


def place(
    prompt: PromptSizes,
    candidates: Sequence[CandidateT],
    weights: Weights,
    now: float,
    covered: Mapping[int, Coverage] | None = None,
) -> Route[CandidateT]:
    """Choose the cheapest candidate. There must be at least one, and all must share one index.
    `covered` is what that index says of the prompt."""
    if covered is None:
        covered = candidates[0].holdings.index.cover(prompt.ends, now)
    recents = [candidate.load.recent(now) for candidate in candidates]
    mean = sum(recents) / len(recents)
    fair = 0.0
    if len(candidates) > 1:
        fair = mean + max(weights.load_band * mean, weights.band_tokens)
    costs = list[float]()
    available = NOTHING
    queue_weight = weights.queue_weight
    load_weight = weights.load_weight
    credits = dict[int, float]()
    since = now - STALE_SECONDS
    for candidate, recent in zip(candidates, recents, strict=True):
        load = candidate.load
        holdings = candidate.holdings
        cost = queue_weight * load.num_waiting_tokens + DECODE_TOKENS * load.num_decoding
        if recent > fair:
            cost += load_weight * (recent - fair)
        coverage = covered.get(holdings.slot)
        if coverage is not None and holdings.heard_at >= since:
            # Engines that hold as much share one coverage, so its credit is computed once.
            credit = credits.get(id(coverage))
            if credit is None:
                unleased = max(coverage.held - coverage.leased, 0)
                credit = coverage.held - (1 - UNLEASED_CREDIT) * unleased
                credit -= weights.host_cost * coverage.host
                credit -= weights.disk_cost * coverage.disk
                credits[id(coverage)] = credit
                available = _more(available, coverage)
            cost -= credit
        costs.append(cost)
    bound = min(costs) + TIE * prompt.tokens
    equal = [index for index, cost in enumerate(costs) if cost <= bound]
    if len(equal) > 1:
        # An engine that was given nothing yet comes first, so that it can prove itself.
        if min(recents) <= 0.0:
            equal = [index for index in equal if recents[index] <= 0.0] or equal
        key = prompt.key(available.prefix)
        # Highest random weight (Thaler and Ravishankar 1998).
        equal = [max(equal, key=lambda index: xxh3_64_intdigest(key, candidates[index].seed))]
    chosen = candidates[equal[0]]
    captured = NOTHING
    if not chosen.holdings.is_stale(now):
        captured = covered.get(chosen.holdings.slot, NOTHING)
    return Route(chosen, prompt, prompt.tokens + costs[equal[0]], captured, available)


def _more(coverage: Coverage, other: Coverage) -> Coverage:
    return other if other.held > coverage.held else coverage


class Routable(Candidate, Protocol):
    """The parts of an engine that routing reads. Engines of one `kind` can do the same."""

    url: str
    kind: str
    description: Description | None
    is_draining: bool
    breaker: Breaker


EngineT = TypeVar("EngineT", bound=Routable)


def kind_of(description: Description | None) -> str:
    """The parts of a description that routing reads, as one text."""
    if description is None:
        return ""
    adapters = [adapter.digest for adapter in description.adapters if not adapter.is_leaving]
    techniques = [f"{way.name} {way.is_allowed}" for way in description.techniques]
    return "\n".join(
        [
            description.model,
            description.role,
            str(description.upstream),
            *sorted(description.capabilities),
            *sorted(adapters),
            *sorted(techniques),
            str(description.is_measuring),
        ]
    )


class TokenRates:
    """Tokens per byte of content for each engine model, since the gateway has no tokenizer.

    A rate is the tokens of answered prompts over their bytes. Older prompts fade in both sums.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def of(self, model: str) -> float:
        tokens, num_bytes = self._sums.get(model, (_FIRST_TOKENS, _FIRST_BYTES))
        return tokens / num_bytes

    def learn(self, model: str, num_bytes: int, num_tokens: int) -> None:
        """Learn from one prompt's bytes and tokens."""
        old_tokens, old_bytes = self._sums.get(model, (_FIRST_TOKENS, _FIRST_BYTES))
        self._sums[model] = (_FADING * old_tokens + num_tokens, _FADING * old_bytes + num_bytes)


@dataclass(slots=True)
class Router:
    weights: Weights = field(default_factory=Weights)
    rates: TokenRates = field(default_factory=TokenRates)

    def choose(
        self, ask: Ask, ready: Sequence[EngineT], now: float, tried: Collection[str] = ()
    ) -> Route[EngineT]:
        """Choose the cheapest engine that can serve the turn and whose URL is not in `tried`. Raise
        NoEngineReady if none is left, InvalidRequest if none can serve it at all, and
        StillMeasuring if one may be able to soon."""
        # Why engines of each kind can't serve it; None where they can. Kinds with other models are
        # left out.
        verdicts: dict[str, InvalidRequest | StillMeasuring | None] = {}
        for kind, engine_of_kind in {engine.kind: engine for engine in ready}.items():
            if engine_of_kind.description and ask.model.is_served_at(engine_of_kind.description):
                try:
                    check_capabilities(ask, engine_of_kind.description)
                    verdicts[kind] = None
                except (InvalidRequest, StillMeasuring) as error:
                    verdicts[kind] = error
        serving = [engine for engine in ready if engine.kind in verdicts]
        open_engines = [
            engine for engine in serving if not engine.is_draining and engine.url not in tried
        ]
        able = [engine for engine in open_engines if verdicts[engine.kind] is None]
        if not able:
            refusals = [verdicts[engine.kind] for engine in open_engines]
            # An engine that may serve it soon comes first: the client is then not at fault.
            refusals.sort(key=lambda refusal: not isinstance(refusal, StillMeasuring))
            raise next((refusal for refusal in refusals if refusal is not None), NoEngineReady())
        allowed = [
            engine
            for engine in able
            if engine.breaker.open_until is None or engine.breaker.allows(now)
        ]
        # If every breaker is open, trying is better than refusing.
        taking = allowed or able
        if len(verdicts) > 1:
            answering = [
                engine
                for engine in taking
                if engine.description and engine.description.role != "prefill"
            ]
            # An engine that prefills for others answers only where there is no other.
            taking = answering or taking
        prompt = self.sizes(ask, taking[0])
        covered = taking[0].holdings.index.cover(prompt.ends, now)
        route = place(prompt, taking, self.weights, now, covered)
        if len(taking) < len(serving):
            fresh = [engine.holdings for engine in serving if not engine.holdings.is_stale(now)]
            coverages = (covered[holder.slot] for holder in fresh if holder.slot in covered)
            route = route._replace(available=reduce(_more, coverages, route.available))
        return route

    def sizes(self, ask: Ask, engine: Routable) -> PromptSizes:
        """The prompt's names with estimated depths in tokens of the engine's model."""
        assert engine.description is not None
        digests = [name.digest for name in ask.plan.names]
        rate = self.rates.of(engine.description.model)
        documents = list[Copied]()
        if ask.plan.approximate is not None:
            places = ask.plan.approximate.document_bytes
            for document, (begin, end) in zip(ask.plan.approximate.documents, places, strict=True):
                start_tokens = math.ceil(begin * rate)
                end_tokens = math.ceil(end * rate)
                num_recomputed = document.num_recomputed(end_tokens - start_tokens)
                documents.append(Copied(document.name, start_tokens + num_recomputed, end_tokens))
        ends = Ends(digests, ask.plan.name_bytes, rate, documents)
        key = ask.routing_key
        affinity = None if key is None else f"{ask.principal.scope} {key}"
        return PromptSizes(ends, ends.whole, affinity)


def likely_holders(route: Route[EngineT], ready: Iterable[EngineT]) -> list[EngineT]:
    """The engines that may hold more of the prompt than is known, because names were forgotten.

    They are the first ones by rendezvous hashing. Most of them were below their fair load when the
    prompt came, and so were chosen by it.
    """
    is_whole = not route.engine.holdings.index.num_forgotten
    if is_whole or route.tokens - route.available.held < MIN_ASKED_TOKENS:
        return []
    key = route.prompt.key(route.available.prefix)
    alike = [engine for engine in ready if engine.kind == route.engine.kind]
    return nlargest(NUM_LIKELY, alike, key=lambda engine: xxh3_64_intdigest(key, engine.seed))


def check_capabilities(ask: Ask, description: Description) -> None:
    """Raise InvalidRequest with the first thing that this engine can't do, or StillMeasuring where
    it does not know yet whether it can."""
    can = description.known_capabilities
    mode = ask.tool_choice.mode
    if ask.plan.prompt.images and "images" not in can:
        first = next(iter(ask.plan.image_paths.values()))
        raise InvalidRequest(f"{first}: this model reads no images. Could not process image")
    if ask.plan.salt and "cache_salt" not in can:
        raise InvalidRequest("cache_salt: not supported by this model's engine")
    if ask.plan.prompt.tools and "tools" not in can:
        raise InvalidRequest(
            "tools: not supported by this model: its chat template takes none, or writes calls in "
            "a format that the engine does not know"
        )
    if mode in ("any", "tool") and "forced_tools" not in can:
        raise InvalidRequest("tool_choice: forcing a tool call is not supported by this model")
    for constraint in ("output_schema", "output_pattern"):
        if getattr(ask, constraint) is not None and "structured_output" not in can:
            raise DemandRefused(f"{constraint}: not supported by this model")
    for name, capability in ask.sampling.needs:
        if capability not in can and (ask.dialect, name) not in _WISHES:
            raise InvalidRequest(f"{ask.path_of(name)}: not supported by this model")
    # Documents with an equal number of recomputed tokens are looked up once.
    demands = [] if ask.plan.approximate is None else ask.plan.approximate.demands
    paths = {(demand.method, demand.parameter): demand.path for demand in reversed(demands)}
    for (method, parameter), path in paths.items():
        reason = why_refused(description.techniques, method, parameter)
        if reason is None:
            continue
        if description.is_measuring and method != "sibling":
            raise StillMeasuring(f"{path}: {STILL_MEASURING}")
        raise InvalidRequest(f"{path}: {reason}")
    if description.upstream is not None and "own_template" not in can:
        _check_foreign_template(ask)


def _check_foreign_template(ask: Ask) -> None:
    """Raise InvalidRequest for what can't be done by a server that renders prompts itself."""
    turns = {"gemini": "contents", "responses": "input"}.get(ask.dialect, "messages")
    words: dict[OwnTemplateField, str] = {
        "prompt.text": "prompt: raw prompts are",
        "messages": f"{turns}: going on with a last message of the assistant is",
    }
    for need in needs_own_template(ask.plan.prompt):
        raise InvalidRequest(f"{words[need]} not supported by this model's server")


def marked_tokens(ask: Ask, ends: Ends) -> int:
    """The estimated tokens of the longest prefix that a breakpoint marks, 0 without one."""
    marked = ask.plan.deepest_breakpoint()
    return 0 if marked is None else ends.size(ends.digests.index(marked[0]))


def prefill_elsewhere(
    ask: Ask, route: Route[EngineT], ready: Iterable[EngineT], weights: Weights, now: float
) -> Route[EngineT] | None:
    """The route to an engine that prefills for the engine of `route`; None if that engine prefills
    the prompt itself."""
    prompt = route.prompt
    answering = route.engine
    marked = marked_tokens(ask, prompt.ends)
    if ask.is_batch or marked - route.captured.held < MIN_TOKENS:
        return None
    reader = answering.description
    # Only an engine's events say that it can read what another one wrote.
    if reader is None or reader.role == "prefill" or answering.holdings.is_stale(now):
        return None
    engines = [
        engine
        for engine in ready
        if not engine.is_draining
        and engine.description is not None
        and _writes_for(engine.description, reader)
        and engine.breaker.allows(now)
        and ask.model.is_served_at(engine.description)
    ]
    if not engines:
        return None
    here = place(prompt, [answering], weights, now)
    there = place(prompt, engines, weights, now)
    cost = there.cost + weights.disk_cost * (marked - route.captured.held)
    cost += route.tokens - marked + HAND_OVER_TOKENS
    delay = weights.delay_cost * here.to_prefill * answering.load.num_decoding
    if here.cost + delay <= cost:
        return None
    return there._replace(available=_more(route.available, there.available))


def _writes_for(writer: Description, reader: Description) -> bool:
    """Whether an engine that only prefills writes what the other one can read."""
    is_alike = (writer.model, writer.kv_dtype) == (reader.model, reader.kv_dtype)
    return writer.role == "prefill" and is_alike
