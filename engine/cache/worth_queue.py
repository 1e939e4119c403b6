"""Unreferenced blocks of one scope, the least worth first."""

from collections.abc import Callable
from itertools import islice

from engine.cache.block import Block, BlockQueue
from engine.cache.ids import Digest
from engine.cache.worth import Worths

NUM_LOOKED_AT = 64
"""About how many leaves are compared, evenly spaced: to compare all of them costs too much."""
NUM_CHOSEN = 16
MIN_PER_CHOSEN = 256
"""One leaf is chosen for every so many. The chosen leaves make way before others are compared."""


class WorthQueue(BlockQueue):
    """A block makes way before the block in front of it in its chain.

    So the choice is among *leaves*: blocks that no block of the pool follows. Of equal worth, as of
    blocks that no prompt has used, the least recently used goes first.
    """

    def __init__(self, worths: Worths, owner: Digest, is_followed: Callable[[Block], bool]) -> None:
        super().__init__()
        self._worths = worths
        self._owner = owner
        self._is_followed = is_followed
        self._leaves: list[Block] = []
        self._inner: list[Block] = []
        # The blocks that make way next, the last one first. Each has its last use at that moment.
        self._chosen: list[tuple[Block, int]] = []
        # The index of the first leaf that is compared, modulo the stride.
        self._offset = 0

    def settle(self, block: Block) -> None:
        self._leave(block)
        self._enter(block)

    def pop(self) -> Block:
        block = self._next()
        self.remove(block)
        return block

    def _next(self) -> Block:
        while self._chosen:
            block, last_use = self._chosen.pop()
            if block.queue is self and block.last_use == last_use and not self._is_followed(block):
                return block
        # There may be no leaf: a block in use may follow a duplicate of a block that is not in use.
        blocks = self._leaves or self._inner
        stride = len(blocks) // NUM_LOOKED_AT
        if stride > 1:
            self._offset += 1
            blocks = blocks[self._offset % stride :: stride]
        worth = self._worths.of(self._owner)
        ranked = sorted(blocks, key=lambda block: (worth.at(block), block.last_use))
        num_chosen = min(len(self._leaves) // MIN_PER_CHOSEN, NUM_CHOSEN)
        chosen = [(block, block.last_use) for block in islice(ranked, 1, num_chosen)]
        self._chosen = chosen[::-1]
        return ranked[0]

    def _enter(self, block: Block) -> None:
        blocks = self._inner if self._is_followed(block) else self._leaves
        block.place = len(blocks)
        blocks.append(block)

    def _leave(self, block: Block) -> None:
        """Take a block out of its list. The last block of the list takes its place."""
        place = block.place
        blocks = self._leaves
        if place >= len(blocks) or blocks[place] is not block:
            blocks = self._inner
        last = blocks.pop()
        if last is not block:
            blocks[place] = last
            last.place = place
        block.place = -1
