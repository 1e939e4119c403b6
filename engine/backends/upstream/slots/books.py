"""The books of leases in slot files: an entry is leased while its own whole file is there.

Two slot files share nothing. So each entry has blocks of its own, in a pool that stands for the
disk. A block is a fixed number of bytes, and the budget of leases counts blocks. The rules by which
leases make way are those of `engine.cache.leases`.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from engine.backends.external import MirrorPool
from engine.backends.upstream.books import UnheldEntries, UpstreamCache
from engine.cache.block import Block, Entry, Recorded
from engine.cache.digests import TOKEN_BYTES, ChainHasher, PromptDigests
from engine.cache.entries import ARRIVAL_GRACE_SECONDS
from engine.cache.ids import Digest
from engine.cache.lookup import Mark, longest_hit
from engine.cache.pool import NoFreeBlocks
from engine.cache.prefix_cache import CacheQuery, CacheResult, Lookup
from engine.cache.table import BlockTable
from engine.protocol import BestEffortReason, MissReason
from engine.protocol.reports import LeaseEnd
from engine.sizing import blocks_for
from engine.store.journal import End, Put, Record, SavedFile, Times, Touch

MAX_BLOCKS = 262_144
"""The most blocks of the pool. Each takes some 600 bytes of the engine's memory."""
SPARE_CONTEXTS = 4
"""Contexts beyond the budget, for entries that nothing holds and requests on their way."""


@dataclass(frozen=True, slots=True)
class FileSizes:
    """The size of a slot file in bytes, as measured at the start."""

    # The bytes of a file without a token.
    fixed: int
    # The bytes of each token.
    token_bytes: float

    def of(self, num_tokens: int) -> int:
        return self.fixed + int(num_tokens * self.token_bytes) + 1


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """The pool that stands for the disk."""

    block_size: int
    block_bytes: int
    # The blocks that leases may have.
    budget: int
    num_blocks: int

    @classmethod
    def of(cls, sizes: FileSizes, max_bytes: int, block_size: int, context: int) -> "DiskPlan":
        """`max_bytes` is the limit for all files together. `context` is in tokens."""
        least = max(int(sizes.token_bytes * block_size), 1)
        block_bytes = max(least, blocks_for(max_bytes, MAX_BLOCKS))
        budget = max_bytes // block_bytes
        spare = SPARE_CONTEXTS * blocks_for(context, block_size)
        return cls(block_size, block_bytes, budget, budget + spare)

    def blocks_of(self, num_tokens: int, num_bytes: int) -> int:
        """The number of blocks of an entry. They have room for its file and for all its tokens."""
        return max(blocks_for(num_tokens, self.block_size), blocks_for(num_bytes, self.block_bytes))


class Freed(NamedTuple):
    """A file that nothing stands on any more."""

    file: SavedFile
    entry: Entry | None
    # Whether the entry has ended too. Then no slot may serve it.
    is_over: bool


