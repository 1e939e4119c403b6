"""The store tier: whole copies of entries on disk, and what may be read back from there.

A third pool of blocks with the rules of the others. A block here is a file: it is findable once the
file is written, and its file is deleted when the block is reused. This module only decides. It
hands out the files to write (`take_saves`), to read (`reads`) and to delete (`take_deletes`),
and what the journal must say (`take_notes`). It is told what became of them.

Files are named by content, so a payload that was read for a name can only be that name's content.
Whether a file is whole and has these tokens is found out by who reads it; one that is not is a
miss: its block is forgotten, and what stood on it ends.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal

from engine.cache.block import Block, Entry
from engine.cache.digests import TOKEN_BYTES, ChainHasher
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool, NoFreeBlocks
from engine.cache.store_files import BlockKey, Load, NameOf, Note, PendingFile, Save, SaveJob
from engine.cache.store_holds import StoreHolds
from engine.cache.store_map import FileMap
from engine.cache.store_reads import StoreReads
from engine.cache.table import BlockTable

HELD_SHARE = 0.9
"""The part of the store that entries may hold. The rest is left for content without one."""
MAX_LOOKED_AT = 1024
"""Blocks that one step looks at to find out what is to be written."""


class StoreTier:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hasher: ChainHasher,
        name_of: NameOf,
        *,
        lower_than: Iterable[BlockPool] = (),
    ) -> None:
        """`name_of` gives the file's name for a chain digest. `lower_than`: the pools above."""
        self.pool = BlockPool(num_blocks, block_size, tier="disk")
        self.pool.forgotten = self._note_forgotten
        self.holds = StoreHolds(self.pool, int(num_blocks * HELD_SHARE))
        self._hasher = hasher
        self._name_of = name_of
        self._jobs: OrderedDict[Entry, SaveJob] = OrderedDict()
        self._pending: dict[str, PendingFile] = {}
        self.files = FileMap()
        self.reads = StoreReads(self.files.find_key)
        self._deletes: list[str] = []
        self._notes: OrderedDict[Digest, Note] = OrderedDict()
        self._num_looked_at = 0
        self.num_saved = 0
        self.num_loaded = 0
        self.num_unsaved = 0
        self.num_displaced = 0
        self.on_displaced: Callable[[Entry], None] = _nothing
        self.on_held: Callable[[Entry], None] = _nothing
        for pool in lower_than:
            self._attach(pool)

    def _attach(self, pool: BlockPool) -> None:
        """Take over what this pool reuses and no other tier takes, as far as the store has it."""
        first = pool.demote
        self.pool.changes = pool.changes

        def demote(block: Block) -> bool:
            return (first is not None and first(block)) or self._take_over(block)

        pool.demote = demote

    # Writing.

    @property
    def num_used(self) -> int:
        """Blocks with a file."""
        return len(self.files)

    @property
    def num_wanted(self) -> int:
        """Entries that wait for their copies."""
        return len(self._jobs)

    def want(self, entry: Entry) -> None:
        """Keep a copy of this entry, as soon as there is time."""
        if entry.stored is None and entry not in self._jobs:
            self._jobs[entry] = SaveJob(entry, self._hasher.root(entry.scope))

    def take_saves(self, max_blocks: int) -> list[Save]:
        """The files to write now, at most so many.

        The device's blocks must hold what their `tokens` say, as they do between two steps.
        """
        saves: list[Save] = []
        self._num_looked_at = 0
        for job in list(self._jobs.values()):
            if self._jobs.get(job.entry) is job and not self._advance(job, saves, max_blocks):
                break
        return saves

    def written(self, name: str, *, is_good: bool) -> None:
        """A file was written, or could not be."""
        if (pending := self._pending.pop(name, None)) is None:
            return
        block = pending.block
        if is_good and self.files.name_of(block) == name:
            self.num_saved += 1
            self.files.prove(block)
            if len(block.tokens) == self.pool.block_size * TOKEN_BYTES:
                self.pool.index(block, pending.digest)
        for job in pending.jobs:
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

    def promote(self, table: BlockTable) -> Load | None:
        """The first block that this table waits for, if its content is here. None if it is not."""
        block = table.next_incoming
        if (payload := self.reads.take(block)) is None:
            return None
        self.num_loaded += 1
        self.files.prove(block)
        return Load(payload, table.arrive().destination)

    def is_lost(self, block: Block) -> bool:
        """Whether a block that a table waits for has no file any more."""
        return block not in self.files

    # What the entries say.

    def copy_of(self, entry: Entry) -> list[Block]:
        """The blocks of an entry's copy, as far as there is one."""
        job = self._jobs.get(entry)
        return list(entry.stored or (job.blocks if job else ()))

    def note(self, entry: Entry) -> None:
        """An entry's times, lease or names have changed."""
        self.holds.changed(entry)
        if entry.stored is not None and entry.key not in self._notes:
            self._notes[entry.key] = Note(entry, entry.key, "touch")

    def end(self, entry: Entry) -> list[str]:
        """An entry has ended. Return the names that the store no longer keeps for anybody."""
        if (job := self._jobs.get(entry)) is not None:
            self._drop_job(job)
        if entry.stored is None:
            return []
        self._say(entry, "end")
        return self.holds.end(entry)

    def forget(self, block: Block) -> None:
        """Delete a block's file. No entry may hold the block."""
        assert not self.holds.of(block), "an entry holds the block"
        self.pool.forget(block)
        self._note_forgotten(block)

    def drop_scope(self, owner: Digest) -> None:
        """Delete every file of a scope. Its entries have ended."""
        for block in self.files.blocks:
            if block.owner == owner:
                self.forget(block)

    def drop_entry(self, blocks: Iterable[Block]) -> None:
        """Delete the files of a dropped entry's copy that no other entry holds."""
        for block in reversed(list(blocks)):
            if block in self.files and not self.holds.of(block):
                self.forget(block)

    # What there is at the start.

    def install(self, key: BlockKey) -> Block | None:
        """A file that was found in the directory. None where there is no room for it."""
        if (found := self.files.block_of(key.name)) is not None:
            return found
        if self.pool.counts().free == 0:
            return None
        block = self._new_block(key)
        self.pool.release(block)
        return block

    def restore(self, entry: Entry, keys: Iterable[BlockKey]) -> bool:
        """Hold an entry of an earlier epoch. False if there is no room."""
        blocks: list[Block] = []
        for key in keys:
            if (block := self.files.block_of(key.name)) is not None:
                self.pool.acquire(block)
            elif self.pool.counts().free:
                block = self._new_block(key)
            else:
                break
            blocks.append(block)
        else:
            if self.holds.room_for(entry.scope, self.pool.num_unleased(blocks)) == []:
                self.holds.add(entry, list(blocks))
        self.pool.release_chain(blocks)
        return entry.stored is not None

    # What is to be done outside.

    def take_deletes(self) -> list[str]:
        self._deletes, deletes = [], self._deletes
        return deletes

    def take_notes(self) -> list[Note]:
        notes, self._notes = list(self._notes.values()), OrderedDict()
        return notes

    # Inside.

    def _advance(self, job: SaveJob, saves: list[Save], max_blocks: int) -> bool:
        """Go on with an entry's blocks. False where the step's bound is reached."""
        entry, size = job.entry, self.pool.block_size
        while len(job.blocks) < len(entry.blocks):
            index = len(job.blocks)
            self._num_looked_at += 1
            if self._num_looked_at > MAX_LOOKED_AT:
                return False
            count = min(entry.tokens - index * size, size)
            source = entry.blocks[index]
            packed = bytes(source.tokens[: count * TOKEN_BYTES])
            if entry.is_broken or len(packed) != count * TOKEN_BYTES:
                self._give_up(job)
                return True
            digest = self._hasher.extend(job.parent, packed)
            if not self._has(job, digest, packed, source):
                if source.tier != "device":
                    self._give_up(job)
                    return True
                if len(saves) >= max_blocks:
                    return False
                root = self._hasher.root(entry.scope)
                key = job.next_key(self._name_of(digest), root, digest, packed)
                if not self._begin(job, key):
                    self._give_up(job)
                    return True
                saves.append(Save(key, source.block_id))
            job.parent = digest
        self._finish_if_whole(job)
        return True

    def _has(self, job: SaveJob, digest: Digest, packed: bytes, source: Block) -> bool:
        """Take a block into the job that is in the store, or on its way there."""
        name = self._name_of(digest)
        block, pending = self.files.block_of(name), self._pending.get(name)
        if block is None or self.files.key_of(block).packed != packed:
            return False
        if pending is None and source.tier == "device" and self._is_doubtful(block):
            return False
        if pending is not None:
            job.num_pending += 1
            pending.jobs.append(job)
        self.pool.acquire(block)
        job.blocks.append(block)
        return True

    def _begin(self, job: SaveJob, key: BlockKey) -> bool:
        """Make a block for a file that is written from now on."""
        there = self.files.block_of(key.name)
        if key.name in self._pending or (there is not None and not self._is_doubtful(there)):
            return False  # it was dropped while it was written
        if there is not None:
            self.pool.acquire(there)
            self._write(job, there, key)
            return True
        doomed = self.holds.room_for(job.entry.scope, len(job.blocks) + 1)
        if doomed is None:
            return False
        for entry in doomed:
            self._displace(entry)
        try:
            block = self.pool.allocate(key.place, key.owner)
        except NoFreeBlocks:
            return False
        self.pool.append(block, key.packed)
        self.files.add(block, key)
        self._write(job, block, key)
        return True

    def _is_doubtful(self, block: Block) -> bool:
        """Whether only the header of a file of an earlier epoch was looked at.

        A new copy must not stand on it. It is written again while its content is on the device.
        """
        return not self.files.is_proven(block) and not self.holds.of(block)

    def _write(self, job: SaveJob, block: Block, key: BlockKey) -> None:
        """Have a block's file written for a job. The block has a reference for the file."""
        self.pool.acquire(block)
        self._pending[key.name] = PendingFile(block, key.digest, [job])
        job.blocks.append(block)
        job.num_pending += 1

    def _new_block(self, key: BlockKey) -> Block:
        """A block with one reference, for a file that is there."""
        block = self.pool.allocate(key.place, key.owner)
        self.pool.append(block, key.packed)
        self.files.add(block, key)
        if len(key.packed) == self.pool.block_size * TOKEN_BYTES:
            self.pool.index(block, key.digest)
        return block

    def _finish_if_whole(self, job: SaveJob) -> None:
        entry = job.entry
        if job.num_pending or len(job.blocks) < len(entry.blocks):
            return
        if any(self.is_lost(block) for block in job.blocks):  # damaged on the way: start again
            self._drop_job(job)
            self.want(entry)
            return
        doomed = self.holds.room_for(entry.scope, self.pool.num_unleased(job.blocks))
        for other in doomed or ():
            self._displace(other)
        if doomed is None or entry.is_broken:
            self._give_up(job)
            return
        self.holds.add(entry, list(job.blocks))
        self._drop_job(job)
        self.on_held(entry)
        self._say(entry, "put")

    def _give_up(self, job: SaveJob) -> None:
        self.num_unsaved += 1
        self._drop_job(job)

    def _drop_job(self, job: SaveJob) -> None:
        del self._jobs[job.entry]
        self.pool.release_chain(job.blocks)

    def _displace(self, entry: Entry) -> None:
        """An entry's hold makes way for another scope's."""
        self.num_displaced += 1
        self.on_displaced(entry)
        if entry.stored is not None:
            self._say(entry, "end")
            self.holds.end(entry)

    def _say(self, entry: Entry, kind: Literal["put", "end"]) -> None:
        self._notes.pop(entry.key, None)
        self._notes[entry.key] = Note(entry, entry.key, kind)

    def _take_over(self, block: Block) -> bool:
        """Keep what a pool above reuses. False where something of it is lost."""
        for entry in list(block.dependents):
            if entry.stored is not None:
                mine = entry.stored[block.index]
                entry.blocks[block.index] = mine
                mine.dependents.add(entry)
                block.dependents.discard(entry)
        found = self.pool.find(block.digest, bytes(block.tokens)) if block.digest else None
        if found is not None and block.names:
            found.names.update(block.names)
            self.pool.changes.moved("disk", block.names)
            block.names.clear()
        return not block.dependents and not block.names

    def _note_forgotten(self, block: Block) -> None:
        name = self.files.remove(block)
        if name is not None:
            self.reads.forget(name)
            self._deletes.append(name)

    def check(self) -> None:
        """Prove all invariants of the tier itself; raises AssertionError."""
        self.pool.check()
        self.holds.check(self.pool.blocks)
        self.files.check()
        for block in self.pool.blocks:
            assert block.digest is None or block in self.files, "content without a file"
        for entry in self.holds.entries():
            assert all(block in self.files for block in entry.stored or ())


def _nothing(entry: Entry) -> None:
    """Nobody is told of an entry's hold."""
