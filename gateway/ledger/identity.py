"""What a gateway must know of its database before it uses it.

- How often its keys and workspaces have changed.
- Whether it holds sample data.
- Whether its schema is this version's.
- Whether a SQLite path still leads to the open file. Rows in a deleted or replaced file would be
  lost. This stays a problem until the operator puts the file back or starts the gateway again.
"""

import os
import sqlite3
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, event, insert, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.base.errors import LedgerDamaged, LedgerNotMigrated, LedgerReplaced
from gateway.ledger.schema import WatermarkRow

_ACCESS = "access"
_SAMPLE = "sample"
# Every batch of turns asks this, so the statement is made once.
_MARKS = select(WatermarkRow.value).where(WatermarkRow.name == _SAMPLE)


async def count_change(connection: AsyncConnection) -> None:
    """Count one change of keys or workspaces. It must be the first statement of the transaction: it
    takes the lock. So changes are made one after another, and none acts on stale rows."""
    statement = update(WatermarkRow).where(WatermarkRow.name == _ACCESS)
    await connection.execute(statement.values(value=WatermarkRow.value + 1))


async def num_changes(connection: AsyncConnection) -> int:
    """How often keys and workspaces have changed."""
    query = select(WatermarkRow.value).where(WatermarkRow.name == _ACCESS)
    return int((await connection.execute(query)).scalar_one())


async def is_sample(connection: AsyncConnection) -> bool:
    return await connection.run_sync(has_sample_mark)


def has_sample_mark(connection: Connection) -> bool:
    return connection.execute(_MARKS).first() is not None


async def mark_sample(connection: AsyncConnection, now: datetime) -> None:
    """Mark the database as one of sample data. The mark is permanent."""
    row = {"name": _SAMPLE, "value": int(now.timestamp() * 1000)}
    await connection.execute(insert(WatermarkRow).values(row))


_DAMAGES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PRIMARY = 0xFF
FileId = tuple[int, int]


class Identity:
    """The identity of one database. All pools on it share it."""

    def __init__(self) -> None:
        self._path: str | None = None
        self._file: FileId | None = None
        self.is_damaged = False
        # Why the database's schema is not this version's, in the words of `revision.py`.
        self.schema_problem: str | None = None
        # Why the last look did not reach the database; None where it did.
        self.away: str | None = None

    def watch(self, engine: Engine) -> None:
        """Check every connection that the pool makes."""
        if engine.dialect.name == "sqlite" and engine.url.database not in (None, "", ":memory:"):
            self._path = path = engine.url.database

            def connected(*_: Any) -> None:
                self._file = self._file or _file_id(path)

            # The file is checked before connecting, because SQLite would make an empty file in
            # place of a missing one.
            event.listen(engine, "do_connect", lambda *_: self.check_file())
            event.listen(engine, "connect", connected)

    @property
    def problem(self) -> str | None:
        """Why the database is not the ledger any more, in one line; None where it is."""
        if self.is_damaged:
            return LedgerDamaged.default
        return LedgerReplaced.default if self.is_moved else self.schema_problem

    def check_file(self) -> None:
        """Raise LedgerReplaced where the path does not lead to the file that is open."""
        if self.is_moved:
            raise LedgerReplaced

    def check_schema(self) -> None:
        """Raise LedgerNotMigrated where the schema is another version's: its tables need other
        columns than this version writes."""
        if self.schema_problem is not None:
            raise LedgerNotMigrated(self.schema_problem)

    @property
    def is_moved(self) -> bool:
        """Whether the path leads to another file than the one that is open."""
        return (
            self._file is not None and self._path is not None and _file_id(self._path) != self._file
        )


def is_damage(error: BaseException) -> bool:
    """Whether SQLite says that the file itself is broken."""
    code = getattr(error.orig, "sqlite_errorcode", None) if isinstance(error, DBAPIError) else None
    return code is not None and code & _PRIMARY in _DAMAGES


def _file_id(path: str) -> FileId | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
