"""Looks for damage in the ledger: in the file's structure, in rows, and between turns and sums.

Each finding is one line that names the table and the row, or the day. It is read in short pieces,
so that neither writers nor the event loop wait for it.
"""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.base.errors import LedgerDamaged, LedgerUnavailable
from gateway.ledger.checksums import COLUMN, checksum_of
from gateway.ledger.database import Ledger
from gateway.ledger.schema import PrefixRow, TurnRollupRow, TurnRow
from gateway.ledger.sums.horizon import horizon_ms
from gateway.ledger.sums.rollups import DAY_SECONDS, days, interval_sums, prefix_sums

_DAY_MS = DAY_SECONDS * 1000
_PAGE = 100
_MAX_STRUCTURE = 20
_OPCODES = 100_000

Pause = Callable[[], Awaitable[None]]
"""Awaited between two pieces of work."""


async def problems(
    ledger: Ledger, pause: Pause, stopping: threading.Event | None = None
) -> AsyncIterator[str]:
    """Yield one line for each finding. Raise LedgerDamaged where the file can't be read.

    `stopping` ends the look at the structure, which runs in a thread.
    """
    if ledger.path is not None:
        stop = stopping or threading.Event()
        for line in await asyncio.to_thread(structure, ledger.path, stop):
            yield line
    async for line in broken_rows(ledger, pause):
        yield line
    async for line in wrong_sums(ledger, pause):
        yield line


def structure(path: str, stopping: threading.Event) -> list[str]:
    """What SQLite finds in the structure of the file. Raise LedgerDamaged; blocks."""
    try:
        # A file that is not there is not made.
        with closing(sqlite3.connect(f"file:{quote(path)}?mode=rw", uri=True)) as db:
            db.set_progress_handler(stopping.is_set, _OPCODES)
            rows = db.execute(f"PRAGMA integrity_check({_MAX_STRUCTURE})").fetchall()
    except sqlite3.DatabaseError as error:
        if stopping.is_set():
            return []
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise LedgerDamaged from error
        raise LedgerUnavailable from error
    return [f"{path}: structure: {row[0]}" for row in rows if row[0] != "ok"]


async def broken_rows(ledger: Ledger, pause: Pause) -> AsyncIterator[str]:
    """Turns that differ from what was written. Rows of earlier versions have no checksum."""
    last, is_whole = "", False
    while not is_whole:
        query = select(TurnRow.__table__).where(TurnRow.id > last).order_by(TurnRow.id)
        async with ledger.snapshot() as connection:
            rows = await _read(connection, query.limit(_PAGE))
        is_whole = len(rows) < _PAGE
        for row in rows:
            last = row["id"]
            if row[COLUMN] is not None and not _is_as_written(row):
                yield f"table turns: the row of turn {last} is damaged"
        await pause()


async def stored_turns(ledger: Ledger) -> list[dict[str, Any]]:
    """All turns, column by column. Raise LedgerDamaged where they can't be read."""
    async with ledger.snapshot() as connection:
        return [dict(row) for row in await _read(connection, select(TurnRow.__table__))]


async def _read(connection: AsyncConnection, query: Any) -> list[Any]:
    """Rows as they are stored. Raise LedgerDamaged if a value has not its column's type."""
    try:
        return list((await connection.execute(query)).mappings().all())
    except (ValueError, TypeError, UnicodeDecodeError, sqlite3.OperationalError) as error:
        raise LedgerDamaged from error


def _is_as_written(row: Any) -> bool:
    try:
        return bool(checksum_of(row) == row[COLUMN])
    except (ValueError, TypeError, UnicodeEncodeError):
        return False


async def wrong_sums(ledger: Ledger, pause: Pause) -> AsyncIterator[str]:
    """Days and prefixes whose sums are not those of their turns."""
    async with ledger.snapshot() as connection:
        whole = -(-await horizon_ms(connection) // _DAY_MS) * _DAY_MS
        ends = [
            each
            for column in (TurnRow.opened_ms, TurnRollupRow.start_ms)
            for each in (await connection.execute(select(func.min(column), func.max(column)))).one()
            if each is not None
        ]
    if not ends:
        return
    for since, until in days(max(min(ends), whole), max(ends) + 1):
        where = (TurnRow.opened_ms >= since) & (TurnRow.opened_ms < until)
        for table, sums in interval_sums(where).items():
            within = (table.start_ms >= since) & (table.start_ms < until)
            async with ledger.snapshot() as connection:
                # Retention may have moved it on meanwhile.
                if since < await horizon_ms(connection):
                    break
                if await _differ(connection, table, sums, within):
                    day = datetime.fromtimestamp(since / 1000, UTC).date()
                    name = table.__tablename__
                    yield f"table {name}: the sums of {day} are not those of its turns"
            await pause()
    async with ledger.snapshot() as connection:
        # A prefix with deleted turns has sums that nothing can be compared with.
        known = PrefixRow.first_ms >= await horizon_ms(connection)
        if await _differ(connection, PrefixRow, prefix_sums(), known):
            yield "table prefixes: its sums are not those of the turns"


async def _differ(connection: AsyncConnection, table: Any, sums: Any, within: Any) -> bool:
    """Whether the rows of a table and the sums of the turns differ, in either direction."""
    expected = sums.subquery()
    names = [column.name for column in expected.c]
    own = select(*(table.__table__.c[name] for name in names)).where(within)
    made = select(*(expected.c[name] for name in names))
    if table is PrefixRow:
        firsts = select(PrefixRow.workspace_id, PrefixRow.prefix).where(~within)
        gone = firsts.subquery()
        is_gone = (gone.c.workspace_id == expected.c.workspace_id) & (
            gone.c.prefix == expected.c.prefix
        )
        made = made.where(~select(gone.c.prefix).where(is_gone).exists())
    for one, other in ((own, made), (made, own)):
        if (await connection.execute(one.except_(other).limit(1))).first() is not None:
            return True
    return False
