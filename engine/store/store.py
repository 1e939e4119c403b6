"""The store at work: it tells the tier the results of file work, and gives the threads their work.

`StoreThreads` has the threads: one changes files, in order; two read. `DiskStore` runs on the
engine's thread, all but `close`, and never waits for a file.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import structlog

from engine.cache.block import Block, Entry, Recorded
from engine.cache.entries import Entries
from engine.cache.ids import BlockId, Digest
from engine.cache.pool import BlockPool
from engine.cache.store_tier import BlockKey, Note, Payload, StoreTier
from engine.clock import Clock, MonotonicClock
from engine.protocol import HeldName, StoreStats
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
from engine.store.peers import READERS, PeerWork, Results

SCAN_BATCH = 64
RETRY_SECONDS = 30.0
"""Seconds without a write after a write that failed."""
MAX_QUEUED_BYTES = 64 * 2**20
"""Bytes of blocks that may wait to be written."""
BURST_SECONDS = 0.25
WORK_SECONDS = 0.02
IDLE_SECONDS = 3600.0
JOURNAL_GROWTH = 4
JOURNAL_SLACK = 4 * 2**20
"""Bytes. The journal is rewritten above JOURNAL_GROWTH times its last rewritten size and this."""

log = structlog.get_logger()


class Written(NamedTuple):
    """A block's file was written, or `error` says why not."""

    name: str
    num_bytes: int
    error: str | None = None


class Scanned(NamedTuple):
    """Files that were found in the directory. `is_last` when there are no more."""

    keys: list[BlockKey]
    missed: list[Missed]
    is_last: bool = False


class Appended(NamedTuple):
    """The records of this call of `append`, and of all before it, are in the journal's file."""

    number: int


class Failed(NamedTuple):
    """The journal could not be written, or a file not be deleted."""

    error: str


Result = Written | Arrived | Missed | Scanned | Appended | Failed


class StoreThreads:
    def __init__(self, directory: StoreDirectory, reader: BlockReader) -> None:
        self.results: Results[Result] = Results()
        self.reader = reader
        self._directory = directory
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")
        self._writer = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._is_closed = threading.Event()
        self._is_abandoned = threading.Event()
        self._unwritten: list[bytes] = []
        self._num_appends = 0
        self.journal_bytes = self.compacted_bytes = 0
        self._writer.start()

    # Tasks of the writer.

    def write(self, key: BlockKey, payload: Payload) -> None:
        self._tasks.put(lambda: self._write(key, payload))

    def delete(self, name: str) -> None:
        self._tasks.put(lambda: self._delete(name))

    def append(self, records: Sequence[Record]) -> int:
        """Add records to the journal. Return the number by which `Appended` tells that they are."""
        self._num_appends += 1
        number = self._num_appends
        self._tasks.put(lambda: self._append(records, number))
        return number

    def compact(self) -> None:
        """Write the journal anew, with what had not ended."""
        self._tasks.put(self._compact)

    def barrier(self) -> "Future[None]":
        """Done when everything before is done."""
        future: Future[None] = Future()
        self._tasks.put(lambda: future.set_result(None))
        return future

    # Tasks of the readers.

    def read(self, key: BlockKey) -> None:
        path = self._directory.path
        self._readers.submit(lambda: self.results.put(self.reader.read(path, key)))

    def scan(self, known: frozenset[str]) -> None:
        """Look at every file that is not known."""
        self._readers.submit(self._scan, known)

    def head(self, name: str) -> BlockKey | Missed:
        """The key in a file's header, or why it is none. For any thread."""
        return self.reader.head(self._directory.path, name)

    def close(self, timeout: float) -> bool:
        """Finish the writer's tasks. False if that took too long."""
        self._is_closed.set()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._tasks.put(None)
        self._writer.join(timeout)
        return not self._writer.is_alive()

    def abandon(self) -> None:
        """End after the task in progress. Nothing else is done: a killed process does no more."""
        self._is_abandoned.set()
        self.close(timeout=60.0)

    # Inside.

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if not self._is_abandoned.is_set():
                task()

    def _write(self, key: BlockKey, payload: Payload) -> None:
        header = encode_header(key, payload, self.reader.model, self.reader.keys)
        try:
            self._directory.write(key.name, header, payload)
        except OSError as error:
            self.results.put(Written(key.name, len(payload), _told(error)))
        else:
            self.results.put(Written(key.name, len(payload)))

    def _delete(self, name: str) -> None:
        try:
            self._directory.delete(name)
        except OSError as error:
            self.results.put(Failed(_told(error)))

    def _append(self, records: Sequence[Record], number: int) -> None:
        """Lines that could not be written are tried again with the next ones, on a line of their
        own."""
        self._unwritten.extend(encode_line(record, self.reader.keys) for record in records)
        if not self._unwritten:
            return
        lines = b"".join(self._unwritten)
        try:
            self._directory.append_journal(lines)
        except OSError as error:
            if self._unwritten[0] != b"\n":
                self._unwritten.insert(0, b"\n")
            self.results.put(Failed(_told(error)))
        else:
            self._unwritten.clear()
            self.journal_bytes += len(lines)
            self.results.put(Appended(number))

    def _compact(self) -> None:
        keys = self.reader.keys
        try:
            told = replay(self._directory.journal_lines(), self.reader.model.hex(), keys)
            lines = b"".join(encode_line(put, keys) for put in told.entries.values())
            self._directory.rewrite_journal(lines)
        except OSError as error:
            self.results.put(Failed(_told(error)))
        else:
            self.journal_bytes = self.compacted_bytes = len(lines)

    def _scan(self, known: frozenset[str]) -> None:
        keys: list[BlockKey] = []
        missed: list[Missed] = []
        try:
            for name in self._directory.names():
                if self._is_closed.is_set():
                    return
                if name in known:
                    continue
                found = self.head(name)
                if not isinstance(found, Missed):
                    keys.append(found)
                elif found.reason != "missing":  # it was deleted meanwhile
                    missed.append(found)
                if len(keys) + len(missed) >= SCAN_BATCH:
                    self.results.put(Scanned(keys, missed))
                    keys, missed = [], []
        except OSError as error:
            self.results.put(Failed(_told(error)))
        self.results.put(Scanned(keys, missed, is_last=True))


