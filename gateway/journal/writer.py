"""The journal: this gateway's durable record of turns, until the ledger has them."""

import asyncio
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.base.errors import JournalFull, JournalUnavailable
from gateway.base.record import TurnRecord
from gateway.base.settings import JOURNAL_MAX_BYTES
from gateway.journal.store import Guard, Kind, Store, Work, unguarded

_DEADLINE_SECONDS = 5.0

Result = TypeVar("Result")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TurnRecord).decode


class Journal:
    """Opens and closes turns durably. Every method that awaits raises JournalUnavailable after 5 s.

    `instance` (8 hex digits) is this journal's own id, with which its turns' ids begin.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int = JOURNAL_MAX_BYTES,
        guard: Guard = unguarded,
    ) -> None:
        self._store = Store(directory, max_bytes, guard)
        self.instance = _instance(self._store.db)

    @property
    def backlog(self) -> int:
        """Turns that the ledger does not have yet, open ones among them."""
        return self._store.num_turns

    @property
    def num_bytes(self) -> int:
        return self._store.num_bytes

    @property
    def max_bytes(self) -> int:
        return self._store.max_bytes

    @property
    def has_room(self) -> bool:
        """Whether a turn may be opened: below the bound, and with the reserve to close all."""
        return self._store.has_room

    async def open(self, record: TurnRecord) -> None:
        """Raise JournalFull where there is no room for new turns."""
        if not self._store.has_room:
            raise JournalFull
        blob = _encode(record)
        try:
            await self._wait(
                lambda db: (
                    db.execute(
                        "INSERT INTO turns (id, record) VALUES (?, ?)", (record.id, blob)
                    ).rowcount
                ),
                "open",
            )
        except JournalUnavailable:
            # Full disks have more than one error.
            if not self._store.has_room:
                raise JournalFull from None
            raise

    async def rewrite(self, record: TurnRecord) -> None:
        """Replace the record of an open turn: it goes on at another engine."""
        blob = _encode(record)
        await self._wait(
            lambda db: (
                db.execute(
                    "UPDATE turns SET record = ? WHERE id = ? AND closed = 0", (blob, record.id)
                ).rowcount
            )
        )

    async def close(self, record: TurnRecord) -> None:
        """Closing twice keeps the first close. One that fails is tried again until it works, also
        after the caller was told of the failure."""
        await self._wait(self._closing(record), "close")

    def close_soon(self, record: TurnRecord) -> None:
        """Hand a close over without waiting: safe while a stream is being cancelled."""
        future = self._store.submit(self._closing(record), "close")
        future.add_done_callback(lambda future: future.cancelled() or future.exception())

    async def open_turns(self) -> list[TurnRecord]:
        return await self._records("SELECT record FROM turns WHERE closed = 0 ORDER BY id", ())

    async def closed_turns(self, limit: int) -> list[TurnRecord]:
        return await self._records(
            "SELECT record FROM turns WHERE closed = 1 ORDER BY rowid LIMIT ?", (limit,)
        )

    async def unknown(self, turn_ids: Sequence[str]) -> list[str]:
        """Those of the turns that are not, or no longer, in the journal."""

        def look(db: sqlite3.Connection) -> list[str]:
            query = "SELECT 1 FROM turns WHERE id = ?"
            return [i for i in turn_ids if db.execute(query, (i,)).fetchone() is None]

        return await self._wait(look)

    async def forget(self, turn_ids: Sequence[str]) -> None:
        """Remove turns that the ledger has."""
        rows = [(turn_id,) for turn_id in turn_ids]
        await self._wait(
            lambda db: db.executemany("DELETE FROM turns WHERE id = ?", rows).rowcount, "forget"
        )

    async def set_aside(self, turn_ids: Sequence[str]) -> None:
        """Keep closed turns that the ledger refuses, but offer them no more."""
        rows = [(turn_id,) for turn_id in turn_ids]
        await self._wait(
            lambda db: (
                db.executemany(
                    "UPDATE turns SET closed = 2 WHERE id = ? AND closed = 1", rows
                ).rowcount
            )
        )

    async def stop(self) -> None:
        self._store.hand_over()
        await asyncio.to_thread(self._store.stop)

    @staticmethod
    def _closing(record: TurnRecord) -> Work:
        blob = _encode(record)
        return lambda db: (
            db.execute(
                "UPDATE turns SET closed = 1, record = ? WHERE id = ? AND closed = 0",
                (blob, record.id),
            ).rowcount
        )

    async def _records(self, query: str, values: tuple[int, ...]) -> list[TurnRecord]:
        rows = await self._wait(lambda db: db.execute(query, values).fetchall())
        return [_decode(row[0]) for row in rows]

    async def _wait(
        self, work: Callable[[sqlite3.Connection], Result], kind: Kind = "other"
    ) -> Result:
        future = self._store.submit(work, kind)
        # A timer, not `asyncio.timeout`: nothing is cancelled, and this runs twice a turn.
        deadline = future.get_loop().call_later(_DEADLINE_SECONDS, _expire, future)
        try:
            result: Result = await future
        except (sqlite3.Error, TimeoutError):
            raise JournalUnavailable from None
        finally:
            deadline.cancel()
        return result


def _expire(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


def _instance(db: sqlite3.Connection) -> str:
    """Made once, with the journal."""
    found = db.execute("SELECT value FROM meta WHERE name = 'instance'").fetchone()
    if found is None:
        found = (secrets.token_hex(4),)
        db.execute("INSERT INTO meta VALUES ('instance', ?)", found)
        db.commit()
    return str(found[0])
