"""What a cache that loses nothing would have read and written, by the rules of the contract. Pure.

Entries stand at breakpoints. A breakpoint reads entries up to 20 positions back. An entry lives for
its TTL from the last request that wrote or read it. It is readable once its writer's answer has
begun. An engine's code for this works on tokens and blocks. This code works on digests of ended
turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.protocol import TTLS, WRITE_FIELDS, InputUsage, Ttl, split_writes
from gateway.advice.observation import Mark, Observation
from gateway.prices.price import NanoDollars, TokenPrices, cost_at

WINDOW = 20
"""The positions that one breakpoint looks at, its own included."""
_LIFE_MS: dict[Ttl, int] = {ttl: kind.seconds * 1000 for ttl, kind in TTLS.items()}
_COUNTED = ("input_tokens", "cache_read_tokens", "computed_tokens", *WRITE_FIELDS.values())
MULTIPLES = TokenPrices(
    input=NanoDollars(100), writes={}, read=NanoDollars(10), output=NanoDollars(0)
)
"""Prices in hundredths of an input token's price."""


@dataclass(slots=True)
class _Entry:
    life_ms: int
    ready_ms: int
    until_ms: int
    is_raced: bool = False

    def refresh(self, now: int) -> None:
        until = now + self.life_ms
        if until > self.until_ms:
            self.until_ms = until


@dataclass(slots=True)
class Sums:
    """What prompts were billed."""

    # How many of the prompts read something.
    hits: int = 0
    # Tokens that turns wrote while another turn was writing them.
    raced: int = 0
    # The number of those turns.
    num_races: int = 0
    # The tokens that the other turns were writing.
    first_raced: int = 0
    # Turns of one price share the object.
    _by_rates: dict[int, tuple[TokenPrices | None, InputUsage]] = field(default_factory=dict)

    def add(self, usage: InputUsage, rates: TokenPrices | None) -> None:
        self.hits += usage.cache_read_tokens > 0
        _, sums = self._by_rates.setdefault(id(rates), (rates, InputUsage()))
        _add(sums, usage)

    @property
    def usage(self) -> InputUsage:
        total = InputUsage()
        for _, sums in self._by_rates.values():
            _add(total, sums)
        return total

    @property
    def multiples(self) -> float:
        """The cost in prices of input tokens. A read token costs 0.1, and a written one what `TTLS`
        says."""
        return cost_at(MULTIPLES, self.usage, 0).actual / 100

    @property
    def nano(self) -> int | None:
        """The prompts' cost at the turns' own prices, in nano-dollars. None where a turn has no
        price."""
        total = 0
        for rates, usage in self._by_rates.values():
            if rates is None:
                return None
            total += cost_at(rates, usage, 0).actual
        return total


def _add(sums: InputUsage, usage: InputUsage) -> None:
    for name in _COUNTED:
        setattr(sums, name, getattr(sums, name) + getattr(usage, name))


@dataclass(slots=True)
class Cache:
    """One workspace's entries of one model. Turns must come in order of time."""

    min_tokens: int
    sums: Sums = field(default_factory=Sums)
    _entries: dict[bytes, _Entry] = field(default_factory=dict)

    def take(self, turn: Observation, marks: Sequence[Mark]) -> InputUsage:
        """Serve a turn with these breakpoints, and add it to the sums. Return what it was billed.
        The breakpoints must be in order of the prompt."""
        digests = turn.digests
        tokens = turn.tokens
        steps = turn.steps
        now = turn.at_ms
        entries = self._entries
        least = self.min_tokens
        marks = [mark for mark in marks if tokens[mark[0]] >= least]
        read = 0
        hit = None
        for place, _ in marks:
            position = 1
            while place >= 0:
                entry = entries.get(digests[place])
                if entry is not None and entry.ready_ms <= now < entry.until_ms:
                    if tokens[place] > read:
                        read = tokens[place]
                        hit = entry
                    break
                position += steps[place]
                if position > WINDOW:
                    break
                place -= 1
        if hit is not None:
            hit.refresh(now)
        # Live entries at the breakpoints are refreshed. The others are written.
        # `raced` is the tokens of the longest prefix that another turn is still writing.
        raced = 0
        for place, ttl in marks:
            life = _LIFE_MS[ttl]
            entry = entries.get(digests[place])
            if entry is not None and entry.ready_ms > now:
                raced = tokens[place]
                entry.until_ms = max(entry.until_ms, now + life)
                if not entry.is_raced:
                    entry.is_raced = True
                    self.sums.first_raced += raced
            elif entry is None or entry.until_ms <= now:
                entries[digests[place]] = _Entry(life, max(turn.begun_ms, now), now + life)
            else:
                entry.refresh(now)
        if raced > read:
            self.sums.raced += raced - read
            self.sums.num_races += 1
        split = split_writes(((tokens[place], ttl) for place, ttl in marks), read)
        usage = InputUsage(
            input_tokens=turn.total - read - sum(split.values()),
            cache_read_tokens=read,
            computed_tokens=min(turn.usage.computed_tokens, turn.total - read),
            **{WRITE_FIELDS[ttl]: tokens for ttl, tokens in split.items()},
        )
        self.sums.add(usage, turn.rates)
        return usage
