"""Other members of a shared store: their journals are followed, their files are read.

`Peers` has the threads: one looks at the journals, two read files. `PeerWork` runs on the engine's
thread around each step, and never waits for a file.
"""

import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from engine.cache.block import Entry
from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool
from engine.cache.store_tier import BlockKey, PeerTier
from engine.clock import Clock
from engine.store.files import Arrived, BlockReader, Missed, StoreDirectory, other_members
from engine.store.journal import (
    MAX_SECONDS,
    Heads,
    Put,
    apply_line,
    entry_of,
    is_chain,
)

POLL_SECONDS = 0.2
MAX_READ_BYTES = 8 * 2**20
"""Bytes that one look reads of one journal."""
LOOKED_AT = 32
"""Entries of other members that one step looks at again."""
MAX_LOST = 65_536
READERS = 2

T = TypeVar("T")


class Results(Generic[T]):
    """What threads found out, until the engine's thread takes it.

    `wake`, once set, is called after a result, once until results are taken; it must not block.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._is_woken = threading.Event()

    def put(self, result: T) -> None:
        self._queue.put(result)
        # `take` clears the event first: a result put before that is taken with it.
        if not self._is_woken.is_set():
            self._is_woken.set()
            self.wake()

    def take(self, timeout: float | None = None) -> list[T]:
        """The results since the last call. With a timeout in seconds this waits for the first."""
        results: list[T] = []
        self._is_woken.clear()
        try:
            if timeout is not None:
                results.append(self._queue.get(timeout=timeout))
            while True:
                results.append(self._queue.get_nowait())
        except queue.Empty:
            return results


class PeerPut(NamedTuple):
    """A member's entry, whole in its files as far as their headers tell."""

    put: Put
    keys: list[BlockKey]


class PeerEnd(NamedTuple):
    """The hexadecimal key of an entry that a member has no more."""

    key: str


class PeerUnfit(NamedTuple):
    """A damaged header of a file, or line of a journal. The engine was not told of its entry."""

    reason: str


@dataclass
class _Journal:
    """How far a member's journal was read. Another `inode` is one that was written anew.

    `entries` are what it has; those in `changed` are looked at next. `told` are what the engine was
    told. A file of an entry in `doubtful` was gone at the last look.
    """

    inode: int = 0
    offset: int = 0
    entries: dict[str, Put] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    told: dict[str, PeerPut] = field(default_factory=dict)


