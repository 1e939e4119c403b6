"""The journal: this gateway's durable record of turns, until the ledger has them.

SQLite in WAL mode, one thread that owns the connection. Work that queues up while one commit runs
goes into the next commit, so the price of a commit is shared. A future is done when its work is on
disk.
"""

import asyncio
import secrets
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec

from gateway.errors import JournalUnavailable
from gateway.record import TurnRecord

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS turns (
    id TEXT PRIMARY KEY,
    closed INTEGER NOT NULL DEFAULT 0,
    record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS turns_by_closed ON turns (closed);
"""
_GROUP = 512
_DEADLINE_SECONDS = 5.0

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Any]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TurnRecord).decode


@dataclass(frozen=True, slots=True)
class _Job:
    work: Work
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class Journal:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(directory / "journal.db", check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)
        self.instance = _instance(self._db)
        self.backlog = int(self._db.execute("SELECT count(*) FROM turns").fetchone()[0])
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    async def open(self, record: TurnRecord) -> None:
        blob = _encode(record)
        await self._wait(
            lambda db: (
                db.execute(
                    "INSERT INTO turns (id, record) VALUES (?, ?)", (record.id, blob)
                ).rowcount
            )
        )
        self.backlog += 1

    async def close(self, record: TurnRecord) -> None:
        """Closing twice keeps the first close."""
        await self._wait(self._closing(record))

    def close_soon(self, record: TurnRecord) -> None:
        """Hand a close over without waiting: safe while a stream is being cancelled."""
        self._submit(self._closing(record)).add_done_callback(lambda future: future.exception())

    async def open_turns(self) -> list[TurnRecord]:
        return await self._records("SELECT record FROM turns WHERE closed = 0 ORDER BY id", ())

    async def closed_turns(self, limit: int) -> list[TurnRecord]:
        return await self._records(
            "SELECT record FROM turns WHERE closed = 1 ORDER BY rowid LIMIT ?", (limit,)
        )

    async def knows(self, turn_id: str) -> bool:
        return await self._wait(
            lambda db: (
                db.execute("SELECT 1 FROM turns WHERE id = ?", (turn_id,)).fetchone() is not None
            )
        )

    async def forget(self, turn_ids: list[str]) -> None:
        """Remove turns that the ledger has."""
        rows = [(turn_id,) for turn_id in turn_ids]
        removed = await self._wait(
            lambda db: db.executemany("DELETE FROM turns WHERE id = ?", rows).rowcount
        )
        self.backlog -= removed

    async def stop(self) -> None:
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        self._db.close()

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

    async def _wait(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            async with asyncio.timeout(_DEADLINE_SECONDS):
                result: Result = await self._submit(work)
        except (sqlite3.Error, TimeoutError):
            raise JournalUnavailable from None
        return result

    def _submit(self, work: Work) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put(_Job(work, future, loop))
        return future

    def _run(self) -> None:
        while True:
            jobs = [self._jobs.get()]
            try:
                while len(jobs) < _GROUP:
                    jobs.append(self._jobs.get_nowait())
            except Empty:
                pass
            self._commit([job for job in jobs if job is not None])
            if None in jobs:
                return

    def _commit(self, jobs: list[_Job]) -> None:
        """Run a group in one transaction. A failed statement fails alone, a failed commit all."""
        outcomes: list[tuple[_Job, Any, sqlite3.Error | None]] = []
        for job in jobs:
            try:
                outcomes.append((job, job.work(self._db), None))
            except sqlite3.Error as error:
                outcomes.append((job, None, error))
        try:
            self._db.commit()
        except sqlite3.Error as error:
            self._db.rollback()
            outcomes = [(job, None, error) for job in jobs]
        for job, result, problem in outcomes:
            job.loop.call_soon_threadsafe(_settle, job.future, result, problem)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _instance(db: sqlite3.Connection) -> str:
    """This journal's own id: it begins the id of every turn that the journal ever held."""
    db.execute("INSERT OR IGNORE INTO meta VALUES ('instance', ?)", (secrets.token_hex(4),))
    db.commit()
    return str(db.execute("SELECT value FROM meta WHERE name = 'instance'").fetchone()[0])
