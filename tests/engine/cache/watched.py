"""A pool that checks each allocation against the rule of whose block is reused.

Counted from the blocks alone: whose a block is was said when it was allocated, and it is somebody's
while it is referenced or has content.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from engine.cache.block import Block
from engine.cache.ids import NOBODY, BlockId, Digest
from engine.cache.pool import BlockPool


class WatchedPool(BlockPool):
    """Raises AssertionError from `allocate` where a block was taken out of turn."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.owners = {block.block_id: NOBODY for block in self.blocks}

    def allocate(self, index: int = 0, owner: Digest = NOBODY) -> Block:
        held: Counter[Digest] = Counter()
        cached: set[BlockId] = set()
        best_effort: set[BlockId] = set()
        num_empty = 0
        for block in self.blocks:
            if block.ref_count or block.has_content:
                held[self.owners[block.block_id]] += 1
            else:
                num_empty += 1
            if block.has_content and not block.ref_count:
                (best_effort if block.dependents else cached).add(block.block_id)
        reclaimable = cached | best_effort
        givers = {self.owners[block_id] for block_id in reclaimable}
        before = {block_id: self.owners[block_id] for block_id in reclaimable}
        block = super().allocate(index, owner)
        self.owners[block.block_id] = owner
        if num_empty:
            assert block.block_id not in reclaimable, "content was lost while blocks were empty"
            return block
        loser = before[block.block_id]
        if block.block_id in best_effort:
            same = {block_id for block_id in cached if before[block_id] == loser}
            assert not same, "a best-effort entry was broken before plain content was reused"
        if loser == owner:
            assert all(held[giver] <= held[owner] + 1 for giver in givers), "spared who holds more"
        else:
            assert held[loser] == max(held[giver] for giver in givers), "not of who holds most"
            assert owner not in givers or held[loser] > held[owner] + 1, "took from who holds less"
            if len(givers) == len(held | {owner: 1}):
                assert held[loser] * len(held) > len(self.blocks), "took of an equal part"
        return block

    @contextmanager
    def only(self, block: Block) -> Iterator[None]:
        """Of what could be allocated, only this block can be meanwhile."""
        others = [other for other in self.blocks if other.ref_count == 0 and other is not block]
        for other in others:
            self.acquire(other)
        yield
        self.release_chain(others)
