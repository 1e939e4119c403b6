"""What the sample month's engines hold: entries with TTLs, restarts, and full memory.

A model of an engine's cache at the level of entries, by the rules of the contract.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby

from engine.protocol import TTLS, MissReason, Ttl
from gateway.base.epochs import EpochReport
from gateway.ledger.upkeep import MADE_UP
from scripts.sample.arrivals import start_of
from scripts.sample.cast import Machine

_HOUR_MS = 3_600_000
LOOKBACK_POSITIONS = 20
# Beyond so many, entries that ended over two hours ago are forgotten.
_MAX_ENTRIES = 1000


@dataclass(slots=True)
class SampleEntry:
    """An entry."""

    tokens: int
    ttl: Ttl
    # It is readable in between.
    ready_ms: int
    until_ms: int

    def refresh(self, ms: int) -> None:
        self.until_ms = max(self.until_ms, ms + TTLS[self.ttl].seconds * 1000)


@dataclass(frozen=True, slots=True)
class MarkedPrefix:
    """A marked prefix: its name, its length in tokens, and the TTL that it was marked with."""

    key: str
    tokens: int
    ttl: Ttl


class SampleCache:
    """One engine over the month. `downs` are its downtimes, as ranges in ms."""

    def __init__(self, machine: Machine, until: datetime, chance: random.Random) -> None:
        starts = [(start_of(until, day, hour), mins) for day, hour, mins in machine.restarts]
        self.machine = machine
        self.lost: set[str] = set()
        self._first_ms = start_of(until, machine.first_day, 0)
        self._downs = [(start, start + int(minutes * 60_000)) for start, minutes in starts]
        self._epochs = [f"{chance.getrandbits(128):032x}" for _ in range(len(starts) + 1)]
        self._epoch = 0
        self._entries: dict[str, SampleEntry] = {}
        # By the epoch's number: when leases ended by TTL, and how many ended with the process.
        self._expired: list[list[int]] = [[] for _ in self._epochs]
        self._broken = [0 for _ in self._epochs]

    def is_up(self, ms: int) -> bool:
        return ms >= self._first_ms and not any(start <= ms < end for start, end in self._downs)

    def epoch_at(self, ms: int) -> str:
        """The engine's epoch at this moment. A new epoch begins with nothing held."""
        number = sum(end <= ms for _, end in self._downs)
        if number != self._epoch:
            stopped_ms, _ = self._downs[self._epoch]
            self._end_leases(self._entries.values(), stopped_ms)
            self._broken[self._epoch] = sum(
                entry.until_ms > stopped_ms for entry in self._entries.values()
            )
            self._epoch = number
            self.lost = {key for key, entry in self._entries.items() if entry.until_ms > ms}
            self._entries.clear()
        return self._epochs[number]

    def _end_leases(self, entries: Iterable[SampleEntry], ms: int) -> None:
        """Count the entries that ended by their TTL before this moment."""
        ends = [entry.until_ms for entry in entries if entry.until_ms <= ms]
        self._expired[self._epoch] += ends

    def epoch_reports(self, until_ms: int) -> Iterator[EpochReport]:
        """The reports of leases that a gateway would have written, hour by hour. Call it once, when
        the month is over. No report has a lease that outlives the month: the lease has not ended,
        and no running engine holds it."""
        self._end_leases(self._entries.values(), until_ms)
        starts = [self._first_ms, *(end for _, end in self._downs)]
        stops = [*(start for start, _ in self._downs), None]
        for number, epoch in enumerate(self._epochs):
            report = EpochReport(
                engine=self.machine.name,
                epoch=epoch,
                model=self.machine.serves,
                device="",
                kind=MADE_UP,
                first_ms=starts[number],
                heard_ms=starts[number],
            )
            expired = 0
            for _, moments in groupby(sorted(self._expired[number]), lambda ms: ms // _HOUR_MS):
                of_hour = list(moments)
                expired += len(of_hour)
                ended = {"expired": expired}
                yield replace(report, heard_ms=of_hour[-1], granted=expired, ended=ended)
            stopped_ms = stops[number]
            yield replace(
                report,
                heard_ms=until_ms if stopped_ms is None else stopped_ms,
                silent_ms=stopped_ms,
                granted=expired + self._broken[number],
                ended={"expired": expired},
            )

    def read(self, keys: list[str], ms: int) -> tuple[int, str | None]:
        """Refresh the longest live entry at most 20 positions back; return its tokens and key."""
        for key in reversed(keys[-LOOKBACK_POSITIONS - 1 :]):
            entry = self._entries.get(key)
            if entry is not None and entry.ready_ms <= ms < entry.until_ms:
                entry.refresh(ms)
                return entry.tokens, key
        return 0, None

    def holds(self, keys: list[str], ms: int) -> int:
        """The tokens of the deepest of these keys that is held at this moment."""
        live = [self._entries[key] for key in keys if key in self._entries]
        return max((entry.tokens for entry in live if ms < entry.until_ms), default=0)

    def why_missing(self, keys: list[str], ms: int) -> MissReason | None:
        """Why the deepest of these keys that was ever held is gone."""
        entry = next((self._entries[key] for key in reversed(keys) if key in self._entries), None)
        if entry is None or entry.ready_ms <= ms < entry.until_ms:
            return None
        return "in_progress_race" if entry.ready_ms > ms else "ttl_expired"

    def write(self, mark: MarkedPrefix, ms: int, ready_ms: int) -> None:
        entry = self._entries.get(mark.key)
        if entry is not None and ms < entry.until_ms:
            entry.refresh(ms)
            return
        if entry is not None:
            self._end_leases([entry], ms)
        if len(self._entries) > _MAX_ENTRIES:
            old = ms - 7_200_000
            gone = (entry for key, entry in self._entries.items() if key != mark.key)
            self._end_leases((entry for entry in gone if entry.until_ms < old), ms)
            self._entries = {
                k: entry for k, entry in self._entries.items() if entry.until_ms >= old
            }
        until = ms + TTLS[mark.ttl].seconds * 1000
        self._entries[mark.key] = SampleEntry(mark.tokens, mark.ttl, ready_ms, until)
