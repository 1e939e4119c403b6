"""Compares the turns that this gateway gave to the ledger with those that the ledger has, by day.

The journal counts a turn in the commit in which it forgets it. At that moment the ledger had the
turn. So a turn that is missing later was lost in the ledger, by a damaged file or log, a restored
backup or a deleted row. A turn that neither of the two has is not counted here. Engines'
unacknowledged counts show it (`reconcile.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from gateway.base.background import pause
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError
from gateway.base.logs import get_logger
from gateway.journal.store import Journal

DAY_MS = 86_400_000

_RETRY_SECONDS = 10.0
# The pause between two looks while something is missing, since it may come back.
_FOUND_SECONDS = 15.0
# The largest share of the time that such looks may take.
_SHARE = 0.05
# How long the first look waits for the drain, which first inserts what the last run left.
_DRAIN_SECONDS = 30.0
_POLL_SECONDS = 0.25
# How many of the newest days are always looked at.
_RECENT_DAYS = 2

Count = Callable[[Sequence[str], int, int], Awaitable[tuple[int, int] | None]]
"""How many turns of these instances began in a range (ms), and how many of them are damaged; None
where they may have been deleted on purpose."""


class Finding(NamedTuple):
    """What is wrong with a day's turns in the ledger."""

    day_ms: int
    # How many turns the ledger lacks.
    missing: int
    # How many turns are not what was inserted.
    damaged: int


class Audit:
    """`findings` are of the last look; None before the first one."""

    def __init__(self, journal: Journal, count: Count, clock: Clock) -> None:
        self._journal = journal
        self._count = count
        self._clock = clock
        self.findings: list[Finding] | None = None

    async def run(self, stopping: asyncio.Event) -> None:
        """Look at the start and once a day. While something is missing or damaged, or the database
        is away, look again soon."""
        deadline = self._clock.monotonic() + _DRAIN_SECONDS
        while self._journal.num_closed and self._clock.monotonic() < deadline:
            await pause(stopping, _POLL_SECONDS)
        while not stopping.is_set():
            began = self._clock.monotonic()
            try:
                await self.look()
                seconds = self._seconds_to_next_day()
                if self.findings:
                    look_seconds = self._clock.monotonic() - began
                    seconds = min(seconds, max(_FOUND_SECONDS, look_seconds / _SHARE))
            except GatewayError as error:
                get_logger("audit").warning("turns_not_counted", error=str(error))
                seconds = _RETRY_SECONDS
            await pause(stopping, seconds)

    async def look(self) -> None:
        """Check the recent days, and the days with findings. Raise LedgerUnavailable and
        JournalUnavailable."""
        today = self._clock.wall_ms() // DAY_MS * DAY_MS
        recent = today - (_RECENT_DAYS - 1) * DAY_MS
        known_days = {finding.day_ms for finding in self.findings or ()}
        findings = []
        for day_ms, num_forgotten in sorted((await self._journal.forgotten()).items()):
            # The first look checks all days, because the last run's findings are not known.
            if self.findings is not None and day_ms < recent and day_ms not in known_days:
                continue
            stored = await self._count(self._journal.instances, day_ms, day_ms + DAY_MS)
            if stored is None:
                continue
            count, damaged = stored
            missing = max(num_forgotten - count, 0)
            if missing or damaged:
                finding = Finding(day_ms, missing, damaged)
                findings.append(finding)
                if finding not in (self.findings or ()):
                    get_logger("audit").error("turns_missing", **finding._asdict())
        self.findings = findings

    def _seconds_to_next_day(self) -> float:
        return (DAY_MS - self._clock.wall_ms() % DAY_MS) / 1000 + 60.0
