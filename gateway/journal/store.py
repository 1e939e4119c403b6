"""The journal: this gateway's durable record of turns, until the ledger has them.

The journal is one SQLite file (WAL, `synchronous=FULL`) with a row for each turn. One thread writes
it. Turns share commits: whenever the thread is free it takes what has gathered. A commit that
returned survives `kill -9` and the loss of power.

Damage is found at the start (`PRAGMA quick_check`) or when the file is read. The damaged file is
kept whole in a folder `damaged-TIME`. What can be read of it is copied into a new file, and the
journal goes on under a new instance. The reconciler looks for the other turns in the engines'
unacknowledged counts, whose ids begin with the former instances. A single broken record is set
aside with its bytes.
"""

import asyncio
import fcntl
import json
import os
import re
import secrets
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from itertools import chain, groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self
from zlib import crc32

import msgspec

from gateway.base.errors import JournalFull, JournalUnavailable
from gateway.base.logs import get_logger
from gateway.base.record import TurnRecord
from gateway.base.row_ids import MARK, MARK_PLACE, turn_of_try
from gateway.base.settings import JOURNAL_MAX_BYTES
from gateway.journal import contents
from gateway.journal.contents import Content
from gateway.journal.versions import APPLICATION, FILE, FORMAT, check_version, connect_to_read

OPEN = "open"
CLOSED = "closed"
ASIDE = "aside"
LOST = "lost"
BROKEN = "broken"
REFUSED = "refused by the ledger"

_DEADLINE_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_GROUP = 512

_FILES = (FILE, f"{FILE}-wal", f"{FILE}-shm")
_INSTANCES = "instances"
_KEPT = "damaged-"
_MODE = 0o600
_SCHEMA = f"""
PRAGMA application_id = {APPLICATION};
CREATE TABLE turns (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    record BLOB,
    checksum INTEGER NOT NULL,
    reason TEXT,
    at TEXT
);
CREATE INDEX turns_by_state ON turns (state);
"""
# Format 2: how many turns of each day the ledger had when the journal forgot them (`audit.py`).
# Format 4: contents of turns (`contents.py`).
_LATER_FORMATS = f"""
CREATE TABLE IF NOT EXISTS forgotten (day_ms INTEGER PRIMARY KEY, number INTEGER NOT NULL);
{contents.SCHEMA}
PRAGMA user_version = {FORMAT};
"""
_COUNT_DAY = """
INSERT INTO forgotten VALUES (?, ?)
ON CONFLICT (day_ms) DO UPDATE SET number = number + excluded.number
"""
_TAKE_DAY = """
INSERT INTO forgotten VALUES (?, ?)
ON CONFLICT (day_ms) DO UPDATE SET number = max(number, excluded.number)
"""
_FORGET = """
DELETE FROM turns WHERE id IN (SELECT value FROM json_each(?))
AND state IN ('open', 'closed') RETURNING record
"""
_DAY_MS = 86_400_000
# The turns of each state. They are counted in memory, within each transaction.
_COUNTING = """
PRAGMA temp_store = MEMORY;
CREATE TEMP TABLE counts AS SELECT value AS state,
    (SELECT count(*) FROM turns WHERE state = value) AS number
    FROM json_each('["open", "closed", "aside"]');
CREATE TEMP TRIGGER added AFTER INSERT ON turns BEGIN
    UPDATE counts SET number = number + 1 WHERE state = new.state;
END;
CREATE TEMP TRIGGER changed AFTER UPDATE ON turns BEGIN
    UPDATE counts SET number = number + (state = new.state) - (state = old.state);
END;
CREATE TEMP TRIGGER removed AFTER DELETE ON turns BEGIN
    UPDATE counts SET number = number - 1 WHERE state = old.state;
END;
"""
# The turns of each state, and the bytes of pages that are in use.
_NUMBERS = """
SELECT json_group_object(state, number), (
    SELECT (page_count - freelist_count) * page_size
    FROM pragma_page_count, pragma_freelist_count, pragma_page_size
) FROM counts
"""
_REMOVE = """
DELETE FROM turns WHERE id IN (SELECT value FROM json_each(?))
AND state IN (SELECT value FROM json_each(?))
"""
_REPLACE = """
ON CONFLICT (id) DO UPDATE SET state = excluded.state, record = excluded.record,
checksum = excluded.checksum, reason = excluded.reason, at = excluded.at WHERE
"""
_OVER_OPEN = "turns.state = 'open' OR turns.state = 'aside' AND excluded.state = 'closed'"
"""An open turn may be rewritten or closed. A close also replaces a turn that was set aside."""
_OVER_CLOSED = f"{_OVER_OPEN} OR turns.state = 'closed'"
_ROWS = "SELECT id, state, record, checksum, reason, at FROM turns"
_DAMAGES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_UNREADABLE = frozenset({sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ})
_PRIMARY = 0xFF
_IS_INSTANCE = re.compile("[0-9a-f]{8}")
_MADE_BY = re.compile("msg_([0-9a-f]{8})")

