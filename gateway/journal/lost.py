"""Closes turns that the journal lost, from engines' counts, and counts what no gateway asks for.

A turn that neither the journal nor the ledger has is set aside by the sweep (`reconcile.py`). A
record whose checksum is wrong is set aside when it is read. If an engine still keeps the turn's
counts, a record is made from them and closed like any other. The turn's last request counts. So
this waits until all engines have answered, or some have been away for a long time.

Counts of another gateway's turns are left alone, because it may come back with its journal, which
knows more. The number of counts that stay is reported (`recover --instance` makes rows of them).
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from gateway.base.logs import get_logger
from gateway.base.record import TurnRecord, turn_of
from gateway.journal.drain import Known
from gateway.journal.rebuilt import Counted, Rebuilder, instance_of, last_attempts
from gateway.journal.store import Journal
from gateway.journal.table import BROKEN, LOST

GRACE_SECONDS = 30.0
"""The wait for a turn of this process, which may be on its way to the journal."""
AWAY_SECONDS = 300.0
"""The wait for an engine that does not answer. It may have the turn's last request."""
UNCLAIMED_SECONDS = 900.0
"""The age at which counts are unclaimed. A running gateway acknowledges its counts sooner (see the
times of `reconcile.py`)."""
_MOST_AT_ONCE = 200


@dataclass(slots=True)
class LostTurns:
    """Finds lost turns in engines' counts."""

    journal: Journal
    known: Known
    charge: Callable[[TurnRecord], None]
    rebuilder: Rebuilder
    workspaces: Callable[[], Awaitable[Collection[str]]]
    monotonic: Callable[[], float]
    # How many counts of each other instance no gateway has asked for, as of the last look.
    unclaimed: Counter[str] = field(default_factory=Counter)
    # When each lost turn's counts were first seen, by turn id.
    _first_seen: dict[str, float] = field(default_factory=dict)
    # When counts of other instances were first seen, by request id.
    _strangers: dict[str, float] = field(default_factory=dict)
    # Since when not all engines answer; None while they do.
    _incomplete_since: float | None = None

    async def look(self, counted: Sequence[Counted], *, is_whole: bool) -> None:
        """Take in the counts of the engines that answered. With `is_whole` all engines did. Raise
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
