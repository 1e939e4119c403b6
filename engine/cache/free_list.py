"""The queues of unreferenced blocks, in the order of their reuse.

`FreeList` is a doubly linked list through the blocks themselves, O(1) at both ends and in the
middle; the shape is vLLM's `FreeKVCacheBlockQueue`: the head is reused first. `StaleQueue` sorts.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from engine.cache.block import Block

_SPARE = 64


class Total:
    """The number of blocks in one list, or in several together."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 0


class FreeList:
    def __init__(self, total: Total) -> None:
        """`total` counts this list's blocks. Several lists may share one total."""
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

    @property
    def first(self) -> Block | None:
        """The block that is reused next."""
        return self._head

    def append(self, block: Block) -> None:
        """Put a block last: it is reused after all others here."""
        self._claim(block)
        block.before, block.after = self._tail, None
        if self._tail is None:
            self._head = block
        else:
            self._tail.after = block
        self._tail = block

    def prepend(self, block: Block) -> None:
        """Put a block first: it is reused next."""
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


class StaleQueue:
    """Blocks that were spared after their last use, ordered by that use. O(log n), amortized."""

    def __init__(self, total: Total) -> None:
        self._total = total
        # A heap of (last use, order within a chain, block), a chain's tail first. A block that left
        # stays until it is met, and one that came back is in here twice. `queue` and `last_use`
        # tell which items count.
        self._heap: list[tuple[int, int, int, Block]] = []
        self._size = 0

    def __bool__(self) -> bool:
        return self._size > 0

    def __iter__(self) -> Iterator[Block]:
        yield from {item[3]: None for item in self._heap if self._is_here(item)}

    @property
    def first(self) -> Block | None:
        """The block that is reused next."""
        while self._heap:
            if self._is_here(self._heap[0]):
                return self._heap[0][3]
            heappop(self._heap)
        return None

    def append(self, block: Block) -> None:
        assert block.queue is None, "the block is in a list already"
        block.queue = self
        self._total.size += 1
        self._size += 1
        if len(self._heap) > 2 * self._size + _SPARE:
            self._heap = [item for item in self._heap if self._is_here(item)]
            heapify(self._heap)
        heappush(self._heap, (block.last_use, -block.index, block.block_id, block))

    def remove(self, block: Block) -> None:
        assert block.queue is self, "the block is in another list"
        block.queue = None
        self._total.size -= 1
        self._size -= 1

    def pop(self) -> Block:
        """Take the least recently used block. The queue must not be empty."""
        block = self.first
        assert block is not None
        self.remove(block)
        return block

    def _is_here(self, item: tuple[int, int, int, Block]) -> bool:
        return item[3].queue is self and item[3].last_use == item[0]
