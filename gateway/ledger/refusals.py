"""Requests that were refused before they were turns: counts by minute, key and reason.

A refusal has no row of its own. A gateway counts in memory, and writes its counts every few seconds
outside of any request. A gateway that is killed loses what it counted since its last write. A write
has the whole count under the gateway's own name, so a repeated write changes nothing.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite

from gateway.base.background import repeat
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError
from gateway.ledger.database import Ledger
from gateway.ledger.schema import RefusalRow
from gateway.structs.usage import RefusalCount, RefusalCounts

MINUTE_MS = 60_000
FLUSH_SECONDS = 5.0
MAX_COUNTS = 10_000
"""The most counts in memory: those of this minute, and those of earlier minutes while the database
is away."""
OTHERS = "others"
"""The reason of refusals beyond MAX_COUNTS. They have no workspace and no key."""
REASON_CHARACTERS = 64


class Place(NamedTuple):
    """What one count is about. Workspace and key are empty for a request without a valid key."""

    minute_ms: int
    workspace_id: str
    key_id: str
    reason: str


class RefusalsTable:
    """The counts in the database, of all gateways."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def put(self, gateway: str, counts: Mapping[Place, int]) -> None:
        """Write the counts of one gateway. They replace its earlier counts of the same places."""
        # All writers use one order, so that no two deadlock.
        rows = [
            {**place._asdict(), "gateway": gateway, "requests": requests}
            for place, requests in sorted(counts.items())
        ]
        insert = (postgresql if self._ledger.is_postgres else sqlite).insert(RefusalRow)
        keys = [column.name for column in RefusalRow.__table__.primary_key]
        upsert = insert.on_conflict_do_update(
            index_elements=keys, set_={"requests": insert.excluded.requests}
        )
        async with self._ledger.transaction() as connection:
            await connection.execute(upsert, rows)

    async def read(
        self, since_ms: int, until_ms: int, workspace: str | None, limit: int
    ) -> RefusalCounts:
        """The counts of minutes that begin in [since_ms, until_ms), and the sum of all of them.

        The newest counts come first, and there are at most `limit`. Without a `workspace` all
        requests count, also those without a key.
        """
        row = RefusalRow
        within: list[Any] = [row.minute_ms >= since_ms, row.minute_ms < until_ms]
        if workspace is not None:
            within.append(row.workspace_id == workspace)
        total = func.coalesce(func.sum(row.requests), 0)
        place = row.minute_ms, row.workspace_id, row.key_id, row.reason
        query = select(*place, total.label("requests")).where(*within).group_by(*place)
        query = query.order_by(row.minute_ms.desc(), total.desc(), *place[1:]).limit(limit)
        [(requests,)] = await self._ledger.rows(select(total).where(*within))
        counts = [
            RefusalCount(
                minute_ms=row.minute_ms,
                workspace=row.workspace_id or None,
                key=row.key_id or None,
                reason=row.reason,
                requests=int(row.requests),
            )
            for row in await self._ledger.rows(query)
        ]
        return RefusalCounts(requests=int(requests), counts=counts)


@dataclass(slots=True)
class RefusalCounter:
    """Counts refusals of this gateway, and writes the counts in the background."""

    table: RefusalsTable
    clock: Clock
    gateway: str = field(default_factory=lambda: secrets.token_hex(4))
    _counts: Counter[Place] = field(default_factory=Counter)
    _changed: set[Place] = field(default_factory=set)
    _flushing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def count(self, workspace: str | None, key: str | None, reason: str) -> None:
        """Count one request. This never awaits."""
        minute_ms = self.clock.wall_ms() // MINUTE_MS * MINUTE_MS
        place = Place(minute_ms, workspace or "", key or "", reason[:REASON_CHARACTERS])
        if place not in self._counts and len(self._counts) >= MAX_COUNTS:
            place = Place(minute_ms, "", "", OTHERS)
        self._counts[place] += 1
        self._changed.add(place)

    async def flush(self) -> None:
        """Write what was counted since the last time. Raise LedgerUnavailable without the database;
        the next flush then writes it."""
        async with self._flushing:
            minute_ms = self.clock.wall_ms() // MINUTE_MS * MINUTE_MS
            changed = self._changed
            self._changed = set()
            is_written = False
            try:
                if changed:
                    counts = {place: self._counts[place] for place in changed}
                    await self.table.put(self.gateway, counts)
                is_written = True
            finally:
                if not is_written:
                    self._changed |= changed
            over = [place for place in self._counts if place.minute_ms < minute_ms]
            for place in over:
                if place not in self._changed:
                    del self._counts[place]

    async def run(self, stopping: asyncio.Event) -> None:
        await repeat(stopping, FLUSH_SECONDS, self.flush, "refusals_not_counted")
        with suppress(GatewayError):
            await self.flush()
