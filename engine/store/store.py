"""The store at work: it gives the threads their work, and tells the tier the results.

`StoreThreads` has the threads: one changes files, in order; two read. `DiskStore` runs on the
engine's thread, except for `close`. It never waits for a file.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import msgspec
import structlog

from engine.cache.block import Block, Entry, Recorded
from engine.cache.entries import Entries
from engine.cache.ids import BlockId, Digest
from engine.cache.pool import BlockPool
from engine.cache.store_tier import BlockKey, Payload, StoreTier
from engine.clock import Clock, MonotonicClock
from engine.protocol import HeldName
from engine.protocol.reports import StoreStats
from engine.store.files import Arrived, BlockReader, Missed, StoreDirectory, encode_header
from engine.store.journal import (
    End,
    Put,
    Record,
    Restored,
    Times,
    Touch,
    encode_line,
    replay,
)
from engine.store.peers import READERS, Peers, Results

RETRY_SECONDS = 30.0
"""Seconds without a write after a write that failed."""
MAX_QUEUED_BYTES = 64 * 2**20
"""Bytes of blocks that may wait to be written."""
BURST_SECONDS = 0.25
WORK_SECONDS = 0.02
IDLE_SECONDS = 5.0
"""Between two looks at the directory, which somebody may have removed."""
JOURNAL_GROWTH = 4
JOURNAL_SLACK = 4 * 2**20
"""The journal is rewritten when it has more bytes than this, and more than JOURNAL_GROWTH times
what the last rewriting left."""

log = structlog.get_logger()


class Written(NamedTuple):
    """What became of a block's file."""

    name: str
    num_bytes: int
    # Why it was not written. None: it was.
    error: str | None = None


class Appended(NamedTuple):
    """The journal's file on the disk has these entries now."""

    entries: dict[Entry, Recorded]


class Failed(NamedTuple):
    """The journal could not be written, or a file could not be deleted."""

    error: str


class Gone(NamedTuple):
    """The directory is gone."""


Result = Written | Arrived | Missed | Appended | Failed | Gone


class StoreThreads:
    def __init__(self, directory: StoreDirectory, reader: BlockReader) -> None:
        self.results: Results[Result] = Results()
        self.reader = reader
        self._directory = directory
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")
        self._is_closed = threading.Event()
        self._unwritten: list[bytes] = []
        self._untold: dict[Entry, Recorded] = {}
        self._journal_bytes = 0
        self._compacted_bytes = 0

    # Tasks of the writer.

    def write(self, key: BlockKey, payload: Payload) -> None:
        def task() -> None:
            error = None
            header = encode_header(key, payload, self.reader.model)
            try:
                self._directory.write(key.name, header, payload)
            except OSError as failure:
                error = _reason_of(failure)
            self.results.put(Written(key.name, len(payload), error))

        self._writer.submit(task)

    def delete(self, name: str) -> None:
        self._writer.submit(self._try, lambda: self._directory.delete(name))

    def append(self, records: Sequence[Record], recorded: dict[Entry, Recorded]) -> None:
        """Add records to the journal. `recorded` comes back when they are there.

        Lines that could not be written are tried again with the next ones, on a line of their own.
        """

        def task() -> None:
            for record in records:
                if isinstance(record, Put):
                    record = msgspec.structs.replace(record, model=self.reader.model.hex())
                self._unwritten.append(encode_line(record, self.reader.keys))
            self._untold.update(recorded)
            if not self._unwritten:
                return
            lines = b"".join(self._unwritten)
            if self._try(lambda: self._directory.append_journal(lines)):
                self._unwritten.clear()
                self._journal_bytes += len(lines)
                self.results.put(Appended(self._untold))
                self._untold = {}
                if self._journal_bytes > JOURNAL_GROWTH * self._compacted_bytes + JOURNAL_SLACK:
                    self._compacted_bytes = self._journal_bytes  # also where it can't be done
                    self._try(self._compact)
            elif self._unwritten[0] != b"\n":
                self._unwritten.insert(0, b"\n")

        self._writer.submit(task)

    def compact(self) -> None:
        """Write the journal anew, with the entries that have not ended."""
        self._writer.submit(self._try, self._compact)

    def sweep(self, known: frozenset[str]) -> None:
        """Delete every file that is not known. Nothing may have been written before."""

        def task() -> None:
            for name in self._directory.names():
                if self._is_closed.is_set():
                    return
                if name not in known:
                    self._directory.delete(name)

        self._writer.submit(self._try, task)

    def run(self, task: Callable[[], None] = lambda: None) -> "Future[None]":
        """Run a task of the writer. The result is done when the task and all before it are. The
        task must not raise."""
        return self._writer.submit(task)

    # Tasks of the readers.

    def read(self, key: BlockKey) -> None:
        path = self._directory.path
        self._readers.submit(lambda: self.results.put(self.reader.read(path, key)))

    def look(self) -> None:
        """Look whether the directory is still there."""

        def look() -> None:
            if self._directory.is_gone:
                self.results.put(Gone())

        self._readers.submit(look)

    def close(self, timeout: float) -> bool:
        """Finish the writer's tasks. False if that took too long."""
        self._is_closed.set()
        self._readers.shutdown(wait=False, cancel_futures=True)
        done = self.run()
        self._writer.shutdown(wait=False)
        return not wait([done], timeout).not_done

    def abandon(self) -> None:
        """End after the task in progress. Nothing else is done: a killed process does no more."""
        self._is_closed.set()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)

    # Inside.

    def _try(self, task: Callable[[], None]) -> bool:
        try:
            task()
        except OSError as error:
            self.results.put(Failed(_reason_of(error)))
            return False
        return True

    def _compact(self) -> None:
        keys = self.reader.keys
        content = replay(self._directory.journal_lines(), self.reader.model.hex(), keys)
        lines = b"".join(encode_line(put, keys) for put in content.entries.values())
        self._directory.rewrite_journal(lines)
        self._journal_bytes = len(lines)
        self._compacted_bytes = len(lines)


