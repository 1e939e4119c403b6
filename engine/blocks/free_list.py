"""A doubly linked list through the blocks themselves: O(1) at both ends and in the middle.

The shape is vLLM's `FreeKVCacheBlockQueue`: the head is reused first.
"""

from collections.abc import Iterator

from engine.blocks.block import Block


class Total:
    """How many blocks are in one list, or in several together."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 0


class FreeList:
    def __init__(self, total: Total) -> None:
        """`total` counts this list's blocks, with those of others that have the same."""
        self._total = total
        self._head: Block | None = None
        self._tail: Block | None = None

    def __bool__(self) -> bool:
        return self._head is not None

    def __iter__(self) -> Iterator[Block]:
        block = self._head
        while block is not None:
            yield block
            block = block.after

    def append(self, block: Block) -> None:
        """Put last: reused after everything that is here now."""
        self._claim(block)
        block.before, block.after = self._tail, None
        if self._tail is None:
            self._head = block
        else:
            self._tail.after = block
        self._tail = block

    def prepend(self, block: Block) -> None:
        """Put first: reused next."""
        self._claim(block)
        block.before, block.after = None, self._head
        if self._head is None:
            self._tail = block
        else:
            self._head.before = block
        self._head = block

    def remove(self, block: Block) -> None:
        assert block.queue is self, "the block is in another list"
        if block.before is None:
            self._head = block.after
        else:
            block.before.after = block.after
        if block.after is None:
            self._tail = block.before
        else:
            block.after.before = block.before
        block.before = block.after = block.queue = None
        self._total.size -= 1

    def pop(self) -> Block:
        """Take the head. The list must not be empty."""
        assert self._head is not None
        block = self._head
        self.remove(block)
        return block

    def _claim(self, block: Block) -> None:
        assert block.queue is None, "the block is in a list already"
        block.queue = self
        self._total.size += 1
