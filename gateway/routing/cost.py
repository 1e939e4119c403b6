"""Where a prompt should run: one cost per engine, in tokens of prefill. Pure.

    cost = to prefill + host_cost · to copy back + disk_cost · to read from the store
           + (1 - UNLEASED_CREDIT) · held without a lease
           + queue_weight · waiting prefill + load_weight · recent load above the fair share
           + DECODE_TOKENS · running decodes

*To prefill* is the part of the prompt that the engine does not hold. *Waiting prefill* belongs to
turns that were sent to the engine and have no answer yet: it is ahead of this prompt in the queue.
*Recent load* is the prefill that the engine was given lately, fading with `fade_seconds`: it
spreads conversations before queues form. The routers that measured best have the same form
(`uncached + b · decayed uncached load`).

Content without a lease may be gone when the prompt arrives, so it counts a little less than leased
content. Engines whose costs are within TIE of each other are equally good. Among them rendezvous
hashing decides, over the first prefix that no engine holds; it gives the same engine on every
gateway.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from gateway.routing.held import NOTHING, Coverage, PrefixEnd, ResidencyIndex

UNLEASED_CREDIT = 0.97
DECODE_TOKENS = 16.0
"""The cost of one running answer to a prompt that joins it, in tokens of prefill."""
TIE = 0.02
"""A share of the prompt. Costs that differ by less are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of the cost.

    `load_weight` and the costs have no unit: a copied token costs `host_cost` computed ones, one
    that is read from a store `disk_cost`. A token of prefill costs each answer that runs beside it
    `delay_cost` (`roles.py`).
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
        """Take in the engine's own total.

        Computed tokens that are not ours were sent by other gateways.

        The total may already contain a turn of ours whose answer has not reached us. The difference
        to our own count is then too large for a while. So each token counts for other gateways
        once, when the difference first exceeds its former maximum.
        """
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
    """A prompt to be placed.

    `ends` are shallowest first, with sizes in tokens as far as they are known; `tokens` is the
    whole prompt's size.

    `affinity` is a key that the client gave. It comes before the prefix if no engine holds any.
    """

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
    key = _first_unheld(prompt, offers)
    chosen = max(equal, key=lambda index: _rendezvous(key, candidates[index].identity))
    return Placement(chosen=chosen, offers=offers)


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


def _first_unheld(prompt: PromptSizes, offers: Sequence[Offer]) -> str:
    """The first prefix of the prompt that no engine holds."""
    held = max(offer.coverage.held for offer in offers)
    if held == 0 and prompt.affinity is not None:
        return prompt.affinity
    for end in prompt.ends:
        if end.size > held:
            return end.digest
    return prompt.ends[-1].digest if prompt.ends else ""


def _rendezvous(key: str, identity: str) -> bytes:
    """Highest random weight (Thaler and Ravishankar 1998)."""
    return blake2b(f"{key} {identity}".encode(), digest_size=8).digest()
