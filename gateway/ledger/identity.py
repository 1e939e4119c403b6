"""Numbers that tell of a database: how often its access has changed, whether it holds sample data,
and its stamp, by which a gateway sees that it is still the database that it began with.

The *stamp* is a random number, made at the first insert. For SQLite the paths of the file and of
its write-ahead log must lead to the open ones, because rows in a deleted or replaced file are lost.
A difference stays until the operator puts the file back or starts the gateway again.
"""

import os
import secrets
import sqlite3
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, event, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.base.errors import LedgerDamaged, LedgerReplaced
from gateway.ledger.schema import WatermarkRow

_ACCESS = "access"
_SAMPLE = "sample"
_STAMP = "stamp"
# Every batch of turns asks these, so they are made once.
_MARKS = select(WatermarkRow.value).where(WatermarkRow.name == _SAMPLE)
_STAMPS = select(WatermarkRow.value).where(WatermarkRow.name == _STAMP)


async def count_change(connection: AsyncConnection) -> None:
    """Count one change, as the first statement of its transaction.

    The statement takes the lock. So changes are made one after another, and on SQLite no change has
    read stale rows.
    """
    statement = update(WatermarkRow).where(WatermarkRow.name == _ACCESS)
    await connection.execute(statement.values(value=WatermarkRow.value + 1))


async def num_changes(connection: AsyncConnection) -> int:
    query = select(WatermarkRow.value).where(WatermarkRow.name == _ACCESS)
    return int((await connection.execute(query)).scalar_one())


async def is_sample(connection: AsyncConnection) -> bool:
    return await connection.run_sync(has_sample_mark)


def has_sample_mark(connection: Connection) -> bool:
    return connection.execute(_MARKS).first() is not None


async def mark_sample(connection: AsyncConnection, now: datetime) -> None:
    """Mark the database. The mark is permanent."""
    row = {"name": _SAMPLE, "value": int(now.timestamp() * 1000)}
    await connection.execute(insert(WatermarkRow).values(row))


_STAMP_BITS = 62
_DAMAGES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PRIMARY = 0xFF

FileId = tuple[int, int]


class Identity:
    """The identity of one database, shared by all pools that lead to it.

    `problem` says in one line why the database is not the ledger any more. None means no problem.
    """

    def __init__(self) -> None:
        self._path: str | None = None
        self._file: FileId | None = None
        self._stamp: int | None = None
        self.is_damaged = False
        self._has_other_stamp = self._has_lost_log = False

    def watch(self, engine: Engine) -> None:
        """Check every connection that the pool makes."""
        if engine.dialect.name == "sqlite" and engine.url.database not in (None, "", ":memory:"):
            self._path = path = engine.url.database

            def connected(_: Any, record: Any) -> None:
                self._file = self._file or _file_id(path)
                record.info["log"] = _file_id(f"{path}-wal")

            # Before connecting: SQLite would make an empty file in place of a missing one.
            event.listen(engine, "do_connect", lambda *_: self.check_file())
            event.listen(engine, "connect", connected)

    @property
    def problem(self) -> str | None:
        if self.is_damaged:
            return LedgerDamaged.default
        is_other = self._has_other_stamp or self._has_lost_log or self._is_moved
        return LedgerReplaced.default if is_other else None

    def check_file(self) -> None:
        """Raise LedgerReplaced where the path does not lead to the file that is open."""
        if self._is_moved:
            raise LedgerReplaced

    def check_stamp(self, connection: Connection) -> None:
        """Raise LedgerReplaced if an earlier check found another stamp."""
        found = connection.execute(_STAMPS).scalar_one_or_none()
        if found is None:
            kind = postgresql if connection.dialect.name == "postgresql" else sqlite
            made = {"name": _STAMP, "value": secrets.randbits(_STAMP_BITS)}
            connection.execute(kind.insert(WatermarkRow).values(made).on_conflict_do_nothing())
            found = connection.execute(_STAMPS).scalar_one()
        if self._stamp is None:
            self._stamp = found
        self._has_other_stamp = found != self._stamp
        if self._has_other_stamp:
            raise LedgerReplaced

    def check_log(self, connection: Connection) -> None:
        """Raise LedgerReplaced if the connection writes to a log that has lost its name.

        The log's content reaches the database's file when the last connection is closed.
        """
        if self._path is None:
            return
        opened = connection.connection.info.get("log")
        if opened is not None and opened != _file_id(f"{self._path}-wal"):
            self._has_lost_log = True
            raise LedgerReplaced

    @property
    def _is_moved(self) -> bool:
        return (
            self._file is not None and self._path is not None and _file_id(self._path) != self._file
        )


def is_damage(error: BaseException) -> bool:
    """Whether SQLite says that the file itself is broken."""
    code = getattr(error.orig, "sqlite_errorcode", None) if isinstance(error, DBAPIError) else None
    return code is not None and code & _PRIMARY in _DAMAGES


def _file_id(path: str) -> FileId | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