def _told(error: OSError) -> str:
    return error.strerror or type(error).__name__


class BlockMemory(Protocol):
    """The part of a runner that gives a block's content."""

    def save(self, blocks: Sequence[BlockId]) -> Sequence[Payload]: ...


class StoreBounds(NamedTuple):
    """`bytes_per_second` are written at most, `max_loads` blocks brought to the device in a step.

    A block's file takes `file_bytes` of the disk.
    """

    file_bytes: int
    bytes_per_second: float
    max_loads: int


class DiskStore:
    """An `engine.schedule.loop.StoreWork`. `epoch` is this engine's."""

    def __init__(
        self,
        tier: StoreTier,
        entries: Entries,
        device: BlockPool,
        memory: BlockMemory,
        threads: StoreThreads,
        bounds: StoreBounds,
        *,
        epoch: str,
        clock: Clock,
        wall: Callable[[], float],
        restored: Restored,
        peers: PeerWork | None = None,
    ) -> None:
        self._tier = tier
        self._entries = entries
        self._device = device
        self._memory = memory
        self._threads = threads
        self._bounds = bounds
        self._epoch = epoch
        self._clock = clock
        self._wall = wall
        # Writing is paced by real time, also where the engine's clock is moved by hand.
        self._pace = MonotonicClock()
        self._paced_at = self._pace.now()
        self._allowance = 0.0
        self._restored = restored
        self._peers = peers
        self._misses = dict(restored.misses)
        self._queued_bytes = self._written_bytes = self._read_bytes = self._failed_writes = 0
        self._down_until: float | None = None
        self.is_scanning = True
        """Whether not all files of an earlier epoch were looked at yet."""
        self._dropped: set[Digest] = set()
        self._unrecorded: deque[tuple[int, dict[Entry, Recorded]]] = deque()
        for name in restored.damaged:
            threads.delete(name)
        # A damaged file that the start found is counted already, and may not be deleted yet.
        threads.scan(tier.names.union(restored.damaged))

    # Around each step.

    @property
    def max_loads(self) -> int:
        return self._bounds.max_loads

    @property
    def is_reading(self) -> bool:
        return self._tier.is_reading or (self._peers is not None and self._peers.is_reading)

    def before_step(self, now: float) -> None:
        """Take in the results of the threads."""
        for result in self._threads.results.take():
            self._take(result, now)
        if self._peers is not None:
            self._peers.before_step()

    def after_step(self, now: float) -> None:
        """Give the threads their work. The device's blocks hold what their `tokens` say."""
        for key in self._tier.take_asked():
            self._threads.read(key)
        if self._peers is not None:
            self._peers.after_step()
        self._save(self._num_saves(), now)

    def seconds_to_next(self, now: float) -> float:
        del now
        is_writing = self._tier.num_wanted and not self._is_down
        is_busy = is_writing or self.is_reading or self.is_scanning
        return WORK_SECONDS if is_busy else IDLE_SECONDS

    # What an operator does.

    def drop(self, owner: Digest, key: Digest | None = None) -> "Future[None]":
        """A scope's entry was dropped, or all of them. With all of them its files go.

        Done when the files are deleted.
        """
        if self._peers is not None:
            self._peers.drop(owner, key)
        if key is None:
            self._tier.drop_scope(owner)
            if self.is_scanning:
                self._dropped.add(owner)
        return self.flush()

    def flush(self) -> "Future[None]":
        """Done when everything that was decided so far is on the disk."""
        self._write_notes(self._clock.now())
        self._delete()
        return self._threads.barrier()

    def close(self, seconds: float) -> None:
        """Write what is still wanted. The engine's thread has ended."""
        end = self._pace.now() + seconds
        if self._peers is not None:
            self._peers.close()
        while self._tier.num_wanted and not self._is_down and self._pace.now() < end:
            free = max(MAX_QUEUED_BYTES - self._queued_bytes, 0)
            self._save(free // self._bounds.file_bytes, self._clock.now())
            for result in self._threads.results.take(timeout=WORK_SECONDS):
                self._take(result, self._clock.now())
        self._write_notes(self._clock.now())
        self._delete()
        if not self._threads.close(max(end - self._pace.now(), 1.0)):
            log.warning("the store is not written to its end", pending=self._queued_bytes)

    def stats(self) -> StoreStats:
        tier, restored, size = self._tier, self._restored, self._bounds.file_bytes
        # Entries with a whole copy that the journal on the disk does not tell as it is yet.
        unrecorded = {entry for _, told in self._unrecorded for entry in told}
        num_unrecorded = sum(not entry.outlives_restarts for entry in unrecorded)
        return StoreStats(
            is_up=not self._is_down,
            blocks=tier.pool.num_blocks,
            used_blocks=tier.num_used,
            held_blocks=tier.pool.num_leased,
            max_bytes=tier.pool.num_blocks * size,
            used_bytes=tier.num_used * size,
            entries=len(tier.holds),
            leases=sum(entry.is_leased for entry in tier.holds.entries()),
            pending_entries=tier.num_wanted + num_unrecorded,
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
            peer_blocks=self._peers.num_blocks if self._peers else 0,
            peer_read_bytes=self._peers.read_bytes if self._peers else 0,
            misses={**self._misses, **(self._peers.misses if self._peers else {})},
        )

    # Results.

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
            case Scanned():
                self._take_scanned(result, now)
            case Appended():
                while self._unrecorded and self._unrecorded[0][0] <= result.number:
                    for entry, recorded in self._unrecorded.popleft()[1].items():
                        entry.recorded = recorded
            case Failed():
                self._go_down(result.error)

    def _miss(self, missed: Missed, now: float) -> None:
        """A file is damaged or gone: end what stands on it."""
        self._count_miss(missed)
        self._tier.forget_read(missed.name)
        block = self._tier.block_of(missed.name)
        if block is not None:
            self._entries.damaged(block, now)
        elif missed.reason != "missing":
            self._threads.delete(missed.name)

    def _count_miss(self, missed: Missed) -> None:
        times = self._misses[missed.reason] = self._misses.get(missed.reason, 0) + 1
        if str(times).strip("0") == "1":  # the first, the tenth, the hundredth, …
            log.warning("a file of the store is not usable", reason=missed.reason, times=times)

    def _take_scanned(self, scanned: Scanned, now: float) -> None:
        for missed in scanned.missed:
            # What is known by now was written anew, after the look at the file.
            if self._tier.block_of(missed.name) is None:
                self._miss(missed, now)
            else:
                self._count_miss(missed)
        for key in scanned.keys:
            if self._tier.block_of(key.name) is None and (
                key.owner in self._dropped or self._tier.install(key) is None
            ):
                self._threads.delete(key.name)
        if scanned.is_last:
            self.is_scanning = False
            self._dropped.clear()

    def _go_down(self, error: str) -> None:
        """Files can't be written: go on without, and try again later."""
        if self._down_until is None:
            log.warning("the store can't be written", reason=error, retry_seconds=RETRY_SECONDS)
        self._down_until = self._pace.now() + RETRY_SECONDS
        self._tier.give_up_all()

    # Writing.

    def _num_saves(self) -> int:
        """How many blocks may be written now, by the bounds on bytes a second and in the queue."""
        at = self._pace.now()
        rate, size = self._bounds.bytes_per_second, self._bounds.file_bytes
        most = max(rate * BURST_SECONDS, size)
        self._allowance = min(self._allowance + rate * (at - self._paced_at), most)
        self._paced_at = at
        if self._down_until is not None and at >= self._down_until:
            self._down_until = None
            log.info("the store is tried again")
            for entry in self._entries.live():
                self._tier.want(entry)
        if self._is_down:
            return 0
        free = max(MAX_QUEUED_BYTES - self._queued_bytes, 0)
        return min(int(min(self._allowance, free) // size), self._bounds.max_loads)

    def _save(self, max_blocks: int, now: float) -> None:
        saves = self._tier.take_saves(max_blocks) if max_blocks else []
        # In this order: the journal never tells of an entry whose files were deleted, and what
        # makes way is deleted before a file of the same name is written.
        self._write_notes(now)
        self._delete()
        if not saves:
            return
        payloads = self._memory.save([save.source for save in saves])
        for save, payload in zip(saves, payloads, strict=True):
            self._allowance -= self._bounds.file_bytes
            self._queued_bytes += self._bounds.file_bytes
            self._threads.write(save.key, payload)

    def _delete(self) -> None:
        for name in self._tier.take_deletes():
            self._threads.delete(name)

    def _write_notes(self, now: float) -> None:
        if self._is_down:
            return
        if notes := self._tier.take_notes():
            wall = self._wall()
            told = {
                note.entry: Recorded(note.entry.stored, note.entry.is_leased)
                for note in notes
                if note.kind != "end" and note.entry.stored is not None
            }
            number = self._threads.append([self._record(note, now, wall) for note in notes])
            self._unrecorded.append((number, told))
        threads = self._threads
        if threads.journal_bytes > JOURNAL_GROWTH * threads.compacted_bytes + JOURNAL_SLACK:
            threads.journal_bytes = 0
            threads.compact()

    def _record(self, note: Note, now: float, wall: float) -> Record:
        entry, key = note.entry, note.key.hex()
        if note.kind == "end" or entry.stored is None:
            return End(key=key)
        times = Times(
            at=wall,
            left=entry.expires_at - now,
            idle=max(now - entry.used_at, 0.0),
            age=now - entry.ready_at,
            is_leased=entry.is_leased,
            reads=entry.reads,
        )
        if note.kind == "touch":
            return Touch(key=key, times=times)
        return Put(
            key=key,
            model=self._threads.reader.model.hex(),
            epoch=self._epoch,
            scope=entry.scope,
            tokens=entry.tokens,
            ttl=entry.ttl,
            seconds=entry.seconds,
            name=entry.name,
            blocks=[self._tier.key_of(block).digest.hex() for block in entry.stored],
            names=self._names(entry, entry.stored),
            times=times,
        )

    def _names(self, entry: Entry, stored: Sequence[Block]) -> dict[int, list[HeldName]]:
        """The names that stand at an entry's blocks, wherever they are."""
        found: dict[int, list[HeldName]] = {}
        for index, block in enumerate(stored):
            digest = self._tier.key_of(block).digest
            names = dict(block.names)
            for other in (entry.blocks[index], self._device.canonical(digest, block)):
                names.update(other.names)
            if names:
                found[index] = [HeldName(name, tokens) for name, tokens in names.items()]
        return found
