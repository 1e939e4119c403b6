"""The journal's thread, which alone touches the journal's files.

Most of a turn's cost here is the sync, and the wait for the interpreter's lock beside a busy event
loop. So turns share groups: the thread takes what has gathered whenever it is free. If a group
fails, each of its works is run again alone, so that none fails for another.

Room: new turns are refused beyond `max_bytes`. Open turns can still be closed, because the files
may grow by a reserve beyond that. The file `reserve` keeps as much of the disk free. It is deleted
when the disk is full, and written again when there is room.
"""

import asyncio
import errno
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

from gateway.base.errors import JournalUnavailable
from gateway.base.logs import get_logger
from gateway.journal.book import Book, Refused
from gateway.journal.opening import Opened, open_journal
from gateway.journal.pending import Outcome

# Closing a turn takes at most this much, with a rewrite before it and the forgetting behind it: a
# record with the largest fingerprint is about 6 KB.
CLOSE_BYTES = 24 << 10
_MAX_RESERVE_BYTES = 64 << 20
_HEADROOM_BYTES = 512 << 10
_GROUP = 512
_RETRY_SECONDS = 0.5

_FULL = (errno.ENOSPC, errno.EDQUOT)
_ENDS = frozenset({"forget", "aside", "found"})

Work = Callable[[Book], Any]
Kind = Literal["open", "close", "forget", "aside", "lost", "found", "other"]
Guard = Callable[[str, Callable[[], None]], None]
"""Runs one round of the named thread loop, and handles its exceptions."""

# Errors that a work's values can cause. Any other error is a defect of the program.
_REFUSALS = (OSError, Refused, OverflowError, ValueError)


@dataclass(frozen=True, slots=True)
class Job:
    work: Work
    kind: Kind
    outcome: Outcome
    loop: asyncio.AbstractEventLoop
    turn_ids: tuple[str, ...] = ()


def unguarded(_name: str, work: Callable[[], None]) -> None:
    work()


