"""A sequence's block table: its logical blocks and the physical ones that stand for them.

The first `num_tokens` positions are computed. Behind them more content may have been found in
memory, with holes between. The frontier moves over such content once everything before it is
computed. A position's keys and values depend only on the tokens before it, which the digest covers.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from typing import NamedTuple

from engine.cache.block import Block
from engine.cache.digests import TOKEN_BYTES, ChainHasher, ChainKind, pack
from engine.cache.ids import BlockId, Digest, TokenId
from engine.cache.pool import BlockPool, NoFreeBlocks
from engine.cache.recurrent import RecurrentState
from engine.cache.worth import AnswerEnd, copy_use
from engine.protocol import Tier
from engine.sizing import blocks_for


class BlockCopy(NamedTuple):
    source: BlockId
    destination: BlockId


class Source(NamedTuple):
    """A block in memory. The first `num_tokens` of its tokens are the sequence's."""

    block: Block
    num_tokens: int


class BlockTable:
    """The blocks of one sequence, in order. It has one reference on each of them.

    Its first `num_tokens` tokens, up to the *frontier*, are in memory without a gap. A model with a
    recurrent state reuses whole entries only, so its blocks are not findable.
    """

    def __init__(
        self,
        pool: BlockPool,
        hasher: ChainHasher,
        root: Digest,
        state: RecurrentState | None = None,
        kind: ChainKind | None = None,
    ) -> None:
        self.state = state
        self.kind = kind
        self._pool = pool
        self._hasher = hasher
        self._root = root
        self._digests: list[Digest] = []
        self._known: Sequence[Digest] = ()
        # The number of tokens in memory behind the frontier, by logical index.
        self.beyond: dict[int, int] = {}
        # The blocks below the device whose content must still be copied, by logical index. Each has
        # a reference. The blocks of a recurrent state have negative indices. What stands behind an
        # incoming block is not computed before that has arrived.
        self.incoming: dict[int, Block] = {}
        # The keys of `beyond`, in order: to take the first key of a long dict again and again is
        # quadratic.
        self._order: deque[int] = deque()
        # The keys of `incoming`, in order.
        self._arrivals: deque[int] = deque()
        self._arriving_state: list[Block] = []
        # Content behind the frontier that no step computed: where it begins, and its tokens.
        self._given: deque[tuple[int, Sequence[TokenId]]] = deque()
        # Where arrived blocks came from, by logical index.
        self._origins: dict[int, Tier] = {}
        self.blocks: list[Block] = []
        self._ids = array("q")
        self.num_tokens = 0

    @property
    def block_ids(self) -> "array[int]":
        """The blocks' ids. They are kept from call to call, since a step asks for all of them."""
        for block in self.blocks[len(self._ids) :]:
            self._ids.append(block.block_id)
        return self._ids[:]

    def fill(
        self,
        sources: Mapping[int, Source],
        digests: Sequence[Digest],
        num_tokens: int,
        state: Sequence[Block] = (),
        num_spare: int = 0,
    ) -> list[BlockCopy]:
        """Make an empty table ready for `num_tokens`. Raises NoFreeBlocks with nothing changed.

        `sources` are by logical index, ascending. `state` is the recurrent state behind them. The
        blocks of both were acquired for this table. `digests` are the prompt's. `num_spare` blocks
        must stay free; if it is positive, others may share a tail before this table writes to it.

        Returns the copies to make: a tail that others use is copied at once.
        """
        assert not self.blocks
        size = self._pool.block_size
        total = self._blocks_for(num_tokens)
        shared = self._shared_tails(sources, may_be_shared=num_spare > 0)
        num_away = sum(source.block.is_away for source in sources.values())
        num_needed = total - len(sources) + len(shared) + num_away
        position = sum(source.num_tokens for source in sources.values())
        if self.state is not None:
            num_needed += self.state.num_to_fill(position) + sum(block.is_away for block in state)
        if num_needed + num_spare > self._pool.num_reclaimable:
            raise NoFreeBlocks(num_needed + num_spare)
        if self.state is not None:
            self._take_state(state)
            self.state.fill(position, self._arriving_state)
        copies: list[BlockCopy] = []
        for index in range(total):
            source = sources.get(index)
            if source is None:
                self.blocks.append(self._pool.allocate(index, self._root))
                continue
            block, count = source
            if block.is_away:
                self.incoming[index] = block
                block = self._pool.allocate(index, self._root)
            elif index in shared:
                block = self._pool.copy_of(source.block, count)
                copies.append(BlockCopy(source.block.block_id, block.block_id))
                self._pool.release(source.block)
            elif index * size == self.num_tokens:
                self.num_tokens += count
                self.blocks.append(block)
                continue
            self.beyond[index] = count
            self.blocks.append(block)
        self._known = digests
        self._digests.extend(digests[: self.num_tokens // size])
        self._order.extend(self.beyond)
        self._arrivals.extend(self.incoming)
        self._pass_over()
        return copies

    def _take_state(self, state: Sequence[Block]) -> None:
        """Take the blocks of a recurrent state. Allocate a block for each that is not here yet."""
        for number, block in enumerate(state, -len(state)):
            if block.is_away:
                self.incoming[number] = block
                block = self._pool.allocate(block.index, self._root, is_state=True)
            self._arriving_state.append(block)

    def gaps(self, end: int, begin: int = 0) -> Iterator[tuple[int, int]]:
        """The ranges of positions [begin, end) that are still to be computed, in order."""
        size = self._pool.block_size
        position = max(self.num_tokens, begin)
        beyond = ((index * size, self.beyond[index]) for index in self._order)
        written = ((start, len(tokens)) for start, tokens in self._given)
        for start, count in merge(beyond, written) if self._given else beyond:
            if start >= end:
                break
            if position < start:
                yield position, start
            position = max(start + count, position)
        if position < end:
            yield position, end

    def give(self, ranges: Iterable[tuple[int, int]], tokens: Sequence[TokenId]) -> None:
        """Record ranges of a prompt's `tokens` whose keys and values were written by no step.

        The frontier passes over them. The ranges are in order, and were gaps before.
        """
        self._given.extend((start, tokens[start:end]) for start, end in ranges)
        self._pass_over()

    def reachable(self, end: int) -> int:
        """The position up to which tokens can be computed before more content arrives.

        It is `end` at most.
        """
        first = self._arrivals[0] if self._arrivals else end
        return min(end, first * self._pool.block_size)

    def _shared_tails(self, sources: Mapping[int, Source], *, may_be_shared: bool) -> set[int]:
        """The partly filled blocks on the device that this table can't append to."""
        return {
            index
            for index, (block, count) in sources.items()
            if count < self._pool.block_size
            and not block.is_away
            and (may_be_shared or not self._pool.can_append(block, count))
        }

    @property
    def next_incoming(self) -> Block:
        """The first incoming block. There must be one."""
        return self.incoming[self._arrivals[0]]

    def arriving(self) -> Iterator[Block]:
        """The incoming blocks, in order."""
        return (self.incoming[index] for index in self._arrivals)

    def miss(self) -> tuple[int, int]:
        """The first incoming block's content is lost: it is computed instead.

        Return the position of its first token, and the number of tokens.
        """
        index = self._arrivals.popleft()
        source = self.incoming.pop(index)
        count = self.beyond.pop(index)
        self._order.remove(index)
        source.home.release(source)
        self._pass_over()
        return index * self._pool.block_size, count

    def arrive(self) -> BlockCopy:
        """Account for the first incoming block. Return the copy to make."""
        index = self._arrivals.popleft()
        source = self.incoming.pop(index)
        is_state = index < 0
        block = self._arriving_state[index] if is_state else self.blocks[index]
        count = self._pool.block_size if is_state else self.beyond[index]
        self._pool.append(block, bytes(source.tokens[: count * TOKEN_BYTES]))
        if self.state is None and count == self._pool.block_size:
            copy_use(source, block)
            parent = self._known[index - 1] if index else self._root
            self._pool.index(block, self._known[index], parent)
            self._pool.canonical(self._known[index], block).names.update(source.names)
            self._pool.changes.moved("device", source.names)
            source.names.clear()
        self._origins[index] = source.tier
        source.home.release(source)
        self._pass_over()
        return BlockCopy(source.block_id, block.block_id)

    def origin(self, num_tokens: int) -> Tier:
        """The lowest tier from which blocks of the first `num_tokens` were brought back."""
        num_blocks = blocks_for(num_tokens, self._pool.block_size)
        tiers = {tier for index, tier in self._origins.items() if index < num_blocks}
        if "disk" in tiers:
            return "disk"
        return "host" if "host" in tiers else "device"

    def fork(self, num_tokens: int) -> "BlockTable":
        """A table that shares the first `num_tokens`. A write to the tail copies it first.

        Blocks for later tokens stay with this table.
        """
        assert num_tokens <= self.num_tokens and not self.beyond
        forked = BlockTable(self._pool, self._hasher, self._root, kind=self.kind)
        shared = self.blocks[: blocks_for(num_tokens, self._pool.block_size)]
        for block in shared:
            self._pool.acquire(block)
        if self.state is not None:
            forked.state = self.state.fork(num_tokens)
        forked.blocks = list(shared)
        forked.num_tokens = num_tokens
        forked._digests = self._digests[: num_tokens // self._pool.block_size]
        return forked

    def blocks_needed(self, num_tokens: int) -> int:
        """The most allocations that writing `num_tokens` more can take."""
        new = self._blocks_for(num_tokens) - len(self.blocks)
        if self.state is not None:
            new = max(new, 0) + self.state.num_lacking
        return max(new, 0) + (1 if num_tokens and self._must_copy_tail() else 0)

    def prepare(self, num_tokens: int) -> list[BlockCopy]:
        """Make the next `num_tokens` positions writable. Raises NoFreeBlocks with nothing changed.

        Returns the copies to make before anything is written: copy-on-write of the tail.
        """
        if self.blocks_needed(num_tokens) > self._pool.num_reclaimable:
            raise NoFreeBlocks
        if self.state is not None:
            self.state.make_room()
        copies: list[BlockCopy] = []
        if num_tokens and self._must_copy_tail():
            tail = self.num_tokens // self._pool.block_size
            shared = self.blocks[tail]
            tail_copy = self._pool.copy_of(shared, self.num_tokens % self._pool.block_size)
            copies.append(BlockCopy(shared.block_id, tail_copy.block_id))
            self.blocks[tail] = tail_copy
            del self._ids[tail:]
            self._pool.release(shared)
        while len(self.blocks) < self._blocks_for(num_tokens):
            self.blocks.append(self._pool.allocate(len(self.blocks), self._root))
        return copies

    @property
    def can_commit(self) -> bool:
        """Whether the next position's block is there and is this table's alone."""
        tail, offset = divmod(self.num_tokens, self._pool.block_size)
        return tail < len(self.blocks) and self._pool.can_append(self.blocks[tail], offset)

    def commit(self, tokens: Sequence[TokenId]) -> None:
        """Record tokens whose keys and values were written. Full blocks become findable."""
        self._record(tokens)
        if self.state is not None:
            self.state.moved(self.num_tokens)
        self._pass_over()

    def _record(self, tokens: Sequence[TokenId]) -> None:
        packed = pack(tokens)
        begin = 0
        size = self._pool.block_size
        while begin < len(tokens):
            index, offset = divmod(self.num_tokens, size)
            count = min(size - offset, len(tokens) - begin)
            block = self.blocks[index]
            self._pool.append(block, packed[begin * TOKEN_BYTES : (begin + count) * TOKEN_BYTES])
            self.num_tokens += count
            begin += count
            if offset + count == size:
                parent = self._digests[-1] if self._digests else self._root
                digest = self._hasher.extend(parent, block.tokens, index, self.kind)
                self._digests.append(digest)
                if self.state is None:
                    self._pool.index(block, digest, parent)

    def release(self, end: AnswerEnd | None = None) -> None:
        """Give every reference back. `end` is how the answer ended. None: it has not ended."""
        if end is not None:
            self._pool.use(self.blocks, end)
        self._pool.release_chain(self.blocks)
        for block in reversed(self.incoming.values()):
            block.home.release(block)
        if self.state is not None:
            self.state.release()
        self.incoming = {}
        self._order.clear()
        self._arrivals.clear()
        self._given.clear()
        self._origins = {}
        self.blocks = []
        self._digests = []
        del self._ids[:]
        self.beyond = {}
        self.num_tokens = 0
        self._arriving_state = []

    def _pass_over(self) -> None:
        """Move the frontier over content that it has reached."""
        size = self._pool.block_size
        while self._order or self._given:
            if self._given and self._given[0][0] == self.num_tokens:
                self._record(self._given.popleft()[1])
                continue
            index = self._order[0] if self._order else -1
            if index < 0 or index * size > self.num_tokens or index in self.incoming:
                return
            assert index * size == self.num_tokens, "content was computed again"
            count = self.beyond.pop(self._order.popleft())
            self.num_tokens += count
            if count == size:
                self._digests.append(self._known[index])

    def _must_copy_tail(self) -> bool:
        tail, offset = divmod(self.num_tokens, self._pool.block_size)
        return bool(offset) and not self._pool.can_append(self.blocks[tail], offset)

    def _blocks_for(self, num_tokens: int) -> int:
        return blocks_for(self.num_tokens + num_tokens, self._pool.block_size)
