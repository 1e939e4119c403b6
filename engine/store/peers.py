"""Other members of a shared store: their journals are followed, their files are read.

One thread looks at the journals, two read files. All else runs on the engine's thread around each
step, and never waits for a file.
"""

import os
import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from engine.cache.block import Entry
from engine.cache.digests import ChainHasher, ChainKind
from engine.cache.entries import Entries
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool
from engine.cache.store_tier import BlockKey, StoreTier
from engine.clock import Clock
from engine.store.files import Arrived, BlockReader, Missed, StoreDirectory, other_members
from engine.store.journal import JournalContent, Put

POLL_SECONDS = 0.2
MAX_READ_BYTES = 8 * 2**20
"""Bytes that one look reads of one journal."""
LOOKED_AT = 32
"""Entries of other members that one step looks at again."""
MAX_LOST = 65_536
READERS = 2

T = TypeVar("T")


class Results(Generic[T]):
    """Results of threads' work, until the engine's thread takes them.

    `wake`, once set, is called after the first result since results were taken. It must not block.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], object] = lambda: None
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


@dataclass
class _Journal:
    """How far a member's journal was read."""

    content: JournalContent
    # A journal that was written anew has another inode.
    inode: int = 0
    offset: int = 0
    # Of the entries that the engine was told: the keys of their files.
    known_keys: dict[str, list[BlockKey]] = field(default_factory=dict)