Guard = Callable[[str, Callable[[], None]], None]
"""Runs one round of the named thread loop, and handles its exceptions."""


class _Moment(msgspec.Struct):
    opened_at: datetime


_moment = msgspec.json.Decoder(_Moment).decode
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TurnRecord).decode


class Row(NamedTuple):
    """A turn in the journal."""

    id: str
    state: str
    # None where nothing is left of the turn but its name.
    record: bytes | None
    checksum: int
    # Why it was set aside, and when (ISO 8601).
    reason: str | None = None
    at: str | None = None

    @property
    def is_sound(self) -> bool:
        return self.checksum == _checksum(self.id, self.state, self.record)


def _row(turn_id: str, state: str, record: bytes | None, reason: str | None = None) -> Row:
    at = None if reason is None else datetime.now(UTC).isoformat(timespec="seconds")
    return Row(turn_id, state, record, _checksum(turn_id, state, record), reason, at)


def _checksum(turn_id: str, state: str, record: bytes | None) -> int:
    """The checksum of a row. SQLite finds damage to its own structure, but not a flipped digit of a
    record, which would be billed."""
    return crc32(record or b"", crc32(f"{turn_id} {state}".encode()))


def has_journal(directory: Path) -> bool:
    """Whether there is anything of a journal."""
    return any((directory / name).exists() for name in (*_FILES, _INSTANCES))


def rows_in(directory: Path) -> list[Row]:
    """The journal's rows, the oldest first; also while a gateway writes it. Raise sqlite3.Error."""
    with closing(connect_to_read(directory)) as db:
        return [Row(*row) for row in db.execute(_ROWS + " ORDER BY rowid")]


class Damaged(Exception):
    """The file is no sound journal."""