class Peers:
    """`num_rounds`: how often all journals were looked at."""

    def __init__(self, own: StoreDirectory, reader: BlockReader) -> None:
        self.results: Results[PeerPut | PeerEnd | PeerUnfit | Arrived | Missed] = Results()
        self.num_rounds = 0
        self._own = own
        self._reader = reader
        self._journals: dict[Path, _Journal] = {}
        self._members: list[Path] = []
        self._is_closed = threading.Event()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="peer-reader")
        self._thread = threading.Thread(target=self._run, name="peer-journals", daemon=True)
        self._thread.start()

    def read(self, key: BlockKey) -> None:
        self._readers.submit(self._read, key)

    def close(self) -> None:
        self._is_closed.set()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._thread.join()

    # Inside.

    def _read(self, key: BlockKey) -> None:
        """Read a file from any member that has it whole."""
        missed = Missed(key.name, "missing")
        for path in self._members:
            found = self._reader.read(path, key)
            if isinstance(found, Arrived):
                self.results.put(found)
                return
            if found.reason != "missing":
                missed = found
        self.results.put(missed)

    def _run(self) -> None:
        while not self._is_closed.wait(POLL_SECONDS):
            self._members = other_members(self._own, self._reader.model)
            for path in self._members:
                self._follow(path)
            for path in self._journals.keys() - set(self._members):
                for key in self._journals.pop(path).told:
                    self.results.put(PeerEnd(key))
            self.num_rounds += 1

    def _follow(self, path: Path) -> None:
        """Read what a journal has behind what was read. A line without its end waits.

        Files are looked at when the journal was read to its end: a file of an entry that a later
        line ends may be gone.
        """
        journal = self._journals.setdefault(path, _Journal())
        try:
            with open(path / "journal", "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != journal.inode or stat.st_size < journal.offset:
                    journal = self._journals[path] = _Journal(stat.st_ino, told=journal.told)
                file.seek(journal.offset)
                data = file.read(MAX_READ_BYTES)
        except OSError:
            return  # it is not there yet, or no more
        whole = data[: data.rfind(b"\n") + 1]
        journal.offset += len(whole)
        for line in whole.splitlines():
            applied = apply_line(journal.entries, line, self._reader.model.hex(), self._reader.keys)
            if applied.key is not None:
                journal.changed.add(applied.key)
            if applied.damage is not None:
                self.results.put(PeerUnfit(f"journal_{applied.damage}"))
        if len(data) < MAX_READ_BYTES:
            self._look(path, journal)

    def _look(self, path: Path, journal: _Journal) -> None:
        """Tell what has changed. Each file is looked at once, and a miss is told once.

        A file that is gone is looked for again after the next read of the journal, since a member
        tells the end of an entry before it deletes the files.
        """
        heads = Heads(self._reader.keys, lambda name: self._reader.head(path, name))
        unfit: dict[str, PeerUnfit] = {}
        changed, journal.changed = journal.changed, set()
        for key in changed & journal.entries.keys():
            put, told = journal.entries[key], journal.told.get(key)
            # A `touch` leaves the list of blocks as it is.
            found = told.keys if told and told.put.blocks is put.blocks else heads.of(put)
            if isinstance(found, Missed) and found.reason == "missing":
                if key not in journal.doubtful:
                    journal.doubtful.add(key)
                    journal.changed.add(key)
                    continue
            journal.doubtful.discard(key)
            if isinstance(found, list):
                journal.told[key] = one = PeerPut(put, found)
                self.results.put(one)
                continue
            if isinstance(found, Missed):
                unfit[found.name] = PeerUnfit(found.reason)
            del journal.entries[key]
        for damage in unfit.values():
            self.results.put(damage)
        for key in [key for key in journal.told if key not in journal.entries]:
            del journal.told[key]
            self.results.put(PeerEnd(key))


class PeerWork:
    """Takes in what the members' journals and files say, as far as this engine has it nowhere.

    An entry that made way here while another member still has it is taken in again, where there is
    room. A few are looked at in each step, in turn.
    """

    def __init__(
        self,
        tier: PeerTier,
        entries: Entries,
        above: Sequence[BlockPool],
        peers: Peers,
        hasher: ChainHasher,
        clock: Clock,
        wall: Callable[[], float],
    ) -> None:
        """`above`: the pools whose content is read without the store."""
        self._tier = tier
        self._entries = entries
        self._above = above
        self._peers = peers
        self._hasher = hasher
        self._clock = clock
        self._wall = wall
        self.read_bytes = 0
        self.misses: dict[str, int] = {}
        # In the order in which they are looked at again.
        self._known: OrderedDict[Digest, PeerPut] = OrderedDict()
        # Files that were not there, or not what they must be.
        self._lost: set[str] = set()

    @property
    def is_reading(self) -> bool:
        return self._tier.is_reading

    @property
    def num_blocks(self) -> int:
        """Blocks of other members that this engine knows."""
        return self._tier.num_used

    def before_step(self) -> None:
        for result in self._peers.results.take():
            match result:
                case PeerPut():
                    key = Digest(bytes.fromhex(result.put.key))
                    self._known[key] = result
                    self._lost.difference_update(one.name for one in result.keys)
                    self._put(key, result)
                case PeerEnd():
                    self._ended(Digest(bytes.fromhex(result.key)))
                case Arrived():
                    self.read_bytes += len(result.payload)
                    self._tier.arrived(result.name, result.payload)
                case PeerUnfit():
                    self._count(result.reason)
                case Missed():
                    self._count(result.reason)
                    self._lose(result.name)
        for entry in self._tier.pool.take_broken():
            if self._entries.get(entry.key) is entry:
                self._entries.end(entry, entry.why_broken)
        self._tier.take_deletes()
        self._look_again()

    def after_step(self) -> None:
        for key in self._tier.take_asked():
            self._peers.read(key)

    def drop(self, owner: Digest, key: Digest | None) -> None:
        """An entry was dropped, or with its scope all content: it is not taken in again."""
        if key is not None:
            self._known.pop(key, None)
            return
        for known in [known for known, one in self._known.items() if one.keys[0].owner == owner]:
            del self._known[known]
        self._tier.drop_scope(owner)
        self._tier.take_deletes()

    def close(self) -> None:
        self._peers.close()

    # Inside.

    def _count(self, damage: str) -> None:
        reason = f"peer_{damage}"
        self.misses[reason] = self.misses.get(reason, 0) + 1

    def _ended(self, key: Digest) -> None:
        """The other member has it no more. What this engine has above is its own."""
        self._known.pop(key, None)
        entry = self._entries.get(key)
        if entry is not None and self._is_only_theirs(entry):
            self._entries.end(entry, "ttl_expired")

    def _lose(self, name: str) -> None:
        """A file is not there, or not what it must be: what stands on it ends."""
        if len(self._lost) >= MAX_LOST:
            self._lost.clear()
        self._lost.add(name)
        self._tier.forget_read(name)
        if (block := self._tier.block_of(name)) is not None:
            for entry in list(block.dependents):
                self._entries.end(entry, "damaged")
            self._tier.forget(block)

    def _look_again(self) -> None:
        for _ in range(min(LOOKED_AT, len(self._known))):
            key = next(iter(self._known))
            self._known.move_to_end(key)
            found = self._known[key]
            is_there = not any(one.name in self._lost for one in found.keys)
            if self._entries.get(key) is None and is_there and self._tier.has_room(found.keys):
                self._put(key, found)

    def _put(self, key: Digest, found: PeerPut) -> None:
        """Take in another member's entry, or a later expiry of it.

        Nothing happens if this engine has an equal one of its own, or there is no room.
        """
        put, keys = found
        passed = put.times.seconds_since(self._wall())
        left = min(put.times.left, MAX_SECONDS) - passed
        if left <= 0 or not is_chain(put, keys, self._hasher):
            self._known.pop(key, None)
            return
        entry = entry_of(put, self._clock.now(), left, passed, is_leased=False)
        if (there := self._entries.get(key)) is not None:
            if not self._is_only_theirs(there) or there.expires_at >= entry.expires_at:
                return
            self._entries.end(there, "ttl_expired")
        if (blocks := self._tier.acquire_keys(keys)) is None:
            return
        entry.blocks = blocks
        self._entries.take_in(entry)
        for index, names in put.names.items():
            if 0 <= index < len(keys) and not self._is_above(keys[index]):
                blocks[index].names.update({one.digest: one.tokens for one in names})
                self._tier.tell(blocks[index].names)
        self._tier.pool.release_chain(blocks)

    def _is_only_theirs(self, entry: Entry) -> bool:
        """Whether it is only another member's, and no request is reading it."""
        is_theirs = any(block.home is self._tier.pool for block in entry.blocks)
        return is_theirs and not entry.is_leased and not entry.refreshed_until

    def _is_above(self, key: BlockKey) -> bool:
        return any(pool.find(key.digest, key.packed) is not None for pool in self._above)