class Peers:
    """Takes in the entries of members' journals and files that this engine has nowhere.

    The members run the reader's model. If that is a sibling model, its entries get the `kind` that
    stands for it, and no names. Only its exact entries are taken in. An entry may make way here
    while another member still has it. It is taken in again when there is room. Each step looks at a
    few of these entries, in turn.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        reader: BlockReader,
        hasher: ChainHasher,
        tier: StoreTier,
        entries: Entries,
        above: Sequence[BlockPool],
        clock: Clock,
        wall: Callable[[], float],
        kind: ChainKind | None = None,
    ) -> None:
        """`above` are the pools above the store."""
        self.results: Results[Callable[[], None]] = Results()
        self.read_bytes = 0
        self.misses: Counter[str] = Counter()
        self._own = directory
        self._reader = reader
        self._hasher = hasher
        self._tier = tier
        self._entries = entries
        self._above = above
        self._clock = clock
        self._wall = wall
        self._kind = kind
        # The entries of all members, in the order in which they are looked at again.
        self._known: OrderedDict[Digest, tuple[Put, list[BlockKey]]] = OrderedDict()
        # The names of files that were missing or damaged.
        self._lost: set[str] = set()
        self._journals: dict[Path, _Journal] = {}
        self._members: list[Path] = []
        self._is_closed = threading.Event()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="peer-reader")
        self._thread = threading.Thread(target=self._run, name="peer-journals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._thread.join()

    # In the threads. Their results are calls that the engine's thread makes.

    def _read(self, key: BlockKey) -> None:
        """Read a file from any member that has it whole."""
        missed = Missed(key.name, "missing")
        for path in self._members:
            outcome = self._reader.read(path, key.file or key)._replace(name=key.name)
            if isinstance(outcome, Arrived):
                self.results.put(partial(self._arrived, outcome))
                return
            if outcome.reason != "missing":
                missed = outcome
        self.results.put(partial(self._lose, missed))

    def _run(self) -> None:
        while not self._is_closed.wait(POLL_SECONDS):
            self._members = other_members(self._own, self._reader.model)
            for path in self._members:
                self._follow(path)
            for path in self._journals.keys() - set(self._members):
                for key, keys in self._journals.pop(path).known_keys.items():
                    self.results.put(partial(self._end, self._key_here(key, keys)))

    def _follow(self, path: Path) -> None:
        """Read a journal on from where it was read to. A line without its end waits.

        Entries are reported once the journal was read to its end, because a later line may end
        one. The files of an entry are looked at once.
        """
        journal = self._journals.get(path)
        try:
            with open(path / "journal", "rb") as file:
                stat = os.fstat(file.fileno())
                is_same = journal is not None and stat.st_ino == journal.inode
                if journal is None or not is_same or stat.st_size < journal.offset:
                    known_keys = journal.known_keys if journal is not None else {}
                    content = JournalContent(self._reader.model.hex(), self._reader.keys)
                    journal = self._journals[path] = _Journal(
                        content, stat.st_ino, known_keys=known_keys
                    )
                file.seek(journal.offset)
                data = file.read(MAX_READ_BYTES)
                if len(data) == MAX_READ_BYTES and b"\n" not in data:
                    data += file.readline()  # of a very long prompt
        except OSError:
            return  # the journal is not there yet, or was deleted
        whole = data[: data.rfind(b"\n") + 1]
        journal.offset += len(whole)
        content = journal.content
        known_keys = journal.known_keys
        entries = journal.content.entries
        content.take(whole.splitlines())
        if len(data) >= MAX_READ_BYTES:
            return
        unfit = Counter({f"journal_{reason}": n for reason, n in content.damages.items()})
        changed = content.changed
        content.changed = set()
        content.damages = Counter()
        damages: dict[str, Missed | None] = {}
        for key in changed & entries.keys():
            put = entries[key]
            if self._kind is not None and put.adapter is not None:
                continue
            keys = known_keys.get(key)
            if keys is None:
                keys = put.keys(self._hasher, self._reader.keys) or []
                self._look_at(path, keys, damages)
                if not keys or any(damages[block_key.name] for block_key in keys):
                    del entries[key]
                    continue
                keys = self._keys_here(keys)
                known_keys[key] = keys
            if self._kind is not None:
                here = self._key_here(key, keys)
                put = msgspec.structs.replace(
                    put, key=here, adapter=self._kind, name=None, names={}
                )
            self.results.put(partial(self._learn, put, keys))
        unfit.update(miss.reason for miss in damages.values() if miss is not None)
        if unfit:
            self.results.put(partial(self._count, unfit))
        for key in known_keys.keys() - entries.keys():
            self.results.put(partial(self._end, self._key_here(key, known_keys.pop(key))))

    def _look_at(
        self, path: Path, keys: Iterable[BlockKey], damages: dict[str, Missed | None]
    ) -> None:
        """Note what is wrong with each file. Each file is looked at once."""
        for block_key in keys:
            if block_key.name not in damages:
                # A file that is gone is no damage: the end of its entry may be told next.
                miss = self._reader.miss_of(path, block_key)
                is_damage = miss is not None and miss.reason != "missing"
                damages[block_key.name] = miss if is_damage else None

    def _key_here(self, key: str, keys: Sequence[BlockKey]) -> str:
        """The key that the engine knows an entry by."""
        return key if self._kind is None else keys[-1].digest.hex()

    def _keys_here(self, keys: list[BlockKey]) -> list[BlockKey]:
        """The keys of the same blocks in this engine's kind. The entry has no recurrent state."""
        if self._kind is None:
            return keys
        sibling_keys = list[BlockKey]()
        parent = keys[0].owner
        for block_key in keys:
            digest = self._hasher.extend(parent, block_key.packed, block_key.place, self._kind)
            name = self._reader.keys.name_of(digest)
            sibling_keys.append(
                block_key._replace(name=name, digest=digest, parent=parent, file=block_key)
            )
            parent = digest
        return sibling_keys

    # On the engine's thread, around each step.

    @property
    def is_reading(self) -> bool:
        return self._tier.is_reading

    @property
    def num_blocks(self) -> int:
        """Blocks of other members that this engine knows."""
        return self._tier.num_used

    def before_step(self) -> None:
        for tell in self.results.take():
            tell()
        for entry in self._tier.pool.take_broken():
            if self._entries.get(entry.key) is entry:
                self._entries.end(entry, entry.why_broken)
        self._tier.take_deletes()
        for _ in range(min(LOOKED_AT, len(self._known))):
            key = next(iter(self._known))
            self._known.move_to_end(key)
            put, keys = self._known[key]
            is_there = self._lost.isdisjoint(block_key.name for block_key in keys)
            if self._entries.get(key) is None and is_there and self._tier.has_room(keys):
                self._put(key, put, keys)

    def after_step(self) -> None:
        for key in self._tier.take_asked():
            self._readers.submit(self._read, key)

    def drop(self, owner: Digest | None, key: Digest | None) -> None:
        """An entry was dropped, or with its scope all content: it is not taken in again."""
        if key is not None:
            self._known.pop(key, None)
            return
        doomed = [
            known for known, (_, keys) in self._known.items() if owner in (None, keys[0].owner)
        ]
        for known in doomed:
            del self._known[known]
        self._tier.drop_scope(owner)
        self._tier.take_deletes()

    def _learn(self, put: Put, keys: list[BlockKey]) -> None:
        """A member has an entry, or other times of it."""
        key = Digest(bytes.fromhex(put.key))
        self._known[key] = put, keys
        self._lost.difference_update(block_key.name for block_key in keys)
        self._put(key, put, keys)

    def _end(self, key: str) -> None:
        """A member has the entry no longer. This engine's copy in higher tiers stays."""
        digest = Digest(bytes.fromhex(key))
        self._known.pop(digest, None)
        entry = self._entries.get(digest)
        if entry is None or not self._is_only_theirs(entry):
            return
        # A journal does not tell why. Before its time an entry made way, was dropped, or has gone
        # with its member. Here nothing held it.
        is_expired = entry.expires_at <= self._clock.now()
        self._entries.end(entry, "ttl_expired" if is_expired else "best_effort_evicted")

    def _arrived(self, arrived: Arrived) -> None:
        self.read_bytes += len(arrived.payload)
        self._tier.arrived(arrived.name, arrived.payload)

    def _count(self, reasons: Counter[str]) -> None:
        self.misses.update({f"peer_{reason}": times for reason, times in reasons.items()})

    def _lose(self, missed: Missed) -> None:
        """A file is missing or damaged: end the entries that stand on it."""
        self._count(Counter([missed.reason]))
        if len(self._lost) >= MAX_LOST:
            self._lost.clear()
        self._lost.add(missed.name)
        self._tier.forget_read(missed.name)
        block = self._tier.block_of(missed.name)
        if block is not None:
            for entry in list(block.dependents):
                self._entries.end(entry, "damaged")
            self._tier.forget(block)

    def _put(self, key: Digest, put: Put, keys: list[BlockKey]) -> None:
        """Take in another member's entry, or a later expiry of it.

        Nothing happens if this engine has an equal one of its own, or there is no room.
        """
        now = self._clock.now()
        wall = self._wall()
        if put.times.seconds_left(wall) <= 0:
            self._known.pop(key, None)
            return
        entry = put.entry(now, wall, is_leased=False)
        known = self._entries.get(key)
        if known is not None:
            if not self._is_only_theirs(known) or known.expires_at >= entry.expires_at:
                return
            self._entries.end(known, "ttl_expired")
        blocks = self._tier.acquire_keys(keys)
        if blocks is None:
            return
        entry.blocks = blocks
        self._entries.take_in(entry)
        for index, names in put.names.items():
            if 0 <= index < len(keys) and not any(
                pool.find(keys[index].digest, keys[index].packed) for pool in self._above
            ):
                blocks[index].names.update({name.digest: name.tokens for name in names})
                self._tier.tell(blocks[index].names)
        self._tier.pool.release_chain(blocks)

    def _is_only_theirs(self, entry: Entry) -> bool:
        """Whether only another member has the entry, and no request is reading it."""
        is_theirs = any(block.home is self._tier.pool for block in entry.blocks)
        return is_theirs and not entry.is_leased and not entry.refreshed_until
