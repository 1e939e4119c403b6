"""The store tier: whole copies of entries on disk, and what may be read back from there.

A third pool of blocks with the rules of the others. A block here is a file: it is findable once the
file is written, and its file is deleted when the block is reused. This module only decides. It
hands out the files to write (`take_saves`), to read (`take_asked`) and to delete (`take_deletes`),
and what the journal must say (`take_notes`). It is told what became of them.

A file's name stands for its content. The reader of a file checks that it is whole and has the
right tokens. If the check fails, that is a miss: the block is forgotten, and entries that stood on
it end.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple

from engine.cache.block import Block, Entry
from engine.cache.digests import TOKEN_BYTES, ChainHasher
from engine.cache.ids import BlockId, Digest
from engine.cache.pool import BlockPool, NoFreeBlocks
from engine.cache.store_copies import StoreCopies
from engine.cache.table import BlockTable

COPIES_SHARE = 0.9
"""The part of the store for entries' whole copies. The rest is left for other content."""
MAX_LOOKED_AT = 1024
"""Blocks that one step looks at to find out what is to be written."""
MAX_READING = 64
"""Blocks that may be read or wait to be copied at one time."""

Payload = bytes | memoryview
"""A block's content, in bytes."""


class BlockKey(NamedTuple):
    """The content that a file must have."""

    # The file's name.
    name: str
    # The digest of the scope's empty prefix.
    owner: Digest
    digest: Digest
    parent: Digest
    # The block's index in its chain.
    place: int
    # The block's token ids.
    packed: bytes
    # The key by which another model wrote the file. To this engine such content has a kind of its
    # own. None: this model wrote the file.
    file: "BlockKey | None" = None


class Save(NamedTuple):
    """A file to write, with the content of a device block."""

    key: BlockKey
    source: BlockId


class Load(NamedTuple):
    """A payload that was read, and the device block that it is copied to."""

    payload: bytes
    target: BlockId


class Note(NamedTuple):
    """A line for the journal: a whole entry (`put`), its times and lease (`touch`), or its end."""

    entry: Entry
    kind: Literal["put", "touch", "end"]


@dataclass(slots=True, eq=False)
class SaveJob:
    """An entry on its way to the store."""

    entry: Entry
    # The digest of the chain up to the next block.
    parent: Digest
    # The blocks so far, each with a reference.
    blocks: list[Block] = field(default_factory=list)
    # How many of them were in no copy when they were added.
    num_new: int = 0
    # How many of their files are still being written.
    num_pending: int = 0

    def add(self, block: Block) -> None:
        self.num_new += block.lease_count == 0
        self.blocks.append(block)


