"""What a cache that loses nothing would have read and written: the rules of the contract. Pure.

Entries stand at breakpoints, are read up to 20 positions back, live five minutes or an hour from
the last request that wrote or read them, and are readable once their writer's answer has begun. An
engine's own code for this works on tokens and blocks; this works on digests of turns that are over.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import NamedTuple

from engine.protocol import TTLS, InputUsage, Ttl, split_writes
from gateway.advice.observation import Mark, Observation
from gateway.prices.price import TokenPrices

WINDOW = 20
"""The positions that one breakpoint looks at, its own included."""
_LIFE_MS: dict[Ttl, int] = {ttl: each.seconds * 1000 for ttl, each in TTLS.items()}
# In input tokens.
_READ_MULTIPLE = 0.1


class Billed(NamedTuple):
    """A prompt's tokens by class; `writes` by TTL class, in the order of `TTLS`."""

    input: int
    read: int
    writes: tuple[int, ...]

    @classmethod
    def of(cls, usage: InputUsage) -> "Billed":
        return cls(usage.input_tokens, usage.cache_read_tokens, tuple(usage.writes.values()))

    @property
    def written(self) -> int:
        return sum(self.writes)


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
    """Prompts' tokens by class, and those that were `computed`.

    `raced` tokens were written by a turn while another was writing them, in `num_races` turns;
    `first_raced` by those others.
    """

    turns: int = 0
    hits: int = 0
    computed: int = 0
    raced: int = 0
    num_races: int = 0
    first_raced: int = 0
    _by_rates: dict[int, tuple[TokenPrices | None, list[int]]] = field(default_factory=dict)

    def add(self, billed: Billed, rates: TokenPrices | None, computed: int) -> None:
        self.turns += 1
        self.hits += billed.read > 0
        self.computed += computed
        # Turns of one price share the object.
        found = self._by_rates.get(id(rates))
        if found is None:
            found = self._by_rates[id(rates)] = (rates, [0] * (2 + len(TTLS)))
        sums = found[1]
        sums[0] += billed.input
        sums[1] += billed.read
        for number, written in enumerate(billed.writes, 2):
            sums[number] += written

    @property
    def billed(self) -> Billed:
        columns = zip(*(sums for _, sums in self._by_rates.values()), strict=True)
        plain, read, *writes = map(sum, columns) if self._by_rates else [0] * (2 + len(TTLS))
        return Billed(plain, read, tuple(writes))

    @property
    def multiples(self) -> float:
        """The cost in input tokens: an input token is 1, a read is 0.1, a write as `TTLS` says."""
        found = self.billed
        multiples = (each.write_multiple for each in TTLS.values())
        writes: float = sum(map(mul, found.writes, multiples))
        return round(found.input + found.read * _READ_MULTIPLE + writes, 2)

    @property
    def nano(self) -> int | None:
        """The prompts' cost at the turns' own prices, None where one has none."""
        total = 0
        for rates, (plain, read, *writes) in self._by_rates.values():
            if rates is None:
                return None
            total += plain * rates.input + read * rates.read
            total += sum(map(mul, writes, map(rates.write, TTLS)))
        return total


@dataclass(slots=True)
class Cache:
    """One workspace's entries of one model. Turns must come in order of time."""

    min_tokens: int
    sums: Sums = field(default_factory=Sums)
    _entries: dict[bytes, _Entry] = field(default_factory=dict)

    def take(self, turn: Observation, marks: Sequence[Mark]) -> Billed:
        """Serve a turn with these breakpoints, in order of the prompt, and add it to the sums."""
        tokens, least = turn.tokens, self.min_tokens
        marks = [mark for mark in marks if tokens[mark[0]] >= least]
        read, hit = self._longest(turn, marks) if marks else (0, None)
        split = split_writes(((tokens[place], ttl) for place, ttl in marks), read)
        writes = tuple(split[ttl] for ttl in TTLS)
        if marks and (raced := self._write(turn, marks, hit)) > read:
            self.sums.raced += raced - read
            self.sums.num_races += 1
        billed = Billed(turn.total - read - sum(writes), read, writes)
        self.sums.add(billed, turn.rates, min(turn.served.usage.computed_tokens, turn.total - read))
        return billed

    def _longest(self, turn: Observation, marks: Sequence[Mark]) -> tuple[int, bytes | None]:
        digests, tokens, steps, now = turn.digests, turn.tokens, turn.steps, turn.at_ms
        entries, best, hit = self._entries, 0, None
        for place, _ in marks:
            position = 1
            while place >= 0:
                found = entries.get(digests[place])
                if found is not None and found.ready_ms <= now < found.until_ms:
                    if tokens[place] > best:
                        best, hit = tokens[place], digests[place]
                    break
                position += steps[place]
                if position > WINDOW:
                    break
                place -= 1
        return best, hit

    def _write(self, turn: Observation, marks: Sequence[Mark], hit: bytes | None) -> int:
        """Refresh what was read and what is live at the breakpoints, and write the rest.

        Return the tokens of the longest prefix that another turn was still writing.
        """
        now, entries, raced = turn.at_ms, self._entries, 0
        if hit is not None:
            found = entries[hit]
            found.refresh(now)
        for place, ttl in marks:
            digest = turn.digests[place]
            known = entries.get(digest)
            if known is not None and known.ready_ms > now:
                raced = turn.tokens[place]
                known.until_ms = max(known.until_ms, now + _LIFE_MS[ttl])
                if not known.is_raced:
                    known.is_raced = True
                    self.sums.first_raced += raced
            elif known is None or known.until_ms <= now:
                life = _LIFE_MS[ttl]
                entries[digest] = _Entry(life, max(turn.served.begun_ms, now), now + life)
            else:
                known.refresh(now)
        return raced
