"""The store at work: it tells the tier the results of file work, and gives the threads their work.

All methods but `close` run on the engine's thread. None of them waits for a file.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import structlog

from engine.cache.block import Block, Entry, Recorded
from engine.cache.entries import Entries
from engine.cache.ids import BlockId, Digest
from engine.cache.pool import BlockPool
from engine.cache.store_tier import Note, Payload, StoreTier
from engine.clock import Clock, MonotonicClock
from engine.protocol import HeldName, StoreStats
from engine.store.journal import End, Put, Record, Times, Touch
from engine.store.moments import Moment, WallClock
from engine.store.peer_work import PeerWork
from engine.store.restore import Restored
from engine.store.threads import (
    Appended,
    Arrived,
    Failed,
    Missed,
    Result,
    Scanned,
    StoreThreads,
    Written,
)

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


class BlockMemory(Protocol):
    """The part of a runner that gives a block's content."""

    def save(self, blocks: Sequence[BlockId]) -> Sequence[Payload]: ...


class StoreBounds(NamedTuple):
    """`bytes_per_second` are written at most, `max_loads` blocks brought to the device in a step.

    A file of a block has `payload_bytes` of content, and takes `file_bytes` of the disk.
    """

    payload_bytes: int
    file_bytes: int
    bytes_per_second: float
    max_loads: int


class DiskStore:
    """An `engine.schedule.loop.StoreWork`. `epoch` is this engine's, `model` its fingerprint."""

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
        model: bytes,
        clock: Clock,
        wall: WallClock,
        restored: Restored,
        pace: Clock | None = None,
        peers: PeerWork | None = None,
    ) -> None:
        self._tier = tier
        self._entries = entries
        self._device = device
        self._memory = memory
        self._threads = threads
        self._bounds = bounds
        self._epoch = epoch
        self._model = model.hex()
        self._clock = clock
        self._wall = wall
        # Writing is paced by real time, also where the engine's clock is moved by hand.
        self._pace = pace or MonotonicClock()
        self._paced_at = self._pace.now()
        self._allowance = 0.0
        self._restored = restored
        self._peers = peers
        self._misses = dict(restored.misses)
        self._queued_bytes = self._written_bytes = self._read_bytes = self._failed_writes = 0
        self._down_until: float | None = None
        self._is_scanning = True
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
        is_reading_peers = self._peers is not None and self._peers.is_reading
        return self._tier.is_reading or is_reading_peers

    @property
    def is_scanning(self) -> bool:
        """Whether not all files of an earlier epoch were looked at yet."""
        return self._is_scanning

    def before_step(self, now: float) -> None:
        """Take in the results of the threads."""
        for result in self._threads.take_results():
            self._take(result, now)
        if self._peers is not None:
            self._peers.before_step()

    def after_step(self, now: float) -> None:
        """Give the threads their work. The device's blocks hold what their `tokens` say."""
        for key in self._tier.take_asked():
            self._threads.read(key, self._bounds.payload_bytes)
        if self._peers is not None:
            self._peers.after_step()
        self._save(self._num_saves(), now)

    def seconds_to_next(self, now: float) -> float:
        del now
        is_writing = self._tier.num_wanted and not self._is_down
        is_busy = is_writing or self.is_reading or self._is_scanning
        return WORK_SECONDS if is_busy else IDLE_SECONDS

    # What an operator does.

    def drop(self, owner: Digest, key: Digest | None = None) -> "Future[None]":
        """A scope's entry was dropped, or all of them. With all of them its files go.

        Done when the files are deleted.
        """
        if key is not None:
            if self._peers is not None:
                self._peers.drop_entry(key)
        else:
            self._tier.drop_scope(owner)
            if self._peers is not None:
                self._peers.drop_scope(owner)
            if self._is_scanning:
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
            for result in self._threads.take_results(timeout=WORK_SECONDS):
                self._take(result, self._clock.now())
        self._write_notes(self._clock.now())
        self._delete()
        if not self._threads.close(max(end - self._pace.now(), 1.0)):
            log.warning("the store is not written to its end", pending=self._queued_bytes)

    # Reports.

    def stats(self) -> StoreStats:
        tier, restored = self._tier, self._restored
        return StoreStats(
            is_up=not self._is_down,
            blocks=tier.pool.num_blocks,
            used_blocks=tier.num_used,
            held_blocks=tier.pool.num_leased,
            max_bytes=tier.pool.num_blocks * self._bounds.file_bytes,
            used_bytes=tier.num_used * self._bounds.file_bytes,
            entries=len(tier.holds),
            leases=sum(entry.is_leased for entry in tier.holds.entries()),
            pending_entries=tier.num_wanted + self._num_unrecorded,
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
            clock_moved_seconds=restored.moved_seconds,
            peer_blocks=self._peers.num_blocks if self._peers else 0,
            peer_read_bytes=self._peers.read_bytes if self._peers else 0,
            misses={**self._misses, **(self._peers.misses if self._peers else {})},
        )

    # Inside.

    @property
    def _num_unrecorded(self) -> int:
        """Entries with a whole copy that the journal on the disk does not tell as it is yet."""
        waiting = {entry for _, told in self._unrecorded for entry in told}
        return sum(not entry.outlives_restarts for entry in waiting)

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
                self._take_appended(result)
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
        self._misses[missed.reason] = self._misses.get(missed.reason, 0) + 1
        if _is_told(self._misses[missed.reason]):
            log.warning(
                "a file of the store is not usable",
                reason=missed.reason,
                times=self._misses[missed.reason],
            )

    def _take_scanned(self, scanned: Scanned, now: float) -> None:
        for missed in scanned.missed:
            # What is known by now was written anew, after the look at the file.
            if self._tier.block_of(missed.name) is None:
                self._miss(missed, now)
            else:
                self._count_miss(missed)
        for key in scanned.keys:
            if self._tier.block_of(key.name) is not None:
                continue
            if key.owner in self._dropped or self._tier.install(key) is None:
                self._threads.delete(key.name)
        if scanned.is_last:
            self._is_scanning = False
            self._dropped.clear()

    def _take_appended(self, appended: Appended) -> None:
        while self._unrecorded and self._unrecorded[0][0] <= appended.number:
            for entry, recorded in self._unrecorded.popleft()[1].items():
                entry.recorded = recorded

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
            moment = self._wall.moment()
            told = {
                note.entry: Recorded(note.entry.stored, note.entry.is_leased)
                for note in notes
                if note.kind != "end" and note.entry.stored is not None
            }
            number = self._threads.append([self._record(note, now, moment) for note in notes])
            self._unrecorded.append((number, told))
        threads = self._threads
        if threads.journal_bytes > JOURNAL_GROWTH * threads.compacted_bytes + JOURNAL_SLACK:
            threads.journal_bytes = 0
            threads.compact()

    def _record(self, note: Note, now: float, moment: Moment) -> Record:
        entry, key = note.entry, note.key.hex()
        if note.kind == "end" or entry.stored is None:
            return End(key=key)
        times = Times(
            at=moment,
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
            model=self._model,
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

    def _go_down(self, error: str) -> None:
        """Files can't be written: go on without, and try again later."""
        if self._down_until is None:
            log.warning("the store can't be written", reason=error, retry_seconds=RETRY_SECONDS)
        self._down_until = self._pace.now() + RETRY_SECONDS
        self._tier.give_up_all()


def _is_told(times: int) -> bool:
    """Whether this time has a line in the log: the first, the tenth, the hundredth, …"""
    return str(times).strip("0") == "1"
