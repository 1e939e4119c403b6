"""What the sample month's engines hold: entries with TTLs, restarts, and full memory.

A model of an engine's cache at the level of entries, by the rules of the contract. It says for each
turn what it reads, what it writes and why it missed.
"""

import random
from dataclasses import dataclass, field

from engine.protocol import TTL_SECONDS, MissReason, Ttl
from gateway.sample.cast import Machine

LOOKBACK_POSITIONS = 20
# The number of entries in an engine's lease budget. A further entry is best-effort.
_LEASED_ENTRIES = 260
_BEST_EFFORT_SECONDS = (40.0, 400.0)


@dataclass(slots=True)
class SampleEntry:
    """An entry, readable from `ready_ms` until the earlier of `until_ms` and `evicted_ms`."""

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
class SampleCache:
    """One engine over the month. `downs` are its downtimes, as ranges in ms."""

    machine: Machine
    first_ms: int
    downs: list[tuple[int, int]]
    epochs: list[str]
    entries: dict[str, SampleEntry] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    _epoch: int = 0

    def is_up(self, ms: int) -> bool:
        return ms >= self.first_ms and not any(start <= ms < end for start, end in self.downs)

    def goes_down_within(self, ms: int, duration_ms: int) -> bool:
        return any(ms < start <= ms + duration_ms for start, _ in self.downs)

    def epoch_at(self, ms: int) -> str:
        """The engine's epoch at this moment. A new epoch begins with nothing held."""
        number = sum(end <= ms for _, end in self.downs)
        if number != self._epoch:
            self._epoch = number
            self.lost = {key for key, held in self.entries.items() if held.until_ms > ms}
            self.entries.clear()
        return self.epochs[number]

    def read(self, keys: list[str], ms: int) -> tuple[int, str | None]:
        """Refresh the longest live entry at most 20 positions back; return its tokens and key."""
        for key in reversed(keys[-LOOKBACK_POSITIONS - 1 :]):
            held = self.entries.get(key)
            if held is not None and held.ready_ms <= ms and held.why_gone(ms) is None:
                held.until_ms = max(held.until_ms, ms + TTL_SECONDS[held.ttl] * 1000)
                return held.tokens, key
        return 0, None

    def holds(self, keys: list[str], ms: int) -> int:
        """Tokens of the deepest of these keys that is held at this moment."""
        live = [self.entries[key] for key in keys if key in self.entries]
        return max((held.tokens for held in live if held.why_gone(ms) is None), default=0)

    def why_missing(self, keys: list[str], ms: int) -> MissReason | None:
        """Why the deepest of these keys that was ever held is gone."""
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
        self.entries[key] = SampleEntry(tokens, ttl, ready_ms, until, evicted)

    def _num_leased(self, ms: int) -> int:
        if len(self.entries) <= _LEASED_ENTRIES:
            return len(self.entries)
        return sum(held.evicted_ms is None and held.until_ms > ms for held in self.entries.values())

    def _forget(self, ms: int) -> None:
        """Forget what ended over two hours ago."""
        if len(self.entries) > 4 * _LEASED_ENTRIES:
            old = [key for key, held in self.entries.items() if held.until_ms < ms - 7_200_000]
            for key in old:
                del self.entries[key]