def _reason_of(error: OSError) -> str:
    return error.strerror or type(error).__name__


class StoreBounds(NamedTuple):
    """The bounds of the store's work."""

    # The bytes that a block's file takes on the disk.
    file_bytes: int
    # The most bytes that are written in a second.
    bytes_per_second: float
    # The most blocks that a step brings to the device, and the most that it copies for the writer.
    max_loads: int


class DiskStore:
    """An `engine.schedule.loop.StoreWork`. `contents` gives blocks' contents, a runner's `save`."""

    def __init__(
        self,
        tier: StoreTier,
        entries: Entries,
        device: BlockPool,
        contents: Callable[[Sequence[BlockId]], Sequence[Payload]],
        threads: StoreThreads,
        bounds: StoreBounds,
        *,
        clock: Clock,
        wall: Callable[[], float],
        restored: Restored,
        peers: Sequence[Peers] = (),
    ) -> None:
        self._tier = tier
        self._entries = entries
        self._device = device
        self._contents = contents
        self._threads = threads
        self._bounds = bounds
        self._clock = clock
        self._wall = wall
        # Writing is paced by real time, also where the engine's clock is moved by hand.
        self._pace = MonotonicClock()
        self._paced_at = self._pace.now()
        self._allowance = 0.0
        self._restored = restored
        self._peers = peers
        self._misses = restored.misses
        self._looked_at = self._paced_at
        self._is_gone = False
        self._queued_bytes = 0
        self._written_bytes = 0
        self._read_bytes = 0
        self._failed_writes = 0
        self._down_until: float | None = None
        self._problem: str | None = None
        # Files that no line of the journal names belong to no entry any more.
        threads.sweep(tier.names)

    # Around each step.

    @property
    def max_loads(self) -> int:
        return self._bounds.max_loads

    @property
    def is_reading(self) -> bool:
        return self._tier.is_reading or any(peers.is_reading for peers in self._peers)

    def before_step(self, now: float) -> None:
        """Take in the results of the threads."""
        for result in self._threads.results.take():
            self._take(result, now)
        for peers in self._peers:
            peers.before_step()

    def after_step(self, now: float) -> None:
        """Give the threads their work. The device's blocks must have what their `tokens` say."""
        for key in self._tier.take_asked():
            self._threads.read(key)
        for peers in self._peers:
            peers.after_step()
        # How many blocks may be written now, by the bounds on bytes a second and in the queue.
        at = self._pace.now()
        rate = self._bounds.bytes_per_second
        size = self._bounds.file_bytes
        most = max(rate * BURST_SECONDS, size)
        self._allowance = min(self._allowance + rate * (at - self._paced_at), most)
        self._paced_at = at
        if self._down_until is not None and at >= self._down_until and not self._is_gone:
            self._down_until = None
            log.info("the store is tried again")
            for entry in self._entries.live():
                self._tier.want(entry)
        free = 0 if self._is_down else max(MAX_QUEUED_BYTES - self._queued_bytes, 0)
        num_saves = int(min(self._allowance, free) // size)
        self._save(min(num_saves, self._bounds.max_loads), now)
        if not self._is_gone and self._paced_at - self._looked_at >= IDLE_SECONDS:
            self._looked_at = self._paced_at
            self._threads.look()

    def seconds_to_next(self, now: float) -> float:
        del now
        is_writing = self._tier.num_wanted and not self._is_down
        is_busy = is_writing or self.is_reading
        return WORK_SECONDS if is_busy else IDLE_SECONDS

    # What an operator does.

    def drop(self, owner: Digest, key: Digest | None = None) -> "Future[None]":
        """Forget what was dropped: a scope's entry, or with None as `key` all of the scope.

        In the second case all files of the scope are deleted. The result is done when what was
        decided so far is on the disk.
        """
        for peers in self._peers:
            peers.drop(owner, key)
        if key is None:
            self._tier.drop_scope(owner)
        return self.flush()

    def num_files(self) -> int:
        return self._tier.num_used

    def purge(self, owner: Digest | None) -> "Future[None]":
        """Delete the files of a scope, or with None of all scopes, and compact the journal.

        No line of the journal has the scope's tokens afterwards. The result is done when that is on
        the disk.
        """
        for peers in self._peers:
            peers.drop(owner, None)
        self._tier.drop_scope(owner)
        self._write_notes(self._clock.now())
        self._threads.compact()
        return self._threads.run()

    def flush(self) -> "Future[None]":
        """The result is done when everything that was decided so far is on the disk."""
        self._write_notes(self._clock.now())
        return self._threads.run()

    def close(self, seconds: float) -> None:
        """Write what is still wanted. The engine's thread has ended."""
        end = self._pace.now() + seconds
        for peers in self._peers:
            peers.close()
        while self._tier.num_wanted and not self._is_down and self._pace.now() < end:
            free = max(MAX_QUEUED_BYTES - self._queued_bytes, 0)
            self._save(free // self._bounds.file_bytes, self._clock.now())
            for result in self._threads.results.take(timeout=WORK_SECONDS):
                self._take(result, self._clock.now())
        self._write_notes(self._clock.now())
        if not self._threads.close(max(end - self._pace.now(), 1.0)):
            log.warning("the store is not written to its end", pending=self._queued_bytes)

    def stats(self) -> StoreStats:
        tier = self._tier
        restored = self._restored
        size = self._bounds.file_bytes
        copied = tier.copies.entries()
        return StoreStats(
            is_up=not self._is_down,
            blocks=tier.pool.num_blocks,
            used_blocks=tier.num_used,
            held_blocks=tier.pool.num_leased,
            max_bytes=tier.pool.num_blocks * size,
            used_bytes=tier.num_used * size,
            entries=len(copied),
            leases=sum(entry.is_leased for entry in copied),
            pending_entries=tier.num_wanted + sum(not entry.outlives_restarts for entry in copied),
            unsaved_entries=tier.num_unsaved,
            displaced_entries=tier.num_displaced,
            queued_bytes=self._queued_bytes,
            written_bytes=self._written_bytes,
            read_bytes=self._read_bytes,
            written_blocks=tier.num_saved,
            loaded_blocks=tier.num_loaded,
            restored_entries=restored.num_entries,
            restored_leases=restored.num_leases,
            lost_leases=restored.num_lost,
            failed_writes=self._failed_writes,
            peer_blocks=sum(peers.num_blocks for peers in self._peers),
            peer_read_bytes=sum(peers.read_bytes for peers in self._peers),
            problem=self._problem if self._is_down else None,
            misses=dict(sum((peers.misses for peers in self._peers), start=self._misses)),
        )

    @property
    def _is_down(self) -> bool:
        return self._down_until is not None

    def _take(self, result: Result, now: float) -> None:
        match result:
            case Written():
                self._queued_bytes -= self._bounds.file_bytes
                self._tier.written(result.name, is_good=result.error is None)
                if result.error is not None:
                    self._failed_writes += 1
                    self._go_down(result.error)
                else:
                    self._written_bytes += result.num_bytes
            case Arrived():
                self._read_bytes += len(result.payload)
                self._tier.arrived(result.name, result.payload)
            case Missed():
                self._miss(result, now)
            case Appended():
                for entry, recorded in result.entries.items():
                    entry.recorded = recorded
            case Failed():
                self._go_down(result.error)
            case Gone() if not self._is_gone:
                self._is_gone = True
                log.error("the store's directory is gone, and the leases that only it kept")
                for name in self._tier.names:
                    self._miss(Missed(name, "missing"), now)
                self._go_down("the directory is gone")

    def _miss(self, missed: Missed, now: float) -> None:
        """A file is damaged or gone: end the entries that stand on it."""
        self._misses[missed.reason] += 1
        times = self._misses[missed.reason]
        if str(times).strip("0") == "1":  # the first, the tenth, the hundredth, …
            log.warning("a file of the store is not usable", reason=missed.reason, times=times)
        self._tier.forget_read(missed.name)
        block = self._tier.block_of(missed.name)
        if block is not None:
            self._entries.damaged(block, now)
        elif missed.reason != "missing":
            self._threads.delete(missed.name)

    def _go_down(self, error: str) -> None:
        """Files can't be written: go on without, and try again later."""
        if self._down_until is None:
            log.warning("the store can't be written", reason=error, retry_seconds=RETRY_SECONDS)
        self._problem = error
        self._down_until = self._pace.now() + RETRY_SECONDS
        self._tier.give_up_all()

    def _save(self, max_blocks: int, now: float) -> None:
        saves = self._tier.take_saves(max_blocks) if max_blocks else []
        self._write_notes(now)
        if not saves:
            return
        payloads = self._contents([save.source for save in saves])
        for save, payload in zip(saves, payloads, strict=True):
            self._allowance -= self._bounds.file_bytes
            self._queued_bytes += self._bounds.file_bytes
            self._threads.write(save.key, payload)

    def _write_notes(self, now: float) -> None:
        """Tell the journal, then delete what made way.

        The order matters. The journal never tells of an entry whose files were deleted. And what
        makes way is deleted before a file of the same name is written.
        """
        wall = self._wall()
        records = list[Record]()
        recorded = dict[Entry, Recorded]()
        for note in () if self._is_down else self._tier.take_notes():
            entry = note.entry
            key = note.entry.key.hex()
            if note.kind == "end" or entry.stored is None:
                records.append(End(key=key))
                continue
            recorded[entry] = Recorded(entry.stored, entry.is_leased)
            times = Times.of(entry, now, wall)
            if note.kind == "touch":
                records.append(Touch(key=key, times=times))
                continue
            packed = b"".join(self._tier.key_of(block).packed for block in entry.stored)
            records.append(Put.of(entry, times, packed, self._names(entry, entry.stored)))
        if records:
            self._threads.append(records, recorded)
        for name in self._tier.take_deletes():
            self._threads.delete(name)

    def _names(self, entry: Entry, stored: Sequence[Block]) -> dict[int, list[HeldName]]:
        """The names at an entry's blocks, in any tier."""
        names_at: dict[int, list[HeldName]] = {}
        for index, block in enumerate(stored):
            digest = self._tier.key_of(block).digest
            names = dict(block.names)
            for other in (entry.blocks[index], self._device.canonical(digest, block)):
                names.update(other.names)
            if names:
                names_at[index] = [HeldName(name, tokens) for name, tokens in names.items()]
        return names_at
