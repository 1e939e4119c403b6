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
import os
import re
import secrets
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self

import msgspec

from gateway.base.errors import JournalFull, JournalUnavailable
from gateway.base.logs import get_logger
from gateway.base.record import TurnRecord
from gateway.base.row_ids import turn_of_try
from gateway.base.settings import JOURNAL_MAX_BYTES
from gateway.journal import contents
from gateway.journal.contents import Content
from gateway.journal.file import (
    DAMAGED_PREFIX,
    FILES,
    INSTANCES,
    Damaged,
    file_id,
    id_of,
    is_damage,
    lock_directory,
    open_file,
    readable_days,
    readable_rows,
    sync_directory,
)
from gateway.journal.table import (
    ASIDE,
    BROKEN,
    CLOSED,
    OPEN,
    OVER_CLOSED,
    ROWS,
    Row,
    Table,
    new_row,
)
from gateway.journal.versions import FILE, FORMAT, check_version

_DEADLINE_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_GROUP = 512
_IS_INSTANCE = re.compile("[0-9a-f]{8}")
_MADE_BY = re.compile("msg_([0-9a-f]{8})")

Guard = Callable[[str, Callable[[], None]], None]
"""Runs one round of the named thread loop, and handles its exceptions."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TurnRecord).decode

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
        self._lock = lock_directory(self._directory)
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
        return self._file is None or file_id(self._path) == self._file

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
        row = new_row(record.journal_id, OPEN, _encode(record))
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
        await self._do(new_row(record.journal_id, OPEN, _encode(record)))

    async def close(self, record: TurnRecord, content: Content | None = None) -> None:
        """Close a turn, in one commit with its content. A second close changes nothing. A close
        that fails is tried again until it succeeds, even after the caller got the error."""
        await self._wait(self.close_soon(record, content))

    def close_soon(self, record: TurnRecord, content: Content | None = None) -> asyncio.Future[Any]:
        """Hand a close over without waiting, which is safe while a stream is being cancelled."""
        row = new_row(record.journal_id, CLOSED, _encode(record))
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
        row = new_row(record.journal_id, CLOSED, _encode(record))
        self._correcting.add(row.id)
        future = self._submit(lambda table: table.put([row], OVER_CLOSED), must=True)
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
        num_bytes: int = await self._do(lambda table: contents.remove(table.db, turn_ids))
        return num_bytes

    async def purge_contents(self, workspace: str) -> tuple[int, int]:
        """Remove the contents of a workspace; return how many there were, and their bytes."""
        sums: tuple[int, int] = await self._do(lambda table: contents.purge(table.db, workspace))
        return sums

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
        timer = asyncio.get_running_loop().call_later(_DEADLINE_SECONDS, _fail, future)
        try:
            return await future
        except (sqlite3.Error, OSError):
            raise JournalUnavailable from None
        finally:
            timer.cancel()

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
            if not is_damage(failure):
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
        path = self._directory / INSTANCES  # the present one stands last
        content = path.read_text("ascii", "replace") if path.exists() else ""
        instances = [line for line in content.splitlines() if _IS_INSTANCE.fullmatch(line)]
        is_hurt = bool(instances) and not self._path.exists()
        try:
            table = open_file(self._directory)
        except (sqlite3.Error, Damaged) as error:
            if isinstance(error, sqlite3.Error) and not is_damage(error):
                raise
            self._keep_aside(error)
            table = open_file(self._directory)
        with ExitStack() as failing:
            failing.callback(table.db.close)
            self._bring_over(table, instances, is_hurt=is_hurt)
            failing.pop_all()
        self._file = file_id(self._path)
        return table

    def _bring_back(self) -> None:
        """Write the whole journal anew, because its file is gone from its path and still open here.
        Raise sqlite3.Error or OSError where that fails."""
        old = self._table
        if old is None:
            self._file = None
            return
        rows = [Row(*row) for row in old.db.execute(f"{ROWS} ORDER BY rowid")]
        self._log.error("journal_gone", file=FILE, turns=len(rows))
        self._directory.mkdir(parents=True, exist_ok=True)
        if file_id(self._directory / "lock") != id_of(os.fstat(self._lock.fileno())):
            try:
                lock = lock_directory(self._directory)
            except JournalUnavailable as error:
                raise OSError(str(error)) from None
            self._lock.close()
            self._lock = lock
        if not (self._directory / INSTANCES).exists():
            self._write_instances()
        table = self._open()
        table.db.execute("BEGIN IMMEDIATE")
        for row in rows:
            table.put([row], "false")
        table.take_forgotten(old.forgotten().items())
        for content in contents.all_of(old.db):
            contents.put(table.db, [content])
        _commit(table.db)
        self._table = table
        with suppress(sqlite3.Error):
            old.db.close()

    def _bring_over(self, table: Table, instances: list[str], *, is_hurt: bool) -> None:
        """Copy what can be read of damaged files, and begin a new instance if anything was lost."""
        folders = sorted(self._directory.glob(f"{DAMAGED_PREFIX}*"))
        unread = [folder for folder in folders if not (folder / "read").exists()]
        for folder in unread:
            # Rows that are here already stay as they are.
            rows = table.numbers()[0].values()
            table.db.execute("BEGIN IMMEDIATE")
            for row in readable_rows(folder):
                if not row.is_sound:
                    self._log.error("turn_set_aside", turn=row.id, reason=BROKEN)
                    row = new_row(row.id, ASIDE, row.record, BROKEN)
                table.put([row], "false")
            table.take_forgotten(readable_days(folder))
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
        self.damaged = [folder.name for folder in folders]

    def _write_instances(self) -> None:
        path = self._directory / "instances.new"
        with path.open("w") as file:
            file.write("".join(f"{instance}\n" for instance in self.instances))
            file.flush()
            os.fsync(file.fileno())
        path.rename(self._directory / INSTANCES)
        sync_directory(self._directory)

    def _close(self) -> None:
        if self._table is not None:
            with suppress(sqlite3.Error):
                self._table.db.close()
            self._table = None

    def _keep_aside(self, error: Exception) -> None:
        """Move the file, as it is, into a folder of its own."""
        folder = self._directory / f"{DAMAGED_PREFIX}{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
        folder.mkdir()
        for name in FILES:
            with suppress(FileNotFoundError):
                (self._directory / name).rename(folder / name)
        sync_directory(self._directory)
        # When a file is closed, SQLite writes its log into it, but not into one that was moved.
        self._close()
        self._log.error("journal_damaged", file=FILE, error=str(error), kept=folder.name)


def _fail(future: asyncio.Future[Any], error: Exception | None = None) -> None:
    """Give a future its error, TimeoutError without one. It need not be awaited."""
    if not future.done():
        future.set_exception(error or TimeoutError())
        future.exception()


def _commit(db: sqlite3.Connection) -> None:
    db.execute("COMMIT")