class Table:
    """The turns of an open file, by id. Few statements: at each the thread may wait for the GIL."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        db.executescript(_COUNTING)

    def numbers(self) -> tuple[dict[str, int], int]:
        """Turns by state, and their bytes."""
        counts, num_bytes = self.db.execute(_NUMBERS).fetchone()
        return json.loads(counts), num_bytes

    def put(self, rows: Sequence[Row], over: str = _OVER_OPEN) -> None:
        """Write rows. A row that is there is replaced only where the condition `over` holds."""
        values = ", ".join(["(?, ?, ?, ?, ?, ?)"] * len(rows))
        command = f"INSERT INTO turns VALUES {values} {_REPLACE} {over}"  # noqa: S608
        self.db.execute(command, [*chain(*rows)])

    def unknown(self, turn_ids: Sequence[str]) -> list[str]:
        query = "SELECT value FROM json_each(?) WHERE value NOT IN (SELECT id FROM turns)"
        return [str(row[0]) for row in self.db.execute(query, (json.dumps(list(turn_ids)),))]

    def closed_tries(self) -> list[str]:
        """The ids of closed tries of batches' rows."""
        query = "SELECT id FROM turns WHERE state = ? AND substr(id, ?, 1) = ?"
        rows = self.db.execute(query, (CLOSED, MARK_PLACE + 1, MARK))
        return [str(row[0]) for row in rows]

    def remove(self, turn_ids: Sequence[str], *states: str) -> None:
        self.db.execute(_REMOVE, (json.dumps(list(turn_ids)), json.dumps(states)))

    def forget(self, turn_ids: Sequence[str]) -> None:
        """Remove turns that the ledger has, and count them by the day (UTC) on which they began."""
        removed = self.db.execute(_FORGET, (json.dumps(list(turn_ids)),)).fetchall()
        days: Counter[int] = Counter()
        for (record,) in removed:
            with suppress(msgspec.MsgspecError):  # a broken record is not counted
                opened_ms = int(_moment(record).opened_at.timestamp() * 1000)
                days[opened_ms // _DAY_MS * _DAY_MS] += 1
        self.db.executemany(_COUNT_DAY, days.items())

    def forgotten(self) -> dict[int, int]:
        return dict(self.db.execute("SELECT day_ms, number FROM forgotten").fetchall())

    def set_aside(self, turn_ids: Sequence[str], reason: str) -> None:
        """Set turns aside. A turn that is set aside already stays as it is. A turn that is not here
        gets a row without a record."""
        for turn_id in turn_ids:
            query = "SELECT record FROM turns WHERE id = ?"
            (record,) = self.db.execute(query, (turn_id,)).fetchone() or (None,)
            self.put([_row(turn_id, ASIDE, record, reason)], f"turns.state != '{ASIDE}'")

    def rows(self, state: str, limit: int) -> list[Row]:
        query = _ROWS + " WHERE state = ? ORDER BY rowid LIMIT ?"
        return [Row(*row) for row in self.db.execute(query, (state, limit))]

    def ids(self, state: str, reason: str) -> list[str]:
        query = "SELECT id FROM turns WHERE state = ?1 AND ?2 IN ('', reason) ORDER BY id"
        return [str(row[0]) for row in self.db.execute(query, (state, reason))]


Work = Row | Callable[[Table], Any]
"""A row to write, or a function that works on the table."""


class _Job(NamedTuple):
    """One piece of work on the file."""

    work: Work
    # Whether the work is tried again until it succeeds.
    must: bool
    # Gets the result when the work is on disk.
    future: asyncio.Future[Any]


class Journal:
    """Opens and closes turns durably. `start` opens the file. Numbers are as of the last commit.

    - Every method that awaits raises JournalUnavailable, after 5 s at most.
    - `instance` (8 hex digits) is this journal's id. The ids of its turns begin with it.
    - `instances` are the ids that it had before each damage, and the present one.
    - `damaged` names the folders in which damaged files are kept.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int = JOURNAL_MAX_BYTES,
        guard: Guard = lambda _, work: work(),
    ) -> None:
        self.max_bytes = max_bytes
        self.instance = ""
        self.instances: tuple[str, ...] = ()
        self.damaged: list[str] = []
        self.num_bytes = 0
        self._counts = dict.fromkeys((OPEN, CLOSED, ASIDE), 0)
        self._directory = directory
        self._path = directory / FILE
        self._log = get_logger("journal")
        self._gathered: list[_Job] = []
        self._is_busy = False
        self._groups: SimpleQueue[list[_Job] | None] = SimpleQueue()
        self._unfinished: list[_Job] = []
        self._correcting: set[str] = set()
        # Whether the last commit failed. Until one succeeds no turn is opened.
        self._is_failing = False
        self._has_stopped = False
        self._table: Table | None = None
        self._file: tuple[int, int] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

        def run() -> None:
            while not self._has_stopped:
                guard("journal", self._round)

        self._thread = threading.Thread(target=run, name="journal", daemon=True)

    def start(self) -> Self:
        """Open the file and start the thread. Raise JournalUnavailable where the file can't be
        opened, another process has it, or another version wrote it."""
        self._lock = _lock(self._directory)
        try:
            check_version(self._directory)
            self._table = self._open()
        except (sqlite3.Error, OSError) as error:
            self._lock.close()
            raise JournalUnavailable(f"journal `{self._directory}`: {error}") from None
        except JournalUnavailable:
            self._lock.close()
            raise
        self._counts, self.num_bytes = self._table.numbers()
        self._thread.start()
        return self

    async def stop(self) -> None:
        """Finish what was handed over and close the file."""
        while self._gathered:
            self._hand_over()
        self._groups.put(None)
        await asyncio.to_thread(self._thread.join)
        self._close()
        self._lock.close()

    @property
    def is_in_place(self) -> bool:
        """Whether the open file is still at its path. Somebody may have removed it."""
        return self._file is None or _file_id(self._path) == self._file

    def look(self) -> None:
        """Have the thread check the file, even if there is nothing to write."""
        self._submit(lambda table: None)

    @property
    def backlog(self) -> int:
        """The number of turns that the ledger does not have yet, including open ones."""
        return self._counts[OPEN] + self._counts[CLOSED]

    @property
    def num_closed(self) -> int:
        return self._counts[CLOSED]

    @property
    def num_set_aside(self) -> int:
        """Turns that are not in the ledger and can't be drained; the CLI lists them."""
        return self._counts[ASIDE]

    @property
    def has_room(self) -> bool:
        """Whether a turn may be opened. Turns can be closed beyond the bound."""
        return not self._is_failing and self.num_bytes < self.max_bytes

    async def open(self, record: TurnRecord) -> None:
        """Return when the turn is on disk, so that an engine may be called. Raise JournalFull where
        there is no room. If the opening fails, takes too long or is cancelled, the journal does not
        keep the turn."""
        if not self.has_room:
            raise JournalFull
        row = _row(record.journal_id, OPEN, _encode(record))
        is_open = False
        try:
            await self._do(row)
            is_open = True
        except JournalUnavailable:
            if not self.has_room:
                raise JournalFull from None
            raise
        finally:
            if not is_open:
                self._submit(lambda table: table.remove([row.id], OPEN), must=True)

    async def rewrite(self, record: TurnRecord) -> None:
        """Replace the record of an open turn, which goes on at another engine."""
        await self._do(_row(record.journal_id, OPEN, _encode(record)))

    async def close(self, record: TurnRecord, content: Content | None = None) -> None:
        """Close a turn, in one commit with its content. A second close changes nothing. A close
        that fails is tried again until it succeeds, even after the caller got the error."""
        await self._wait(self.close_soon(record, content))

    def close_soon(self, record: TurnRecord, content: Content | None = None) -> asyncio.Future[Any]:
        """Hand a close over without waiting, which is safe while a stream is being cancelled."""
        row = _row(record.journal_id, CLOSED, _encode(record))
        if content is None:
            return self._submit(row, must=True)

        def close_with_content(table: Table) -> None:
            table.put([row])
            contents.put(table.db, [content])

        return self._submit(close_with_content, must=True)

    def correct_soon(self, record: TurnRecord) -> None:
        """Write another end of a turn, in place of a failed close that may still succeed.

        Call this in the step of the event loop in which `close` raised. Until the correction is on
        disk, `closed_turns` leaves the turn out.
        """
        row = _row(record.journal_id, CLOSED, _encode(record))
        self._correcting.add(row.id)
        future = self._submit(lambda table: table.put([row], _OVER_CLOSED), must=True)
        future.add_done_callback(lambda _: self._correcting.discard(row.id))

    async def keep(self, content: Content) -> None:
        """Write the content of a turn that is closed by another call. A write that fails is tried
        again until it succeeds, even after the caller got the error."""
        await self._wait(self._submit(lambda table: contents.put(table.db, [content]), must=True))

    async def oldest_contents(self, most_bytes: int) -> list[Content]:
        """The oldest contents, with `most_bytes` together at most. One is returned whatever its
        size."""
        oldest: list[Content] = await self._do(lambda table: contents.oldest(table.db, most_bytes))
        return oldest

    async def forget_contents(self, turn_ids: Sequence[str]) -> int:
        """Remove the contents of these turns; return the bytes that were removed."""
        removed: int = await self._do(lambda table: contents.remove(table.db, turn_ids))
        return removed

    async def purge_contents(self, workspace: str) -> tuple[int, int]:
        """Remove the contents of a workspace; return how many there were, and their bytes."""
        removed: tuple[int, int] = await self._do(lambda table: contents.purge(table.db, workspace))
        return removed

    async def empty_log(self) -> None:
        """Move SQLite's log into the file, because it has former pages. Raise
        JournalUnavailable."""

        def checkpoint() -> None:
            with closing(sqlite3.connect(self._path, timeout=_DEADLINE_SECONDS)) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

        try:
            await asyncio.to_thread(checkpoint)
        except sqlite3.Error:
            raise JournalUnavailable from None

    async def content_bytes(self) -> int:
        """The bytes of all contents."""
        num_bytes: int = await self._do(lambda table: contents.total_bytes(table.db))
        return num_bytes

    async def open_turns(self) -> list[TurnRecord]:
        """The open turns, in the order in which they were opened."""
        return await self._records(OPEN, -1)

    async def closed_turns(self, limit: int) -> list[TurnRecord]:
        """The first `limit` closed turns, in the order in which they were opened."""
        records = await self._records(CLOSED, limit)
        return [record for record in records if record.journal_id not in self._correcting]

    async def unknown(self, turn_ids: Sequence[str]) -> list[str]:
        """The ids out of these that the journal does not have."""
        unknown: list[str] = await self._do(lambda table: table.unknown(turn_ids))
        return unknown

    async def forget(self, turn_ids: Sequence[str]) -> None:
        """Remove turns that the ledger has, and count them."""
        await self._do(lambda table: table.forget(turn_ids))

    async def drop(self, turn_ids: Sequence[str]) -> None:
        """Remove turns that the ledger does not get."""
        if turn_ids:
            await self._do(lambda table: table.remove(turn_ids, OPEN, CLOSED))

    def drop_soon(self, turn_id: str) -> None:
        """Remove an open turn that no engine took. This never awaits."""
        self._submit(lambda table: table.remove([turn_id], OPEN), must=True)

    async def ended_rows(self) -> set[str]:
        """The turns of batches' rows that are closed here, which the database may not know yet.

        Ask this before the database. A row that neither of the two has ended by then has not ended
        here.
        """
        tries: list[str] = await self._do(lambda table: table.closed_tries())
        return {turn_of_try(try_id) for try_id in tries}

    async def forgotten(self) -> dict[int, int]:
        """How many turns were forgotten, by the first moment (ms) of the day (UTC) on which they
        began."""
        num_forgotten: dict[int, int] = await self._do(lambda table: table.forgotten())
        return num_forgotten

    async def set_aside(self, turn_ids: Sequence[str], reason: str) -> None:
        """Set aside turns that can't be drained, with their bytes if there are any. Turns that are
        set aside already stay as they are."""
        await self._do(lambda table: table.set_aside(turn_ids, reason))

    async def set_aside_turns(self, reason: str = "") -> list[str]:
        """The ids of turns that are set aside; with a `reason` only those."""
        ids: list[str] = await self._do(lambda table: table.ids(ASIDE, reason))
        return ids

    async def found(self, turn_ids: Sequence[str]) -> None:
        """Remove turns that were set aside and that the ledger has after all."""
        await self._do(lambda table: table.remove(turn_ids, ASIDE))

    async def _records(self, state: str, limit: int) -> list[TurnRecord]:
        """The turns of a state that can be read. The others are set aside."""
        records: list[TurnRecord] = []
        broken: list[str] = []
        for row in await self._do(lambda table: table.rows(state, limit)):
            try:
                records.append(_decode(row.record if row.is_sound and row.record else b""))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                broken.append(row.id)
        if broken:
            self._log.error("turns_set_aside", turns=broken, reason=BROKEN)
            await self.set_aside(broken, BROKEN)
        return records

    async def _do(self, work: Work) -> Any:
        return await self._wait(self._submit(work))

    async def _wait(self, future: asyncio.Future[Any]) -> Any:
        late = asyncio.get_running_loop().call_later(_DEADLINE_SECONDS, _fail, future)
        try:
            return await future
        except (sqlite3.Error, OSError):
            raise JournalUnavailable from None
        finally:
            late.cancel()

    def _submit(self, work: Work, *, must: bool = False) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._is_busy = False
        future = loop.create_future()
        self._gathered.append(_Job(work, must, future))
        if not self._is_busy:
            self._is_busy = True
            loop.call_soon(self._hand_over)
        return future

    def _hand_over(self) -> None:
        """Give the thread what has gathered. What comes while it writes shares the next commit."""
        jobs = self._gathered[:_GROUP]
        self._gathered = self._gathered[_GROUP:]
        self._is_busy = bool(jobs)
        if jobs:
            self._groups.put(jobs)

    # The thread.

    def _round(self) -> None:
        """Commit a group of jobs. After a failed commit, wait for the next group only for a
        while."""
        jobs: list[_Job] | None = []
        with suppress(Empty):
            jobs = self._groups.get(timeout=_RETRY_SECONDS if self._is_failing else None)
        self._has_stopped = jobs is None
        work = self._unfinished + (jobs or [])
        error: Exception | None = sqlite3.OperationalError("the journal's round failed")
        try:
            error = self._attempt(work)
        finally:
            self._is_failing = error is not None
            self._unfinished = [job for job in work if job.must] if error is not None else []
            if error is not None:
                failed = [job.future for job in work if not job.must]
                self._tell(failed, [error] * len(failed))

    def _attempt(self, jobs: list[_Job]) -> Exception | None:
        """Commit all jobs or none. Give the callers their results if it succeeded."""
        failure: Exception | None = None
        for _ in range(2):
            try:
                if not self.is_in_place:
                    self._bring_back()
                if self._table is None:
                    self._table = self._open()
                results = self._commit(self._table, jobs)
            except (sqlite3.Error, OSError) as error:
                failure = error
            else:
                self._tell([job.future for job in jobs], results)
                return None
            if not _is_damage(failure):
                break
            self._keep_aside(failure)
        if not self._is_failing:
            self._log.error("journal_failed", error=str(failure))
        return failure

    def _commit(self, table: Table, jobs: list[_Job]) -> list[Any]:
        try:
            table.db.execute("BEGIN IMMEDIATE")
            if self._is_failing:
                table.db.execute(f"PRAGMA user_version = {FORMAT}")  # something to write
            results: list[Any] = []
            for is_row, group in groupby(jobs, lambda job: isinstance(job.work, Row)):
                works = [job.work for job in group]
                if is_row:
                    table.put([row for row in works if isinstance(row, Row)])
                results += [None if isinstance(work, Row) else work(table) for work in works]
            _commit(table.db)
        except (sqlite3.Error, OSError):
            with suppress(sqlite3.Error):
                table.db.rollback()
            raise
        self._counts, self.num_bytes = table.numbers()
        return results

    def _tell(self, futures: Sequence[asyncio.Future[Any]], results: Sequence[Any]) -> None:
        """Give futures their results, and wake the event loop once. An exception is an error."""

        def tell() -> None:
            self._hand_over()
            for future, result in zip(futures, results, strict=True):
                if isinstance(result, Exception):
                    _fail(future, result)
                elif not future.done():
                    future.set_result(result)

        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(tell)

    # The file.

    def _open(self) -> Table:
        """Open the file, or a new one in place of a damaged one. Raise sqlite3.Error or OSError."""
        path = self._directory / _INSTANCES  # the present one stands last
        content = path.read_text("ascii", "replace") if path.exists() else ""
        instances = [line for line in content.splitlines() if _IS_INSTANCE.fullmatch(line)]
        is_hurt = bool(instances) and not self._path.exists()
        try:
            table = _open_file(self._directory)
        except (sqlite3.Error, Damaged) as error:
            if isinstance(error, sqlite3.Error) and not _is_damage(error):
                raise
            self._keep_aside(error)
            table = _open_file(self._directory)
        with ExitStack() as failing:
            failing.callback(table.db.close)
            self._bring_over(table, instances, is_hurt=is_hurt)
            failing.pop_all()
        self._file = _file_id(self._path)
        return table

    def _bring_back(self) -> None:
        """Write the whole journal anew, because its file is gone from its path and still open here.
        Raise sqlite3.Error or OSError where that fails."""
        old = self._table
        if old is None:
            self._file = None
            return
        rows = [Row(*row) for row in old.db.execute(f"{_ROWS} ORDER BY rowid")]
        self._log.error("journal_gone", file=FILE, turns=len(rows))
        self._directory.mkdir(parents=True, exist_ok=True)
        if _file_id(self._directory / "lock") != _id_of(os.fstat(self._lock.fileno())):
            try:
                lock = _lock(self._directory)
            except JournalUnavailable as error:
                raise OSError(str(error)) from None
            self._lock.close()
            self._lock = lock
        if not (self._directory / _INSTANCES).exists():
            self._write_instances()
        table = self._open()
        table.db.execute("BEGIN IMMEDIATE")
        for row in rows:
            table.put([row], "false")
        table.db.executemany(_TAKE_DAY, old.forgotten().items())
        for content in contents.all_of(old.db):
            contents.put(table.db, [content])
        _commit(table.db)
        self._table = table
        with suppress(sqlite3.Error):
            old.db.close()

    def _bring_over(self, table: Table, instances: list[str], *, is_hurt: bool) -> None:
        """Copy what can be read of damaged files, and begin a new instance if anything was lost."""
        kept = sorted(self._directory.glob(f"{_KEPT}*"))
        unread = [folder for folder in kept if not (folder / "read").exists()]
        for folder in unread:
            # Rows that are here already stay as they are.
            rows = table.numbers()[0].values()
            table.db.execute("BEGIN IMMEDIATE")
            for row in _readable_rows(folder):
                if not row.is_sound:
                    self._log.error("turn_set_aside", turn=row.id, reason=BROKEN)
                    row = _row(row.id, ASIDE, row.record, BROKEN)
                table.put([row], "false")
            table.db.executemany(_TAKE_DAY, _readable_days(folder))
            for content in contents.readable(folder):
                contents.put(table.db, [content])
            _commit(table.db)
            num_read = sum(table.numbers()[0].values()) - sum(rows)
            self._log.warning("journal_read", kept=folder.name, turns=num_read)
        self.instances = tuple(instances)
        if not instances or is_hurt or unread:
            ids = (row[0] for row in table.db.execute("SELECT id FROM turns"))
            made_by = {match[1] for match in map(_MADE_BY.match, ids) if match is not None}
            self.instances = (*instances, *sorted(made_by - {*instances}), secrets.token_hex(4))
            self._write_instances()
        self.instance = self.instances[-1]
        if is_hurt and not unread:
            self._log.error("journal_damaged", file=FILE, error="it is gone")
        for folder in unread:
            (folder / "read").touch()
        self.damaged = [folder.name for folder in kept]

    def _write_instances(self) -> None:
        path = self._directory / "instances.new"
        with path.open("w") as file:
            file.write("".join(f"{instance}\n" for instance in self.instances))
            file.flush()
            os.fsync(file.fileno())
        path.rename(self._directory / _INSTANCES)
        _sync(self._directory)

    def _close(self) -> None:
        if self._table is not None:
            with suppress(sqlite3.Error):
                self._table.db.close()
            self._table = None

    def _keep_aside(self, error: Exception) -> None:
        """Move the file, as it is, into a folder of its own."""
        kept = self._directory / f"{_KEPT}{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
        kept.mkdir()
        for name in _FILES:
            with suppress(FileNotFoundError):
                (self._directory / name).rename(kept / name)
        _sync(self._directory)
        # When a file is closed, SQLite writes its log into it, but not into one that was moved.
        self._close()
        self._log.error("journal_damaged", file=FILE, error=str(error), kept=kept.name)


def _fail(future: asyncio.Future[Any], error: Exception | None = None) -> None:
    """Give a future its error, TimeoutError without one. It need not be awaited."""
    if not future.done():
        future.set_exception(error or TimeoutError())
        future.exception()


def _lock(directory: Path) -> Any:
    """Lock the journal, since two processes would close each other's turns. The kernel ends the
    lock of a dead process. Raise JournalUnavailable."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("w")
    except OSError as error:
        raise JournalUnavailable(f"journal `{directory}`: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise JournalUnavailable(f"journal `{directory}` is used by another process") from None
    return file


def _open_file(directory: Path) -> Table:
    """Open or make the file. Raise Damaged or sqlite3.Error where it is not sound."""
    path = directory / FILE
    is_new = not path.exists() or path.stat().st_size == 0
    if is_new and (directory / f"{FILE}-wal").exists():
        raise Damaged("the file is gone, and its log is there")  # SQLite would delete the log
    if not is_new:
        with closing(connect_to_read(directory)) as db:
            problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise Damaged(str(problem))
            # A kill at the first start may have come before the schema.
            has_schema = db.execute("SELECT 1 FROM sqlite_master").fetchone() is not None
            is_new = not has_schema and not (directory / _INSTANCES).exists()
            if not is_new and db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
                raise Damaged("it is no journal")
    # SQLite gives its log the file's own mode.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE))
    for kept in (*directory.glob(f"{FILE}*"), *directory.glob(f"{_KEPT}*/{FILE}*")):
        kept.chmod(_MODE)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    if is_new:
        db.executescript(f"BEGIN;{_SCHEMA}{_LATER_FORMATS}COMMIT;")
        _sync(directory)
    elif db.execute("PRAGMA user_version").fetchone()[0] < FORMAT:
        db.executescript(f"BEGIN;{_LATER_FORMATS}COMMIT;")
    return Table(db)


def _readable_rows(directory: Path) -> Iterator[Row]:
    """The rows of a damaged file that SQLite can read, from the front and from the back."""
    for order in ("ASC", "DESC"):
        with suppress(sqlite3.Error), closing(connect_to_read(directory)) as db:
            for row in db.execute(f"{_ROWS} ORDER BY rowid {order}"):
                turn_id, state, record = row[:3]
                is_row = isinstance(turn_id, str) and isinstance(record, bytes | None)
                if is_row and state in (OPEN, CLOSED, ASIDE):
                    yield Row(*row)


def _commit(db: sqlite3.Connection) -> None:
    db.execute("COMMIT")


def _readable_days(directory: Path) -> list[tuple[int, int]]:
    """The counts of forgotten turns in a damaged file, where they can be read."""
    with suppress(sqlite3.Error), closing(connect_to_read(directory)) as db:
        return db.execute("SELECT day_ms, number FROM forgotten").fetchall()
    return []


def _is_damage(error: Exception) -> bool:
    code = int(getattr(error, "sqlite_errorcode", 0))  # an error of Python's own has none
    return code & _PRIMARY in _DAMAGES or code in _UNREADABLE


def _id_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        return _id_of(path.stat())
    except OSError:
        return None


def _sync(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
