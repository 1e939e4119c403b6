"""Our record of blocks that another program owns, and the cache on it."""

from engine.cache.block import Block
from engine.cache.digests import ChainHasher, PromptDigests
from engine.cache.entries import Entries
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.protocol import Breakpoint, BreakpointReport


class MirrorPool(BlockPool):
    """Mirrors of blocks with entries or names. Other blocks have none."""

    def mirror(self, digests: PromptDigests) -> list[Block]:
        """The mirrors of a prompt's full blocks, each with one reference more."""
        blocks = []
        for index, digest in enumerate(digests.full):
            packed = digests.block_tokens(index)
            block = self.find(digest, packed)
            if block is None:
                block = self.allocate(index)
                self.append(block, packed)
                self.index(block, digest)
            else:
                self.acquire(block)
            blocks.append(block)
        return blocks

    def lose(self, digest: Digest) -> None:
        """The owner has dropped this block, so its names are gone too."""
        block = self._index.get(digest)
        if block is not None:
            self.changes.gone(block.names)
            block.names.clear()
            self.requeue(block)

    def _enqueue(self, block: Block) -> None:
        if not block.names and not block.dependents:
            self._forget_content(block)
        super()._enqueue(block)


class MirrorCache(PrefixCache):
    """`_unwritten`: segments whose entries the other program or our books had no room for."""

    pool: MirrorPool

    def __init__(self, pool: MirrorPool, entries: Entries, hasher: ChainHasher) -> None:
        super().__init__(pool, entries, hasher)
        self._unwritten: set[int] = set()

    def _not_written(self, query: CacheQuery, point: Breakpoint) -> BreakpointReport:
        report = super()._not_written(query, point)
        if point.segment not in self._unwritten:
            return report
        return BreakpointReport(
            segment=point.segment, state="none", tokens=report.tokens, reason="best_effort_evicted"
        )
