"""Closes turns that the journal lost by what engines counted of them, and tells which counts no
gateway asks for.

The sweep sets a turn aside that neither the journal nor the ledger has (`reconcile.py`), and a
record whose checksum is wrong is set aside when it is read. Where an engine still keeps the turn's
counts, a record is made of them and closed like any other. The turn's last request counts, so all
engines must have answered, or some of them not for a long time.

Counts of another gateway are its own: it may come back with its journal, which knows more. Those
that stay are told by number (`recover --instance` makes rows of them).
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from gateway.base.logs import get_logger
from gateway.base.record import TurnRecord, turn_of
from gateway.journal.drain import Known
from gateway.journal.rebuilt import Counted, Rebuilder, instance_of, last_attempts
from gateway.journal.store import BROKEN, LOST, Journal

GRACE_SECONDS = 30.0
"""A turn of this process may be on its way to the journal."""
AWAY_SECONDS = 300.0
"""So long an engine that does not answer is waited for: it may have the turn's last request."""
UNCLAIMED_SECONDS = 900.0
"""A gateway that runs acknowledges counts before: see the times of `reconcile.py`."""
_MOST_AT_ONCE = 200


@dataclass(slots=True)
class LostTurns:
    """`unclaimed` has how many counts of each other instance no gateway has asked for, of the last
    look."""

    journal: Journal
    known: Known
    charge: Callable[[TurnRecord], None]
    rebuilder: Rebuilder
    workspaces: Callable[[], Awaitable[Collection[str]]]
    monotonic: Callable[[], float]
    unclaimed: Counter[str] = field(default_factory=Counter)
    _first_seen: dict[str, float] = field(default_factory=dict)
    _strangers: dict[str, float] = field(default_factory=dict)
    _incomplete_since: float | None = None

    async def look(self, counted: Sequence[Counted], *, is_whole: bool) -> None:
        """Take in what the engines that answered keep. `is_whole`: all engines answered. Raise
        LedgerUnavailable and JournalUnavailable."""
        now = self.monotonic()
        self._note_strangers(counted, now)
        if is_whole:
            self._incomplete_since = None
        elif self._incomplete_since is None:
            self._incomplete_since = now
        since = self._incomplete_since
        if since is None or now - since >= AWAY_SECONDS:
            await self._fill_in(counted, now)

    def _note_strangers(self, counted: Sequence[Counted], now: float) -> None:
        ids = {entry.final.request_id for entry in counted}
        others = {name for name in ids if instance_of(name) not in self.journal.instances}
        self._strangers = {name: self._strangers.get(name, now) for name in others}
        self.unclaimed = Counter(
            instance_of(name)
            for name, since in self._strangers.items()
            if now - since >= UNCLAIMED_SECONDS
        )

    async def _fill_in(self, counted: Sequence[Counted], now: float) -> None:
        aside = {
            *await self.journal.set_aside_turns(LOST),
            *await self.journal.set_aside_turns(BROKEN),
        }
        if not aside:
            self._first_seen.clear()
            return
        last = last_attempts(
            entry for entry in counted if turn_of(entry.final.request_id)[0] in aside
        )
        self._first_seen = {turn_id: self._first_seen.get(turn_id, now) for turn_id in last}
        due = [turn_id for turn_id in sorted(last) if self._is_due(turn_id, now)][:_MOST_AT_ONCE]
        if not due:
            return
        stored = await self.known(due)
        if stored:
            await self.journal.found(sorted(stored))
        lost = [last[turn_id] for turn_id in due if turn_id not in stored]
        for record in self.rebuilder.records(lost, await self.workspaces()):
            self.charge(record)
            await self.journal.close(record)
            get_logger("reconcile").warning("turn_rebuilt", turn=record.id, engine=record.engine)

    def _is_due(self, turn_id: str, now: float) -> bool:
        is_ours = instance_of(turn_id) == self.journal.instance
        return not is_ours or now - self._first_seen[turn_id] >= GRACE_SECONDS
