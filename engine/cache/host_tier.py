"""The host tier: content moves here before its device block is reused, and back for a read.

It is a second pool of blocks with the same rules. A full block is found by its digest and verified
by its tokens. The blocks of best-effort entries move too, so that such an entry stays readable.
This module only decides about copies: `take_demotions` returns those that must be made before
anything is written on the device.

The number of blocks that a step copies is bounded, so that decoding does not wait for it. A tier
that is larger than the device's pool copies ahead: it copies unreferenced content that is still on
the device. So a flood, which needs many blocks in one step, finds them copied. Beyond the bound,
content without a copy is lost, as it is without a host tier.
"""

from collections import deque

from engine.cache.block import Block
from engine.cache.ids import BlockId, Digest
from engine.cache.pool import BlockPool
from engine.cache.table import BlockCopy, BlockTable
from engine.cache.worth import copy_use


class HostTier:
    def __init__(self, device: BlockPool, num_blocks: int, max_copies: int) -> None:
        """`max_copies` is the number of blocks that one step may copy in each direction."""
        self.pool = BlockPool(num_blocks, device.block_size, tier="host", worths=device.worths)
        self.pool.changes = device.changes
        self.max_copies = max_copies
        self.num_demoted = 0
        self.num_promoted = 0
        self._demotions: dict[BlockId, BlockId] = {}
        self._offers: deque[tuple[Block, Digest]] = deque(maxlen=device.num_blocks)
        if num_blocks > device.num_blocks:
            # A smaller tier would lose content that exists only here, for copies of content on the
            # device.
            device.on_unreferenced = self._offers.append
        device.demote = self._demote

    @property
    def num_used(self) -> int:
        """Blocks with content."""
        return self.pool.num_blocks - self.pool.num_empty

    def take_demotions(self) -> list[BlockCopy]:
        """The copies (device, host) to make now: of reused blocks, and of likely next ones."""
        while self._offers and self._has_room():
            block, digest = self._offers.popleft()
            if block.digest == digest and self.pool.find(digest, block.tokens) is None:
                self.pool.release(self._copy(block))
        pairs = [BlockCopy(source, target) for target, source in self._demotions.items()]
        self._demotions = {}
        return pairs

    def promote(self, table: BlockTable) -> BlockCopy:
        """Decide to copy back the first block (host, device) that this table waits for."""
        self.num_promoted += 1
        return table.arrive()

    def _demote(self, block: Block) -> bool:
        """Take over a device block's content. False without room, or at the step's bound."""
        mine = self.pool.find(block.digest, block.tokens)
        if mine is not None:
            self.pool.acquire(mine)
        elif self._has_room():
            mine = self._copy(block)
        else:
            return False
        for entry in block.dependents:
            entry.blocks[block.index] = mine
            mine.dependents.add(entry)
        mine.names.update(block.names)
        self.pool.changes.moved("host", block.names)
        self.pool.release(mine)
        return True

    def _has_room(self) -> bool:
        return len(self._demotions) < self.max_copies and self.pool.num_reclaimable > 0

    def _copy(self, block: Block) -> Block:
        """A host block with a reference, for the content of a device block."""
        mine = self.pool.allocate(block.index, block.owner)
        self.pool.append(mine, bytes(block.tokens))
        copy_use(block, mine)
        if block.digest is not None:
            self.pool.index(mine, block.digest, block.parent)
        self._demotions[mine.block_id] = block.block_id
        self.num_demoted += 1
        return mine
