"""What an engine reports of what it holds: entries, names, and a map of the pool's blocks."""

from collections import Counter
from collections.abc import Callable

from engine.cache.block import Block, Entry
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import PrefixCache
from engine.cache.store_tier import StoreTier
from engine.protocol import (
    MAX_CELLS,
    BlockCell,
    BlockStats,
    ChainHeld,
    EntryInfo,
    HeldName,
    Memory,
    Snapshot,
)
from engine.schedule.accounting import Accounting

MAX_BLOCKS_A_STEP = 8192
"""The most blocks that are looked at between two steps; it takes some milliseconds."""
MAX_NAMES_A_STEP = 4096
"""The most names that are copied between two steps; it takes some milliseconds."""


class SnapshotScan:
    """What is held, block by block: `advance` until `is_done`, each between two steps.

    The names of one block are one chain's. `seq` is the last event's before the first piece. Later
    events may be in later pieces already. A follower takes them in again behind the snapshot. Each
    says what its names are from then on, so the follower ends with what is held.
    """

    def __init__(
        self, cache: PrefixCache, accounting: Accounting, epoch: str, now: Callable[[], float]
    ) -> None:
        host, self._store, self._now = cache.host, cache.store, now
        self._pools = [cache.pool.blocks, *([host.pool.blocks] if host is not None else [])]
        self._pools.extend(store.pool.blocks for store in cache.stores)
        self._accounting = accounting
        self._epoch = epoch
        self._seq: int | None = None
        self._num_seen = 0
        self._chains: list[ChainHeld] = []

    @property
    def is_done(self) -> bool:
        return self._seq is not None and not self._pools

    def advance(self) -> None:
        if self._seq is None:
            self._seq = self._accounting.num_published
        num_names = num_blocks = 0
        while self._pools and num_names < MAX_NAMES_A_STEP and num_blocks < MAX_BLOCKS_A_STEP:
            blocks = self._pools[0]
            if self._num_seen == len(blocks):
                self._num_seen = 0
                del self._pools[0]
                continue
            block = blocks[self._num_seen]
            self._num_seen += 1
            num_blocks += 1
            num_names += len(block.names)
            if block.names:
                self._chains.append(self._chain_of(block))

    def report(self) -> Snapshot:
        assert self._seq is not None
        return Snapshot(seq=self._seq, epoch=self._epoch, chains=self._chains)

    def _chain_of(self, block: Block) -> ChainHeld:
        if self._store is not None and block.tier == "disk":
            return _stored_chain(self._store, block, self._now())
        names = [HeldName(digest, tokens) for digest, tokens in block.names.items()]
        num_leased = len(names) if block.is_promised else 0
        return ChainHeld(seq=0, names=names, tier=block.tier, num_leased=num_leased)


def _stored_chain(store: StoreTier, block: Block, now: float) -> ChainHeld:
    """A block of the store: leased for as long as an entry that is leased there."""
    names = [HeldName(digest, tokens) for digest, tokens in block.names.items()]
    leased = (e for e in store.holds.of(block) if e.is_leased and e.lease_tier == "disk")
    ends_at = max((entry.expires_at for entry in leased), default=None)
    return ChainHeld(
        seq=0,
        names=names,
        tier="disk",
        num_leased=0 if ends_at is None else len(names),
        lease_seconds=None if ends_at is None else ends_at - now,
    )


def entry_infos(
    cache: PrefixCache, now: Callable[[], float], scope: str | None = None
) -> list[EntryInfo]:
    """The live entries of one scope, or of all."""
    at, block_size = now(), cache.pool.block_size
    return [
        _entry_info(entry, at, block_size)
        for entry in cache.entries.live()
        if scope is None or entry.scope == scope
    ]


def _entry_info(entry: Entry, now: float, block_size: int) -> EntryInfo:
    deepest = entry.blocks[max(entry.tokens // block_size - 1, 0)]
    return EntryInfo(
        entry=entry.key.hex(),
        scope=entry.scope,
        tokens=entry.tokens,
        blocks=len(entry.blocks),
        ttl=entry.ttl,
        state=entry.state,
        expires_in_seconds=entry.expires_at - now,
        reads=entry.reads,
        name=entry.name,
        reason=entry.why_unleased,
        tier=entry.blocks[0].tier,
        is_stored=entry.outlives_restarts,
        shared_by=deepest.ref_count - deepest.lease_count,
    )


class MemoryScan:
    """Looks at a pool piece by piece: `advance` until `is_done`, each between two steps."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._blocks_per_cell = -(-cache.pool.num_blocks // MAX_CELLS)
        self._cells: list[BlockCell] = []
        self._num_seen = self._num_referenced = self._unused_tokens = 0

    @property
    def is_done(self) -> bool:
        return self._num_seen == self._pool.num_blocks

    def advance(self) -> None:
        width, pool = self._blocks_per_cell, self._pool
        until = self._num_seen + max(MAX_BLOCKS_A_STEP // width, 1) * width
        until = min(until, pool.num_blocks)
        while self._num_seen < until:
            end = min(self._num_seen + width, until)
            blocks = pool.blocks[self._num_seen : end]
            referenced = [block for block in blocks if block.ref_count]
            states = Counter(state_of(block) for block in blocks)
            shared = sum(block.ref_count > 1 for block in referenced)
            self._cells.append(BlockCell(**states, shared=shared))
            self._num_referenced += len(referenced)
            self._unused_tokens += sum(pool.block_size - pool.num_tokens(b) for b in referenced)
            self._num_seen = end

    def report(self, epoch: str) -> Memory:
        host = self._cache.host
        return Memory(
            epoch=epoch,
            block_size=self._pool.block_size,
            blocks_per_cell=self._blocks_per_cell,
            cells=self._cells,
            referenced_blocks=self._num_referenced,
            unused_tokens=self._unused_tokens,
            host=None if host is None else pool_stats(host.pool),
            lifetimes=self._cache.entries.lifetimes.report(),
        )


def state_of(block: Block) -> str:
    """The field of `BlockStats` that counts the block."""
    if block.ref_count > block.lease_count:
        return "active"
    if block.lease_count:
        return "leased"
    if any(not entry.is_idle for entry in block.dependents):
        return "best_effort"
    return "cached" if block.has_content else "free"


def pool_stats(pool: BlockPool) -> BlockStats:
    counts = pool.counts()
    return BlockStats(
        total=pool.num_blocks,
        free=counts.free,
        active=counts.active,
        leased=counts.leased,
        best_effort=counts.best_effort,
        cached=counts.cached,
        shared=counts.shared,
    )