class StoreTier:
    """What this engine keeps in the store, or what other members of a shared store have.

    Only the member that owns a file writes and deletes it. Its content can't be leased here, since
    this engine can't keep it: an entry is best-effort until a read has brought it to the device. A
    file that is gone is a miss.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hasher: ChainHasher,
        name_of: Callable[[Digest], str],
        *,
        lower_than: Iterable[BlockPool] = (),
    ) -> None:
        """`name_of` gives the file's name for a chain digest. `lower_than`: the pools above."""
        self.pool = BlockPool(num_blocks, block_size, tier="disk")
        self.pool.on_forgotten = self._note_forgotten
        self.copies = StoreCopies(self.pool, int(num_blocks * COPIES_SHARE))
        self._hasher = hasher
        self._name_of = name_of
        # Entries that wait for their copies.
        self._jobs: OrderedDict[Entry, SaveJob] = OrderedDict()
        # Files that are being written, by name: the block, with a reference for the file, and the
        # jobs that wait for it.
        self._pending: dict[str, tuple[Block, list[SaveJob]]] = {}
        # The keys of the blocks that have a file.
        self._keys: dict[Block, BlockKey] = {}
        # The same blocks by their files' names.
        self._blocks: dict[str, Block] = {}
        # The blocks whose files this process wrote, or read whole. It read only the headers of the
        # others.
        self._proven: set[Block] = set()
        # The names of files that are to be read or are being read.
        self._reading: set[str] = set()
        # Payloads that wait to be copied to the device, by the files' names.
        self._loaded: dict[str, bytes] = {}
        # What `take_asked`, `take_deletes` and `take_notes` hand out next.
        self._asked: list[BlockKey] = []
        self._deletes: list[str] = []
        self._notes: OrderedDict[Digest, Note] = OrderedDict()
        self._num_looked_at = 0
        # Files that were written.
        self.num_saved = 0
        # Blocks that were read back.
        self.num_loaded = 0
        # Copies that were given up before they were whole.
        self.num_unsaved = 0
        # Copies that made way for others.
        self.num_displaced = 0
        # Called with an entry whose whole copy is in the store now.
        self.on_copied: Callable[[Entry], None] = lambda _entry: None
        # Called with an entry whose copy makes way.
        self.on_displaced: Callable[[Entry], None] = lambda _entry: None
        for pool in lower_than:
            # Before the pool reuses a block, the tier that it asked so far may take the content. If
            # that tier does not take it, this tier does, provided that it has the file.
            self.pool.changes = pool.changes
            pool.demote = partial(self._take_over, pool.demote)

    # Files.

    @property
    def num_used(self) -> int:
        """Blocks with a file."""
        return len(self._keys)

    @property
    def names(self) -> frozenset[str]:
        """The names of all files."""
        return frozenset(self._blocks)

    def block_of(self, name: str) -> Block | None:
        """The block whose file has this name."""
        return self._blocks.get(name)

    def key_of(self, block: Block) -> BlockKey:
        """The content that the block's file must have. Raises KeyError if the block has no file."""
        return self._keys[block]

    def is_lost(self, block: Block) -> bool:
        """Whether a block that a table waits for has no file any more."""
        return block not in self._keys

    def forget(self, block: Block) -> None:
        """Delete a block's file. No entry's copy may have the block."""
        assert not self.copies.of(block), "an entry's copy has the block"
        self.pool.forget(block)
        self._note_forgotten(block)

    def drop_scope(self, owner: Digest | None) -> None:
        """Delete every file of a scope, or with None of all. Its entries have ended."""
        for block in list(self._keys):
            if owner in (None, block.owner):
                self.forget(block)

    def drop_entry(self, blocks: Iterable[Block]) -> None:
        """Delete the files of a dropped entry's copy that no other copy has."""
        for block in reversed(list(blocks)):
            if block in self._keys and not self.copies.of(block):
                self.forget(block)

    def take_deletes(self) -> list[str]:
        deletes = self._deletes
        self._deletes = []
        return deletes

    def _new_block(self, key: BlockKey, *, is_written: bool = True) -> Block:
        """A block with one reference, for a file that is there or will be written."""
        block = self.pool.allocate(key.place, key.owner)
        self.pool.append(block, key.packed)
        self._keys[block] = key
        self._blocks[key.name] = block
        if is_written:
            self._index(block)
        return block

    def _index(self, block: Block) -> None:
        if len(block.tokens) == self.pool.block_size * TOKEN_BYTES:
            self.pool.index(block, self._keys[block].digest)

    def _note_forgotten(self, block: Block) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key.name]
            self._proven.discard(block)
            self.forget_read(key.name)
            self._deletes.append(key.name)

    # Reading. A payload is kept by its file's name, which stands for its content.

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    def ask(self, blocks: Iterable[Block], *, is_first: bool) -> None:
        """Ask for what a table waits for, in order. The first table that waits finds room."""
        keys = [self._keys.get(block) for block in islice(blocks, MAX_READING)]
        if is_first:
            wanted = {key.name for key in keys if key is not None}
            self._loaded = {
                name: payload for name, payload in self._loaded.items() if name in wanted
            }
        for key in keys:
            if len(self._loaded) + len(self._reading) >= MAX_READING:
                return
            if key is not None and key.name not in self._reading and key.name not in self._loaded:
                self._reading.add(key.name)
                self._asked.append(key)

    def take_asked(self) -> list[BlockKey]:
        """The files to read now."""
        keys = self._asked
        self._asked = []
        return keys

    def arrived(self, name: str, payload: bytes) -> None:
        """A file was read, and is what its key says."""
        if name in self._reading:
            self._reading.discard(name)
            self._loaded[name] = payload

    def forget_read(self, name: str) -> None:
        """Nothing of this name is wanted any more."""
        self._reading.discard(name)
        self._loaded.pop(name, None)

    def promote(self, table: BlockTable) -> Load | None:
        """The first block that this table waits for, if its content is here. None if it is not."""
        block = table.next_incoming
        key = self._keys.get(block)
        payload = None if key is None else self._loaded.pop(key.name, None)
        if payload is None:
            return None
        self.num_loaded += 1
        self._proven.add(block)
        return Load(payload, table.arrive().destination)

    # What the entries say.

    @property
    def num_wanted(self) -> int:
        """Entries that wait for their copies."""
        return len(self._jobs)

    def want(self, entry: Entry) -> None:
        """Keep a copy of this entry, as soon as there is time."""
        if entry.stored is None and entry not in self._jobs:
            self._jobs[entry] = SaveJob(entry, self._hasher.root(entry.scope))

    def copy_of(self, entry: Entry) -> list[Block]:
        """The blocks of an entry's copy, as far as there is one."""
        job = self._jobs.get(entry)
        return list(entry.stored or (job.blocks if job else ()))

    def note(self, entry: Entry) -> None:
        """An entry's times, lease or names have changed."""
        self.copies.changed(entry)
        if entry.stored is not None and entry.key not in self._notes:
            self._notes[entry.key] = Note(entry, "touch")

    def end(self, entry: Entry) -> None:
        """An entry has ended. Its copy's content stays as long as there is room."""
        job = self._jobs.get(entry)
        if job is not None:
            self._drop_job(job)
        if entry.stored is not None:
            self._say(entry, "end")
            self.copies.end(entry)

    def restore(self, entry: Entry, keys: Sequence[BlockKey]) -> bool:
        """Keep the copy of an entry of an earlier epoch. False if there is no room."""
        blocks = self.acquire_keys(keys) if self.has_room(keys) else None
        if blocks is None:
            return False
        if self.copies.room_for(entry.scope, self.pool.num_unleased(blocks)) == []:
            self.copies.add(entry, blocks)
        self.pool.release_chain(blocks)
        return entry.stored is not None

    def has_room(self, keys: Sequence[BlockKey]) -> bool:
        """Whether these files fit without another file making way here."""
        return sum(key.name not in self._blocks for key in keys) <= self.pool.num_empty

    def acquire_keys(self, keys: Sequence[BlockKey]) -> list[Block] | None:
        """Blocks for these files, each with a reference. None where there is no room."""
        blocks: list[Block] = []
        for key in keys:
            block = self._blocks.get(key.name)
            if block is not None:
                self.pool.acquire(block)
            else:
                try:
                    block = self._new_block(key)
                except NoFreeBlocks:
                    self.pool.release_chain(blocks)
                    return None
            blocks.append(block)
        return blocks

    def take_notes(self) -> list[Note]:
        notes = list(self._notes.values())
        self._notes = OrderedDict()
        return notes

    def _say(self, entry: Entry, kind: Literal["put", "end"]) -> None:
        self._notes.pop(entry.key, None)
        self._notes[entry.key] = Note(entry, kind)

    # Writing.

    def take_saves(self, max_blocks: int) -> list[Save]:
        """The files to write now, `max_blocks` at most.

        The device's memory must have the content that the blocks' `tokens` say. It has that content
        between two steps.
        """
        saves: list[Save] = []
        self._num_looked_at = 0
        for job in list(self._jobs.values()):
            if self._jobs.get(job.entry) is job and not self._advance(job, saves, max_blocks):
                break
        return saves

    def written(self, name: str, *, is_good: bool) -> None:
        """A file was written, or could not be."""
        pending = self._pending.pop(name, None)
        if pending is None:
            return
        block, jobs = pending
        if is_good and self._blocks.get(name) is block:
            self.num_saved += 1
            self._proven.add(block)
            self._index(block)
        for job in jobs:
            job.num_pending -= 1
            if self._jobs.get(job.entry) is not job:
                continue
            if is_good:
                self._finish_if_whole(job)
            else:
                self._give_up(job)
        self.pool.release(block)

    def give_up_all(self) -> None:
        """The store can't be written: no entry waits for it any more."""
        for job in list(self._jobs.values()):
            self._give_up(job)

    def _advance(self, job: SaveJob, saves: list[Save], max_blocks: int) -> bool:
        """Go on with an entry's blocks. False where the step's bound is reached."""
        entry = job.entry
        size = self.pool.block_size
        while (index := len(job.blocks)) < len(entry.blocks):
            self._num_looked_at += 1
            if self._num_looked_at > MAX_LOOKED_AT:
                return False
            source = entry.blocks[index]
            left = entry.tokens - index * size  # none in a block of a recurrent state
            num_bytes = (min(left, size) if left > 0 else size) * TOKEN_BYTES
            packed = bytes(source.tokens[:num_bytes])
            if entry.is_broken or len(packed) != num_bytes:
                return self._give_up(job)
            digest = self._hasher.extend(job.parent, packed, index, entry.kind)
            root = self._hasher.root(entry.scope)
            key = BlockKey(self._name_of(digest), root, digest, job.parent, index, packed)
            if not self._has(job, key, source):
                if source.tier != "device":
                    return self._give_up(job)
                if len(saves) >= max_blocks:
                    return False
                if not self._begin(job, key):
                    return self._give_up(job)
                saves.append(Save(key, source.block_id))
            job.parent = digest
        self._finish_if_whole(job)
        return True

    def _has(self, job: SaveJob, key: BlockKey, source: Block) -> bool:
        """Add a block to the job if its file is in the store, or is being written.

        Return whether it was added.
        """
        block = self._blocks.get(key.name)
        pending = self._pending.get(key.name)
        if block is None or self._keys[block].packed != key.packed:
            return False
        if pending is None and source.tier == "device" and self._is_doubtful(block):
            return False
        if pending is not None:
            job.num_pending += 1
            pending[1].append(job)
        self.pool.acquire(block)
        job.add(block)
        return True

    def _begin(self, job: SaveJob, key: BlockKey) -> bool:
        """Have a file written for a job. False where there is no room."""
        block = self._blocks.get(key.name)
        if key.name in self._pending or (block is not None and not self._is_doubtful(block)):
            return False  # the file was dropped while it was being written
        if block is not None:
            self.pool.acquire(block)
        else:
            if not self._make_room(job.entry.scope, job.num_new + 1):
                return False
            try:
                block = self._new_block(key, is_written=False)
            except NoFreeBlocks:
                return False
        self.pool.acquire(block)  # for the file
        self._pending[key.name] = block, [job]
        job.add(block)
        job.num_pending += 1
        return True

    def _is_doubtful(self, block: Block) -> bool:
        """Whether the block's file is of an earlier epoch, and only its header was read.

        A new copy must not stand on such a file. The file is written again while its content is on
        the device.
        """
        return block not in self._proven and not self.copies.of(block)

    def _finish_if_whole(self, job: SaveJob) -> None:
        entry = job.entry
        if job.num_pending or len(job.blocks) < len(entry.blocks):
            return
        if any(self.is_lost(block) for block in job.blocks):
            # A file was found damaged meanwhile: start again.
            self._drop_job(job)
            self.want(entry)
            return
        has_room = self._make_room(entry.scope, self.pool.num_unleased(job.blocks))
        if not has_room or entry.is_broken:
            self._give_up(job)
            return
        self.copies.add(entry, list(job.blocks))
        self._drop_job(job)
        self.on_copied(entry)
        self._say(entry, "put")

    def _make_room(self, scope: str, num_new: int) -> bool:
        """Other copies make way for a scope's new one, if that is enough."""
        doomed = self.copies.room_for(scope, num_new)
        for entry in doomed or ():
            self.num_displaced += 1
            self.on_displaced(entry)
            if entry.stored is not None:
                self._say(entry, "end")
                self.copies.end(entry)
        return doomed is not None

    def _give_up(self, job: SaveJob) -> bool:
        self.num_unsaved += 1
        self._drop_job(job)
        return True

    def _drop_job(self, job: SaveJob) -> None:
        del self._jobs[job.entry]
        self.pool.release_chain(job.blocks)

    # What pools above reuse.

    def tell(self, names: Mapping[str, int]) -> None:
        """These names can be read from here now."""
        self.pool.changes.moved("disk", names)

    def _take_over(self, first: Callable[[Block], bool] | None, block: Block) -> bool:
        """Keep the content of a block that a pool above reuses, unless the `first` tier takes it.

        Return False if some of it is lost.
        """
        if first is not None and first(block):
            return True
        for entry in list(block.dependents):
            if entry.stored is not None:
                stored_block = entry.stored[block.index]
                entry.blocks[block.index] = stored_block
                stored_block.dependents.add(entry)
                block.dependents.discard(entry)
        canonical = self.pool.find(block.digest, block.tokens)
        if canonical is not None and block.names:
            canonical.names.update(block.names)
            self.tell(block.names)
            block.names.clear()
        return not block.dependents and not block.names
