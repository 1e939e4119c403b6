"""The map of a pool: what holds each block, and how much room in them is empty."""

from collections import Counter
from typing import NamedTuple

from engine.cache.block import Block
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import PrefixCache
from engine.protocol import MAX_CELLS, BlockCell, BlockStats, Memory

MAX_BLOCKS_A_STEP = 8192
"""The most blocks that are looked at between two steps; it takes some milliseconds."""


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
        width = self._blocks_per_cell
        until = self._num_seen + max(MAX_BLOCKS_A_STEP // width, 1) * width
        until = min(until, self._pool.num_blocks)
        while self._num_seen < until:
            end = min(self._num_seen + width, until)
            found = _look_at(self._pool, self._pool.blocks[self._num_seen : end])
            self._cells.append(found.cell)
            self._num_referenced += found.num_referenced
            self._unused_tokens += found.unused_tokens
            self._num_seen = end

    def report(self, epoch: str) -> Memory:
        return Memory(
            epoch=epoch,
            block_size=self._pool.block_size,
            blocks_per_cell=self._blocks_per_cell,
            cells=self._cells,
            referenced_blocks=self._num_referenced,
            unused_tokens=self._unused_tokens,
            host=_host_stats(self._cache),
            lifetimes=self._cache.entries.lifetimes.report(),
        )


class _Found(NamedTuple):
    cell: BlockCell
    num_referenced: int
    unused_tokens: int


def _look_at(pool: BlockPool, blocks: list[Block]) -> _Found:
    states = Counter(state_of(block) for block in blocks)
    referenced = [block for block in blocks if block.ref_count]
    return _Found(
        BlockCell(**states, shared=sum(block.ref_count > 1 for block in blocks)),
        len(referenced),
        sum(pool.block_size - pool.num_tokens(block) for block in referenced),
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


def _host_stats(cache: PrefixCache) -> BlockStats | None:
    if cache.host is None:
        return None
    pool = cache.host.pool
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