class FileEntries(UnheldEntries):
    """Entries that are leased as long as they have a file."""

    def __init__(self, pool: MirrorPool, plan: DiskPlan) -> None:
        super().__init__(
            pool,
            lease_share=plan.budget / plan.num_blocks,
            grace_seconds=ARRIVAL_GRACE_SECONDS,
        )
        self.leases.max_blocks = plan.budget
        self.leases.scope_blocks = plan.budget // 2
        self.files: dict[Entry, SavedFile] = {}
        # The files of the request that is being admitted, by the keys of their entries.
        self.arriving: dict[Digest, SavedFile] = {}
        # Why other marks of that request have no file.
        self.refused: Mapping[Digest, BestEffortReason] = {}
        self._changed: dict[Entry, None] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of the files of all entries."""
        return sum(file.num_bytes for entry, file in self.files.items() if self._is_in(entry))

    def adopt(self) -> None:
        """Lease existing entries whose files have arrived."""
        for key in list(self.arriving):
            entry = self.get(key)
            if entry is not None and self.is_live(entry) and entry.is_asked_for:
                self._try_lease(entry)

    def restore_file(self, entry: Entry, file: SavedFile, blocks: list[Block]) -> bool:
        """Take in an entry of an earlier epoch. False where there is no room for its lease."""
        entry.is_leased = False
        entry.blocks = blocks
        if self.get(entry.key) is not None or not self.leases.take(entry, may_end=False):
            return False
        self.files[entry] = file
        entry.recorded = Recorded(None, is_leased=True)
        self.take_in(entry)
        return True

    def damaged_file(self, entry: Entry) -> None:
        """End an entry whose file is damaged, or gave less than the entry's tokens."""
        if self.get(entry.key) is entry:
            self.end(entry, "damaged", "damaged")
            entry.is_broken = True

    def make_way(self, num_bytes: int, max_bytes: int) -> None:
        """End lapsed entries, which are kept for earlier turns, until a new file has room."""
        lapsed = [entry for entry in self.files if entry.is_lapsed and self._is_in(entry)]
        total = self.num_bytes + num_bytes
        for entry in sorted(lapsed, key=lambda entry: entry.expires_at):
            if total <= max_bytes:
                return
            total -= self.files[entry].num_bytes
            self.end(entry, "ttl_expired")

    def take_changes(self, now: float, wall: float) -> tuple[list[Record], list[Freed]]:
        """The manifest's records since the last call, and the files that are deleted now."""
        records = list[Record]()
        freed = list[Freed]()
        changed = self._changed
        self._changed = {}
        for entry in changed:
            file = self.files.get(entry)
            if file is None:
                continue
            is_in = self._is_in(entry)
            if not is_in or not (entry.is_leased or entry.is_lapsed):
                del self.files[entry]
                freed.append(Freed(file, entry, is_over=not is_in))
                records.append(End(key=entry.key.hex()))
                continue
            times = Times.of(entry, now, wall)
            if entry.recorded is not None:
                records.append(Touch(key=entry.key.hex(), times=times))
                continue
            entry.recorded = Recorded(None, entry.is_leased)
            packed = b"".join(bytes(block.tokens) for block in entry.blocks)
            put = Put.of(entry, times, packed, {})
            records.append(msgspec.structs.replace(put, slot_file=file))
        for file in self.arriving.values():
            freed.append(Freed(file, None, is_over=False))
        self.arriving = {}
        return records, freed

    def end(self, entry: Entry, miss_reason: MissReason, lease_end: LeaseEnd | None = None) -> None:
        super().end(entry, miss_reason, lease_end)
        self._changed[entry] = None

    def bring_back(self, entry: Entry, blocks: Sequence[Block]) -> None:
        """Do nothing: a read leaves the entry in its file."""

    def _try_lease(self, entry: Entry) -> bool:
        if not entry.is_asked_for:
            entry.why_unleased = "automatic"
            return False
        file = self.files.get(entry) or self.arriving.get(entry.key)
        if file is None:
            known = None if entry.why_unleased == "automatic" else entry.why_unleased
            entry.why_unleased = self.refused.get(entry.key) or known or "no_hold"
            return False
        if not self.leases.take(entry):
            entry.why_unleased = "over_budget"
            return False
        self._undepend(entry)
        self.files[entry] = file
        self.arriving.pop(entry.key, None)
        self._changed[entry] = None
        return True

    def _note(self, entry: Entry) -> None:
        self._changed[entry] = None


@dataclass(frozen=True, slots=True)
class Saved:
    """The files that were saved for a request's marks before its answer."""

    # The files by the keys of their entries.
    files: Mapping[Digest, SavedFile]
    # Why other marks have no file.
    refused: Mapping[Digest, BestEffortReason]
    # Whether the hit was restored from its file.
    is_restored: bool


