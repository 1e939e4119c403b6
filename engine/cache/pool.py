"""The pool of KV blocks: their references, their content, and the order of reuse.

Rules it keeps (the reasons are in `engine/README.md`):
- a block with a reference is never reused; leases are references like any other;
- a block's content is append-only until the block is allocated anew;
- unreferenced blocks are reused in the order: nothing of use in them, then content of the scope
  that holds the most (`fairness.py`): of that cached content by least recent use, then content of
  best-effort entries that are not idle, by least recent use.
It knows no torch, no clock and no I/O.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.cache.block import Block, Entry
from engine.cache.changes import Changes
from engine.cache.digests import TOKEN_BYTES
from engine.cache.fairness import ScopeShares
from engine.cache.free_list import FreeList, StaleQueue, Total
from engine.cache.ids import NOBODY, BlockId, Digest
from engine.protocol import Tier


class NoFreeBlocks(Exception):
    """Too many blocks have a reference. `num_needed` free blocks would have been enough."""

    def __init__(self, num_needed: int = 1) -> None:
        super().__init__()
        self.num_needed = num_needed


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """Blocks by what holds them; the first five add up to the pool."""

    free: int
    active: int
    leased: int
    best_effort: int
    cached: int
    shared: int


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, *, tier: Tier = "device") -> None:
        """Both positive; `block_size` in tokens.

        `offer`, if set, is called with every findable block that lost its last reference. `demote`,
        if set, may take over a block's content before it is reused. `forgotten`, if set, is called
        with every block that has just lost its content, or never had any.
        """
        self.tier = tier
        self.forgotten: Callable[[Block], None] | None = None
        self.offer: Callable[[Block], None] | None = None
        self.demote: Callable[[Block], bool] | None = None
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.blocks = [Block(BlockId(i), self) for i in range(num_blocks)]
        self._num_empty, self._shares = Total(), ScopeShares()
        self._empty = FreeList(self._num_empty)
        self._index: dict[Digest, Block] = {}
        self.num_leased = 0
        self.num_idle = 0
        self.num_shared = 0
        self._num_uses = 0
        self._num_lease_only = 0
        self.num_evicted = 0
        self.num_copied = 0
        self.changes = Changes()
        self._broken: list[Entry] = []
        for block in self.blocks:
            self._empty.append(block)

    # References.

    @property
    def num_reclaimable(self) -> int:
        """Blocks that could be allocated now."""
        shares = self._shares
        return self._num_empty.size + shares.cached.size + shares.best_effort.size

    @property
    def num_empty(self) -> int:
        """Blocks with nothing of use in them."""
        return self._num_empty.size

    def allocate(self, index: int = 0, owner: Digest = NOBODY) -> Block:
        """A block with one reference and no content, for this place in a chain.

        `owner` is the digest of its scope's empty prefix. Raises NoFreeBlocks.
        """
        block = self._empty.pop() if self._empty else self._shares.pop_victim(owner)
        if block is None:
            raise NoFreeBlocks
        self._forget_content(block)
        if block.share is not None:
            self._shares.give(block)
        block.owner = owner
        self._shares.take(block)
        block.ref_count = 1
        block.index = index
        return block

    def acquire(self, block: Block) -> None:
        """Add a reference."""
        if block.queue is not None:
            block.queue.remove(block)
            if block.share is None:
                self._shares.take(block)
        elif block.ref_count == block.lease_count:
            self._num_lease_only -= 1
        block.ref_count += 1
        if block.ref_count == 2:
            self.num_shared += 1

    def release(self, block: Block) -> None:
        """Drop a reference.

        After the last one the block can be reused; its content stays until then.
        """
        assert block.ref_count > block.lease_count, "released more often than acquired"
        self._num_uses += 1
        block.last_use = self._num_uses
        block.ref_count -= 1
        if block.ref_count == 1:
            self.num_shared -= 1
        if block.ref_count == 0:
            self._enqueue(block, is_spent=False)
        elif block.ref_count == block.lease_count:
            self._num_lease_only += 1

    def release_chain(self, blocks: Iterable[Block]) -> None:
        """Release a sequence's blocks, last first, so that a chain is reused from its tail."""
        for block in reversed(list(blocks)):
            self.release(block)

    def touch(self, blocks: Sequence[Block]) -> None:
        """Count a chain's blocks as used now. Those without a reference are reused later for it."""
        for block in reversed(blocks):
            if (queue := block.queue) is None or (share := block.share) is None:
                continue
            self._num_uses += 1
            block.last_use = self._num_uses
            queue.remove(block)
            (share.best_effort if queue is share.best_effort else share.cached).append(block)

    def lease(self, blocks: Sequence[Block]) -> None:
        """Add a lease's reference to each block. The lease is not idle."""
        for block in blocks:
            self.num_idle -= block.is_idle
            if block.queue is not None:
                self._dequeue(block)
                self._num_lease_only += 1
            if block.lease_count == 0:
                self.num_leased += 1
            block.lease_count += 1
            block.ref_count += 1
            if block.ref_count == 2:
                self.num_shared += 1

    def end_lease(self, blocks: Sequence[Block]) -> list[str]:
        """Drop a lease's references. Return the names that no lease holds any more.

        The lease must not be idle: call `count_idle` before.
        """
        names: list[str] = []
        for block in reversed(blocks):
            assert block.lease_count > 0, "no lease to end"
            block.lease_count -= 1
            self.num_idle += block.is_idle
            block.ref_count -= 1
            if block.ref_count == 1:
                self.num_shared -= 1
            if block.lease_count == 0:
                self.num_leased -= 1
                names.extend(block.names)
            if block.ref_count == 0:
                self._num_lease_only -= 1
                self._enqueue(block)
        return names

    def count_idle(self, blocks: Iterable[Block], change: int) -> None:
        """Note that one lease on each of these blocks became idle (1) or is used again (-1)."""
        for block in blocks:
            self.num_idle -= block.is_idle
            block.idle_count += change
            self.num_idle += block.is_idle

    def requeue(self, block: Block) -> None:
        """Move an unreferenced block to the right queue after its dependents changed."""
        if block.queue is not None:
            self._dequeue(block)
            self._enqueue(block)

    def num_unleased(self, blocks: Iterable[Block]) -> int:
        """The number of these blocks that no lease holds yet.

        A new lease on them costs this much.
        """
        return sum(block.lease_count == 0 for block in blocks)

    # Content.

    def num_tokens(self, block: Block) -> int:
        return len(block.tokens) // TOKEN_BYTES

    def can_append(self, block: Block, offset: int) -> bool:
        """Whether a holder may write at `offset` without changing the content of others."""
        return block.ref_count == 1 and len(block.tokens) == offset * TOKEN_BYTES

    def copy_of(self, block: Block, num_tokens: int) -> Block:
        """Allocate a block for a copy of the first `num_tokens`; the caller copies the memory."""
        copy = self.allocate(block.index, block.owner)
        copy.tokens += block.tokens[: num_tokens * TOKEN_BYTES]
        self.num_copied += 1
        return copy

    def append(self, block: Block, packed: bytes) -> None:
        """Record tokens whose KV was just written behind the block's content."""
        assert block.ref_count == 1, "a write to a shared block"
        block.tokens += packed
        assert len(block.tokens) <= self.block_size * TOKEN_BYTES

    def index(self, block: Block, digest: Digest) -> None:
        """Make a full block findable.

        The first of several equal blocks stays the one that is found.
        """
        assert len(block.tokens) == self.block_size * TOKEN_BYTES, "only full blocks are indexed"
        if digest not in self._index:
            block.digest = digest
            self._index[digest] = block

    def forget(self, block: Block) -> None:
        """Make a block's content unfindable now. The block is empty once nothing references it."""
        assert not block.dependents, "an entry stands on the block"
        if block.digest is not None:
            del self._index[block.digest]
            block.digest = None
        self.changes.gone(block.names)
        block.names.clear()
        self.requeue(block)

    def find(self, digest: Digest, packed: bytes) -> Block | None:
        """The block with this digest, if its tokens are these."""
        block = self._index.get(digest)
        return block if block is not None and block.tokens == packed else None

    def peek(self, digest: Digest) -> Block | None:
        """The block with this digest. Its tokens are not compared: for estimates only."""
        return self._index.get(digest)

    def canonical(self, digest: Digest, block: Block) -> Block:
        """The block that is found for this digest.

        It is another than `block` if an equal one came first.
        """
        return self._index.get(digest, block)

    def anchor(self, name: str, block: Block, num_tokens: int) -> bool:
        """Tie a name to the last full block of its prefix. True if the name is new there."""
        is_new = name not in block.names
        block.names[name] = num_tokens
        return is_new

    def take_broken(self) -> list[Entry]:
        """The best-effort entries that lost content since the last call."""
        broken, self._broken = self._broken, []
        return broken

    # Inside.

    def _dequeue(self, block: Block) -> None:
        assert block.queue is not None
        block.queue.remove(block)
        if block.share is None:
            self._shares.take(block)

    def _enqueue(self, block: Block, *, is_spent: bool = True) -> None:
        """Put a block without references into its queue. `is_spent`: its last use was earlier."""
        if self.offer is not None and block.digest is not None:
            self.offer(block)
        share = block.share
        assert share is not None
        if any(not entry.is_idle for entry in block.dependents):
            share.best_effort.append(block)
        elif block.has_content:
            (share.stale if is_spent else share.cached).append(block)
        else:
            self.changes.gone(block.names)
            block.names.clear()
            self._shares.give(block)
            if self.forgotten is not None:
                self.forgotten(block)
            self._empty.prepend(block)
            return
        if share.held > share.rank:
            self._shares.rank(share.owner)

    def _forget_content(self, block: Block) -> None:
        if block.has_content:
            self.num_evicted += 1
            if self.demote is not None and self.demote(block):
                block.names.clear()
                block.dependents = set()
        if block.digest is not None:
            del self._index[block.digest]
            block.digest = None
        self.changes.gone(block.names)
        block.names.clear()
        block.tokens = bytearray()
        if self.forgotten is not None:
            self.forgotten(block)
        dependents, block.dependents = block.dependents, set()
        for entry in dependents:
            entry.is_broken = True
            self._broken.append(entry)

    def _queues(self) -> Iterator[FreeList | StaleQueue]:
        yield self._empty
        for share in self._shares:
            yield from (share.cached, share.stale, share.best_effort)

    # Reports.

    def counts(self) -> PoolCounts:
        free, shares = self._num_empty.size, self._shares
        cached, best_effort = shares.cached.size, shares.best_effort.size
        active = self.num_blocks - free - cached - best_effort - self._num_lease_only
        return PoolCounts(
            free=free,
            active=active,
            leased=self._num_lease_only,
            best_effort=best_effort,
            cached=cached,
            shared=self.num_shared,
        )

    def check(self) -> None:
        """Prove every invariant that needs no outside knowledge; raises AssertionError."""
        queued = {block.block_id: queue for queue in self._queues() for block in queue}
        assert len(queued) == self.num_reclaimable, "a block is in two lists"
        for block in self.blocks:
            assert 0 <= block.lease_count <= block.ref_count
            assert (block.ref_count == 0) == (block.block_id in queued)
            assert block.queue is queued.get(block.block_id)
            assert len(block.tokens) <= self.block_size * TOKEN_BYTES
            if (share := block.share) is None:
                assert block.queue is self._empty
                assert not block.has_content and not block.names
            elif block.queue is share.cached or block.queue is share.stale:
                assert block.has_content and all(entry.is_idle for entry in block.dependents)
            elif block.queue is share.best_effort:
                assert not all(entry.is_idle for entry in block.dependents)
            else:
                assert block.queue is None and share.owner == block.owner
            if block.digest is not None:
                assert self._index.get(block.digest) is block
                assert len(block.tokens) == self.block_size * TOKEN_BYTES
        assert all(block.digest == digest for digest, block in self._index.items())
        self._shares.check()
        held = Counter(block.share.owner for block in self.blocks if block.share is not None)
        assert held == {share.owner: share.held for share in self._shares}
        assert self.num_leased == sum(b.lease_count > 0 for b in self.blocks)
        assert self.num_idle == sum(block.is_idle for block in self.blocks)
        assert self.num_shared == sum(b.ref_count > 1 for b in self.blocks)
        lease_only = sum(0 < b.lease_count == b.ref_count for b in self.blocks)
        assert self._num_lease_only == lease_only