class Store:
    """`num_turns`, `num_open` and `num_bytes` are of the last group.

    Raises JournalUnavailable where the file can't be opened or another process has it.
    """

    def __init__(self, directory: Path, max_bytes: int, guard: Guard = unguarded) -> None:
        self.max_bytes = max_bytes
        self._guard = guard
        self.reserve_bytes = min(_MAX_RESERVE_BYTES, max_bytes // 8)
        self._reserve = directory / "reserve"
        self._log = get_logger("journal")
        self._lock = _lock(directory)
        try:
            opened = self._open(directory)
            self._book, self._ids = opened.book, opened.ids
            self.instance, self.former = opened.book.instance, opened.book.former
            self.forgotten = opened.forgotten
            self._count()
        except (sqlite3.Error, OSError) as error:
            self._lock.close()
            raise JournalUnavailable(f"journal `{directory}`: {error}") from None
        self._unclosed: list[Job] = []
        self._gathered: list[Job] = []
        # A write failed. No new turns until a write has worked and the reserve is whole.
        self._is_stuck = not self._take_reserve()
        self._has_stopped = False
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether a new turn may be opened, so that it and all others can be closed."""
        return (
            not self._is_stuck
            and self.num_bytes < self.max_bytes
            and (self.num_open + 1) * CLOSE_BYTES <= self.reserve_bytes
        )

    def submit(self, work: Work, kind: Kind, turn_ids: Sequence[str], outcome: Outcome) -> None:
        """The outcome is told when the work is on disk; a close that fails is tried again.

        `turn_ids` are those that the work opens, forgets or sets aside.
        """
        loop = asyncio.get_running_loop()
        self._gathered.append(Job(work, kind, outcome, loop, tuple(turn_ids)))
        # Work that an ended loop left here goes out with the next loop's.
        if len(self._gathered) == 1 or self._gathered[-2].loop is not loop:
            loop.call_soon(self.hand_over)

    def stop(self) -> None:
        """Finish what was handed over and close the file; blocks."""
        self._jobs.put(None)
        self._thread.join()
        self._ids.close()
        self._book.files.close()
        self._lock.close()

    def hand_over(self) -> None:
        """Hand over all submitted work now. Call it on the event loop."""
        gathered, self._gathered = self._gathered, []
        for job in gathered:
            self._jobs.put(job)

    def _open(self, directory: Path) -> Opened:
        """Open the journal, in the reserve's room where the disk is full."""
        try:
            return open_journal(directory, self.max_bytes)
        except OSError as error:
            if error.errno not in _FULL or not self._reserve.exists():
                raise
        self._give_reserve()
        return open_journal(directory, self.max_bytes)

    def _count(self) -> None:
        state, files = self._book.state, self._book.files
        self.num_open = len(state.open)
        self.num_turns = len(state.open) + len(state.closed)
        self.num_set_aside = len(state.aside)
        self.num_bytes = files.num_bytes

    def _run(self) -> None:
        while not self._has_stopped:
            self._guard("journal", self._round)

    def _round(self) -> None:
        jobs = self._take()
        self._has_stopped = None in jobs
        work, is_done = [job for job in jobs if job is not None], False
        try:
            self._commit(work)
            is_done = True
        finally:
            if not is_done:
                self._fail(work)
        if self._is_stuck or self._unclosed:
            self._recover()

    def _fail(self, jobs: list[Job]) -> None:
        """Handle a round that a defect ended.

        Closes are tried again; the other callers get the error.
        """
        self._unclosed += [job for job in jobs if job.kind == "close"]
        for job in jobs:
            if job.kind != "close":
                _answer([job], [None], OSError("the journal's round failed"))

    def _take(self) -> list[Job | None]:
        """Wait for work and take all of it.

        While a close must be tried again the wait has a limit.
        """
        is_waiting = self._is_stuck or bool(self._unclosed)
        jobs: list[Job | None] = []
        try:
            jobs.append(self._jobs.get(timeout=_RETRY_SECONDS if is_waiting else None))
            while len(jobs) < _GROUP:
                jobs.append(self._jobs.get_nowait())
        except Empty:
            pass
        return jobs

    def _commit(self, jobs: list[Job]) -> None:
        failed = self._attempt(jobs) if jobs else None
        if failed is None:
            return
        is_broken = False  # A full disk may have room for some jobs. A broken one fails each.
        for job in jobs:
            error = failed if is_broken else self._attempt([job])
            if error is not None:
                is_broken = _is_broken(error)
                failed = error
                self._refuse(job, error)

    def _attempt(self, jobs: list[Job]) -> Exception | None:
        """Run jobs as one group, all or none; tell their callers if it worked."""
        try:
            results = [job.work(self._book) for job in jobs]
            self._book.commit()
        except _REFUSALS as error:
            return error
        finally:
            # Nothing is left to undo after a commit.
            self._book.undo()
        self._note(jobs)
        if any(job.kind in _ENDS for job in jobs):
            self._clean()
        self._count()
        _answer(jobs, results, None)
        return None

    def _clean(self) -> None:
        """Free what the group has left. If that fails, the next group tries again."""
        try:
            self._book.clean()
        except _REFUSALS as error:
            self._log.error("journal_not_cleaned", error=str(error))
        finally:
            self._book.undo()

    def _note(self, jobs: list[Job]) -> None:
        opened = [each for job in jobs if job.kind == "open" for each in job.turn_ids]
        gone = [each for job in jobs if job.kind == "forget" for each in job.turn_ids]
        aside = [each for job in jobs if job.kind in ("aside", "lost") for each in job.turn_ids]
        self._ids.add(opened, gone, aside, self._book.end)
        if self._ids.is_due or any(job.kind == "found" for job in jobs):
            self._ids.rewrite(self._book.held)

    def _refuse(self, job: Job, error: Exception) -> None:
        # A turn that is there already is the caller's mistake. The disk is well.
        if job.kind in ("open", "close") and not isinstance(error, Refused):
            if not self._is_stuck:
                self._log.error("journal_not_writable", error=str(error))
            self._is_stuck = True
        if job.kind == "close":
            self._unclosed.append(job)
        else:
            _answer([job], [None], error)

    def _recover(self) -> None:
        """Close the failed closes in the reserve's room. Then check whether writing works again."""
        if self._unclosed:
            self._give_reserve()
            jobs, self._unclosed = self._unclosed, []
            self._commit(jobs)
        if self._unclosed or not self._take_reserve():
            return
        if self._has_headroom() and self._is_writable():
            self._is_stuck = False
            self._log.warning("journal_writable_again")

    def _has_headroom(self) -> bool:
        """Whether there is room beside the reserve, so that the next turn does not fail."""
        disk = os.statvfs(self._reserve.parent)
        return disk.f_bavail * disk.f_frsize >= _HEADROOM_BYTES

    def _is_writable(self) -> bool:
        try:
            self._book.probe()
            self._book.commit()
        except OSError:
            return False
        finally:
            self._book.undo()
        return True

    def _take_reserve(self) -> bool:
        """Write the reserve file. Return whether the disk had the room."""
        try:
            with self._reserve.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, self.reserve_bytes)
        except OSError as error:
            self._give_reserve()
            if error.errno not in _FULL:
                self._log.error("journal_reserve_failed", error=str(error))
            return False
        return True

    def _give_reserve(self) -> None:
        try:
            self._reserve.unlink(missing_ok=True)
        except OSError as error:
            self._log.error("journal_reserve_failed", error=str(error))


def _is_broken(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno not in _FULL


def _lock(directory: Path) -> Any:
    """Two processes on one journal would close each other's turns. The kernel ends a dead one's."""
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


def _answer(jobs: Sequence[Job], results: Sequence[Any], error: Exception | None) -> None:
    """Tell the outcomes of these jobs. All belong to one event loop, which is woken once."""

    def tell() -> None:
        for job, result in zip(jobs, results, strict=True):
            if job.outcome.done():
                continue
            if error is not None:
                job.outcome.set_exception(error)
            else:
                job.outcome.set_result(result)

    if not jobs[0].loop.is_closed():
        jobs[0].loop.call_soon_threadsafe(tell)