class SlotCache(UpstreamCache):
    """Reads only whole entries: from their files, or from a slot that still has their tokens.

    `admit` and `write` are called one after the other, with what was saved in between.
    """

    pool: MirrorPool
    entries: FileEntries
    has_exact_ends = True

    def __init__(
        self, pool: MirrorPool, entries: FileEntries, hasher: ChainHasher, plan: DiskPlan
    ) -> None:
        super().__init__(pool, entries, hasher, is_isolated=True)
        self._plan = plan
        self._new_blocks: dict[Digest, list[Block]] = {}
        self._is_restored = False

    @property
    def names_at_entries(self) -> bool:
        return True

    # Before an answer.

    def file_of(self, entry: Entry | None) -> SavedFile | None:
        """The file of an entry that has not ended."""
        if entry is None or self.entries.get(entry.key) is not entry:
            return None
        return self.entries.files.get(entry)

    def held(self, query: CacheQuery, now: float) -> Entry | None:
        """The longest entry with a file that the prompt begins with, of those at its marks."""
        ends = [query.segments[point.segment].end or 0 for point in query.breakpoints]
        for end in sorted(ends, reverse=True):
            entry = self.entries.find(query.digests, end, now) if end else None
            if self.file_of(entry) is not None:
                return entry
        return None

    def next_hit(self, query: CacheQuery, lookup: Lookup) -> Entry | None:
        """End the hit. The longest other entry becomes the hit.

        The file of the ended hit is damaged, or it has no file and no slot has its tokens.
        """
        lost = lookup.hit
        assert lost is not None
        self.let_go(lookup)
        if self.file_of(lost) is None:
            self.entries.lose(lost)
        else:
            self.entries.damaged_file(lost)
        now = query.arrived_at
        hit = self._longest(query, lookup, lambda end: self.entries.find(query.digests, end, now))
        lookup.hit = hit
        lookup.read = 0 if hit is None else min(hit.tokens, len(query.tokens) - 1)
        self.explain(query, lookup)
        return hit

    def most_held(self, query: CacheQuery, lookup: Lookup) -> int:
        """The tokens of the longest entry with a file that the request may read; 0: none."""

        def held(end: int) -> Entry | None:
            entry = self.entries.find(query.digests, end, query.arrived_at)
            return None if self.file_of(entry) is None else entry

        longest = self._longest(query, lookup, held)
        return 0 if longest is None else longest.tokens

    def marked(self, query: CacheQuery, lookup: Lookup) -> list[Entry]:
        """The entries at the marks that have not ended."""
        entries = (self._known(query, mark) for mark in lookup.marks)
        return [entry for entry in entries if entry is not None]

    def marks_to_save(self, query: CacheQuery, lookup: Lookup, behind: int) -> list[Mark]:
        """The marks behind `behind` tokens that ask for a lease and have no file, in order."""
        marks = dict[int, Mark]()
        for mark in lookup.marks:
            # The file of an expired entry is deleted with it, so it does not count.
            entry = self._known(query, mark)
            if mark.hold and mark.tokens > behind and self.file_of(entry) is None:
                marks.setdefault(mark.tokens, mark)
        return sorted(marks.values(), key=lambda mark: mark.tokens)

    def has_room(self, scope: str, sizes: Sequence[tuple[int, int]]) -> bool:
        """Whether entries of so many tokens, in files of so many bytes, would all get leases."""
        num_blocks = sum(self._plan.blocks_of(*size) for size in sizes)
        return self.entries.leases.has_room(scope, num_blocks)

    # An answer begins.

    def take_saved(self, query: CacheQuery, saved: Saved) -> None:
        """Take in what was saved for the request that is admitted next."""
        self.entries.arriving = dict(saved.files)
        self.entries.refused = saved.refused
        self._is_restored = saved.is_restored

    def admit(
        self, query: CacheQuery, lookup: Lookup, table: BlockTable, reused: int | None
    ) -> None:
        hit = lookup.hit
        is_whole = self._settle(query, lookup, reused or 0)
        if hit is not None and not is_whole:
            self._miss(lookup, hit)
        self._unwritten = set()
        table.num_tokens = len(query.tokens)
        self.entries.adopt()
        marks = list[Mark]()
        for mark in lookup.marks:
            if self._place(query, mark):
                marks.append(mark)
            else:
                self._unwritten.add(mark.segment)
        lookup.marks = marks

    def write(
        self, query: CacheQuery, lookup: Lookup, table: BlockTable, now: float
    ) -> CacheResult:
        result = super().write(query, lookup, table, now)
        for blocks in self._new_blocks.values():
            self.pool.release_chain(blocks)
        self._new_blocks = {}
        self.entries.refused = {}
        held = [msgspec.structs.replace(chain, tier="disk") for chain in result.held]
        tier = "disk" if self._is_restored and lookup.read else result.read_tier
        return replace(result, held=held, read_tier=tier)

    def restore_put(self, entry: Entry, put: Put, file: SavedFile) -> bool:
        """Take in an entry of an earlier epoch. False where there is no room for it."""
        digests = PromptDigests(self.hasher, put.scope, array("I", put.packed), put.adapter)
        blocks = self._allocate(digests, entry.tokens, file.num_bytes)
        if blocks is None:
            return False
        is_taken = self.entries.restore_file(entry, file, blocks)
        self.pool.release_chain(blocks)
        if is_taken and entry.name is not None:
            self.pool.anchor(entry.name, blocks[-1], entry.tokens)
        return is_taken

    # Inside.

    def _longest(
        self, query: CacheQuery, lookup: Lookup, find: Callable[[int], Entry | None]
    ) -> Entry | None:
        return longest_hit(query.segments, lookup.marks, find, query.lookback_to)

    def _miss(self, lookup: Lookup, hit: Entry) -> None:
        """Report a miss, since less than the whole hit was reused."""
        reason: MissReason = "best_effort_evicted"
        if self._is_restored:
            reason = "damaged"
            self.entries.damaged_file(hit)
        elif self.file_of(hit) is None:
            self.entries.lose(hit)
        lookup.miss_reason = reason
        for mark in lookup.marks:
            if mark.tokens > lookup.read:
                lookup.missed.setdefault(mark.segment, reason)
        if not lookup.read:
            lookup.hit = None

    def _place(self, query: CacheQuery, mark: Mark) -> bool:
        """Allocate blocks for a mark's entry, unless it exists. False if there is no room."""
        key = query.digests.at(mark.tokens)
        if key in self._new_blocks or self._known(query, mark) is not None:
            return True
        file = self.entries.arriving.get(key)
        num_bytes = 0 if file is None else file.num_bytes
        blocks = self._allocate(query.digests, mark.tokens, num_bytes)
        if blocks is not None:
            self._new_blocks[key] = blocks
        return blocks is not None

    def _allocate(
        self, digests: PromptDigests, num_tokens: int, num_bytes: int
    ) -> list[Block] | None:
        """Allocate the blocks of an entry, each with a reference. None if there is no room."""
        blocks = list[Block]()
        num_full, rest = divmod(num_tokens, self.pool.block_size)
        for index in range(self._plan.blocks_of(num_tokens, num_bytes)):
            try:
                block = self.pool.allocate(index, digests.root)
            except NoFreeBlocks:
                self.pool.release_chain(blocks)
                return None
            if index < num_full:
                self.pool.append(block, digests.block_tokens(index))
            elif index == num_full and rest:
                self.pool.append(block, digests.block_tokens(index)[: rest * TOKEN_BYTES])
            blocks.append(block)
        return blocks

    def _known(self, query: CacheQuery, mark: Mark) -> Entry | None:
        entry = self.entries.get(query.digests.at(mark.tokens))
        return entry if entry is not None and self.entries.is_live(entry) else None

    def _blocks_of(self, entry: Entry, table: BlockTable) -> list[Block]:
        return entry.blocks

    def _blocks_at(
        self, query: CacheQuery, mark: Mark, table: BlockTable, now: float
    ) -> list[Block] | None:
        known = self._known(query, mark)
        key = query.digests.at(mark.tokens)
        return self._new_blocks.get(key, [] if known is None else known.blocks)
