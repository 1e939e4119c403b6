"""What the sample month's engines hold: entries with TTLs, restarts, and what does not fit.

A model of an engine's cache by the rules of the contract, at the level of entries: enough to say
for each turn what it reads, what it writes and why it missed.
"""

import random
from dataclasses import dataclass, field

from engine.protocol import TTL_SECONDS, MissReason, Ttl
from gateway.sample.cast import Machine

LOOKBACK_POSITIONS = 20
# How many entries an engine's lease budget has room for; beyond them a new one is best-effort.
_LEASED_ENTRIES = 260
_BEST_EFFORT_SECONDS = (40.0, 400.0)


@dataclass(slots=True)
class Held:
    """An entry: readable from `ready_ms` until `until_ms`, and no longer than `evicted_ms`."""

    tokens: int
    ttl: Ttl
    ready_ms: int
    until_ms: int
    evicted_ms: int | None

    def why_gone(self, ms: int) -> MissReason | None:
        if self.evicted_ms is not None and self.evicted_ms <= min(ms, self.until_ms):
            return "best_effort_evicted"
        return "ttl_expired" if self.until_ms <= ms else None


@dataclass(slots=True)
class EngineMemory:
    """One engine over the month. `downs` are the times, from and to in ms, when it is away."""

    machine: Machine
    first_ms: int
    downs: list[tuple[int, int]]
    epochs: list[str]
    entries: dict[str, Held] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    _epoch: int = 0

    def is_up(self, ms: int) -> bool:
        return ms >= self.first_ms and not any(start <= ms < end for start, end in self.downs)

    def goes_down_within(self, ms: int, duration_ms: int) -> bool:
        return any(ms < start <= ms + duration_ms for start, _ in self.downs)

    def epoch_at(self, ms: int) -> str:
        """Its epoch now; with a new one nothing of the old is held."""
        number = sum(end <= ms for _, end in self.downs)
        if number != self._epoch:
            self._epoch = number
            self.lost = {key for key, held in self.entries.items() if held.until_ms > ms}
            self.entries.clear()
        return self.epochs[number]

    def read(self, keys: list[str], ms: int) -> tuple[int, str | None]:
        """The longest live entry at most 20 positions back: its tokens and key, and refresh it."""
        for key in reversed(keys[-LOOKBACK_POSITIONS - 1 :]):
            held = self.entries.get(key)
            if held is not None and held.ready_ms <= ms and held.why_gone(ms) is None:
                held.until_ms = max(held.until_ms, ms + TTL_SECONDS[held.ttl] * 1000)
                return held.tokens, key
        return 0, None

    def holds(self, keys: list[str], ms: int) -> int:
        """Tokens of the deepest of these that is held now."""
        live = [self.entries[key] for key in keys if key in self.entries]
        return max((held.tokens for held in live if held.why_gone(ms) is None), default=0)

    def why_missing(self, keys: list[str], ms: int) -> MissReason | None:
        """What became of the deepest of these that ever was here."""
        for key in reversed(keys):
            held = self.entries.get(key)
            if held is not None:
                if held.ready_ms > ms:
                    return "in_progress_race"
                return held.why_gone(ms)
        return None

    def write(
        self, key: str, tokens: int, ttl: Ttl, ms: int, ready_ms: int, chance: random.Random
    ) -> None:
        known = self.entries.get(key)
        if known is not None and known.why_gone(ms) is None:
            known.until_ms = max(known.until_ms, ms + TTL_SECONDS[known.ttl] * 1000)
            return
        self._forget(ms)
        evicted = None
        if self._num_leased(ms) > _LEASED_ENTRIES:
            evicted = ms + int(chance.uniform(*_BEST_EFFORT_SECONDS) * 1000)
        until = ms + TTL_SECONDS[ttl] * 1000
        self.entries[key] = Held(tokens, ttl, ready_ms, until, evicted)

    def _num_leased(self, ms: int) -> int:
        if len(self.entries) <= _LEASED_ENTRIES:
            return len(self.entries)
        return sum(held.evicted_ms is None and held.until_ms > ms for held in self.entries.values())

    def _forget(self, ms: int) -> None:
        """What ended over two hours ago is no longer remembered."""
        if len(self.entries) > 4 * _LEASED_ENTRIES:
            old = [key for key, held in self.entries.items() if held.until_ms < ms - 7_200_000]
            for key in old:
                del self.entries[key]
