"""The pool of KV blocks: their references, their content, and the order of reuse.

Rules it keeps (the reasons are in `engine/README.md`):
- a block with a reference is never reused; leases are references like any other;
- a block's content is append-only until the block is allocated anew;
- unreferenced blocks with nothing of use in them are reused first. Then comes content of the scope
  that owns the most, by learned worth. A pool that learns nothing goes by least recent use. That a
  best-effort entry stands on a block is no reason to keep it.
It knows no torch, no clock and no I/O.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.cache.block import Block, BlockQueue, Entry, ScopeShare
from engine.cache.digests import TOKEN_BYTES
from engine.cache.ids import NOBODY, BlockId, Digest
from engine.cache.order import Order
from engine.cache.worth import REMEMBERED, AnswerEnd, Evicted, Worths
from engine.cache.worth_queue import WorthQueue
from engine.protocol import ChainGone, ChainHeld, HeldName, Tier
from engine.protocol.reports import BlockCell


class NoFreeBlocks(Exception):
    """Too many blocks have a reference. `num_needed` free blocks would have been enough."""

    def __init__(self, num_needed: int = 1) -> None:
        super().__init__()
        self.num_needed = num_needed


class PurgedBlocks(NamedTuple):
    """The memory that must be cleared after a purge."""

    # Blocks that are cleared as a whole.
    empty: list[BlockId]
    # Blocks that are cleared from a slot on, with this slot.
    tails: list[tuple[BlockId, int]]
    # The purged scope's blocks that running sequences use. They can't be cleared yet.
    busy: list[BlockId]


class Changes:
    """The changes of the names in the pools, as events that have no number yet.

    All pools of one engine write into one list. A name may leave one pool and enter another within
    one step. Only the order of the events then says whether the name is still held.
    """

    def __init__(self) -> None:
        self._events: list[ChainGone | ChainHeld] = []

    def gone(self, names: Iterable[str]) -> None:
        """The block of these names has lost its content. Consecutive losses make one event."""
        gone_names = list(names)
        if not gone_names:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, ChainGone):
            last.names.extend(gone_names)
        else:
            self._events.append(ChainGone(seq=0, names=gone_names, reason="evicted"))

    def moved(self, tier: Tier, names: Mapping[str, int]) -> None:
        """The names of one block, with the tokens of their prefixes, are in this tier now."""
        if names:
            chain = [HeldName(name, tokens) for name, tokens in names.items()]
            self._events.append(ChainHeld(seq=0, names=chain, tier=tier))

    def take(self) -> list[ChainGone | ChainHeld]:
        """The events since the last call."""
        events = self._events
        self._events = []
        return events


class BlockPool:
    """A tier's blocks.

    A scope owns a block from its allocation until the block has no useful content: while the scope
    computes with it, leases it, or has content cached in it. The victim is the scope that owns the
    most, of the scopes with an unreferenced block. A scope takes from another only if it then owns
    no more than the other. So a scope with at most an equal part of the pool loses nothing to
    others (max-min fairness). A single scope can have the whole pool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        tier: Tier = "device",
        worths: Worths | None = None,
    ) -> None:
        """`num_blocks` and `block_size` (in tokens) are positive.

        Without `worths` the order is by recency alone.
        """
        self.tier = tier
        self.worths = worths
        self._evicted = Evicted(REMEMBERED * num_blocks)
        # The number of findable blocks that directly follow the block with this digest.
        self._num_following: Counter[Digest] = Counter()
        # Called with every block that has just lost its content, or never had any.
        self.on_forgotten: Callable[[Block], None] | None = None
        # Called with every findable block that lost its last reference, and its digest.
        self.on_unreferenced: Callable[[tuple[Block, Digest]], None] | None = None
        # Called with a block before it is reused. True: the content was taken over.
        self.demote: Callable[[Block], bool] | None = None
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.blocks = [Block(BlockId(i), self) for i in range(num_blocks)]
        self.changes = Changes()
        self._shares: dict[Digest, ScopeShare] = {}
        self._largest = Order[ScopeShare](
            lambda share: (-share.num_owned, 0) if share.is_reclaimable else None
        )
        self._empty = BlockQueue(self.blocks)
        self._index: dict[Digest, Block] = {}
        self._broken: list[Entry] = []
        # Blocks that could be allocated now.
        self.num_reclaimable = num_blocks
        # Blocks with a lease.
        self.num_leased = 0
        # Blocks with more than one reference.
        self.num_shared = 0
        # How often a block with content was reused.
        self.num_evicted = 0
        # How often a shared block was copied so that a sequence could write to it.
        self.num_copied = 0
        self._num_uses = 0
        # Blocks whose references are all leases.
        self._num_lease_only = 0
        # Blocks that hold a recurrent state.
        self._with_state: set[BlockId] = set()
        # Blocks that held a state and now get keys and values. Their memory must be cleared first:
        # attention multiplies slots without a token by 0, and a state's bytes may read as NaN.
        self.to_clear: list[BlockId] = []

    # References.

    @property
    def num_empty(self) -> int:
        """Blocks with nothing of use in them."""
        return len(self._empty)

    def allocate(self, index: int = 0, owner: Digest = NOBODY, *, is_state: bool = False) -> Block:
        """A block with one reference and no content, for this place in a chain.

        `owner` is the digest of its scope's empty prefix. `is_state`: the block is for a recurrent
        state. Raises NoFreeBlocks.
        """
        if self._empty:
            block = self._empty.pop()
        else:
            largest = self._largest.first()
            owner_share = self._shares.get(owner)
            if largest is None:
                raise NoFreeBlocks
            if (
                owner_share is not None
                and owner_share.is_reclaimable
                and largest.num_owned <= owner_share.num_owned + 1
            ):
                largest = owner_share
            block = largest.pop()
        self.num_reclaimable -= 1
        self._forget_content(block)
        if block.share is None or block.share.owner != owner:
            self._leave_share(block)
            block.owner = owner
            self._join_share(block)
        block.ref_count = 1
        block.index = index
        if is_state:
            self._with_state.add(block.block_id)
        elif block.block_id in self._with_state:
            self._with_state.discard(block.block_id)
            self.to_clear.append(block.block_id)
        return block

    def acquire(self, block: Block) -> None:
        """Add a reference."""
        if block.queue is not None:
            self._dequeue(block)
        elif block.ref_count == block.lease_count:
            self._num_lease_only -= 1
        block.ref_count += 1
        self.num_shared += block.ref_count == 2

    def release(self, block: Block) -> None:
        """Drop a reference.

        Without a reference the block can be reused. Its content stays until it is.
        """
        assert block.ref_count > block.lease_count, "released more often than acquired"
        self._num_uses += 1
        block.last_use = self._num_uses
        block.ref_count -= 1
        self.num_shared -= block.ref_count == 1
        if block.ref_count == 0:
            self._enqueue(block)
        elif block.ref_count == block.lease_count:
            self._num_lease_only += 1

    def use(self, blocks: Sequence[Block], end: AnswerEnd) -> None:
        """A prompt with its answer used these blocks of a chain, from its first one on."""
        if self.worths is None:
            return
        if blocks:
            self.worths.use(blocks[0].owner, blocks, end)

    def release_chain(self, blocks: Iterable[Block]) -> None:
        """Release a sequence's blocks, last first, so that a chain is reused from its tail."""
        for block in reversed(list(blocks)):
            self.release(block)

    def touch(self, blocks: Sequence[Block]) -> None:
        """Count a chain's blocks as used now, so that they are reused later.

        This counts blocks that no sequence uses. A sequence counts its own blocks when it releases
        them.
        """
        for block in reversed(blocks):
            if block.share is not None and block.ref_count == block.lease_count:
                self._num_uses += 1
                block.last_use = self._num_uses

    def lease(self, blocks: Sequence[Block]) -> None:
        """Add a lease's reference to each block."""
        for block in blocks:
            if block.queue is not None:
                self._dequeue(block)
                self._num_lease_only += 1
            self.num_leased += block.lease_count == 0
            block.lease_count += 1
            block.ref_count += 1
            self.num_shared += block.ref_count == 2

    def end_lease(self, blocks: Sequence[Block]) -> list[str]:
        """Drop a lease's references. Return the names of blocks without a lease now."""
        names: list[str] = []
        for block in reversed(blocks):
            assert block.lease_count > 0, "no lease to end"
            block.lease_count -= 1
            block.ref_count -= 1
            self.num_shared -= block.ref_count == 1
            if block.lease_count == 0:
                self.num_leased -= 1
                names.extend(block.names)
            if block.ref_count == 0:
                self._num_lease_only -= 1
                self._enqueue(block)
        return names

    def requeue(self, block: Block) -> None:
        """Put an unreferenced block into its queue again, after its dependents changed.

        A block that still has content keeps its place in the order of reuse.
        """
        if block.queue is not None:
            self._dequeue(block)
            self._enqueue(block)

    def num_unleased(self, blocks: Iterable[Block]) -> int:
        """The number of these blocks without a lease: what a new lease on them costs."""
        return sum(block.lease_count == 0 for block in blocks)

    # Content.

    def num_tokens(self, block: Block) -> int:
        """The number of slots in use. A block with a recurrent state uses all of its slots."""
        is_state = block.block_id in self._with_state
        return self.block_size if is_state else len(block.tokens) // TOKEN_BYTES

    def can_append(self, block: Block, offset: int) -> bool:
        """Whether a reference's owner may write at `offset` without changing what others read."""
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

    def index(self, block: Block, digest: Digest, parent: Digest | None = None) -> None:
        """Make a full block findable. `parent` is the digest of the block in front of it.

        If an equal block is findable already, it stays the one that is found. It then counts as
        used now, because a prompt's last block is computed again though it is in memory.
        """
        assert len(block.tokens) == self.block_size * TOKEN_BYTES, "only full blocks are indexed"
        canonical = self._index.get(digest)
        if canonical is not None:
            self.touch([canonical])
            return
        block.digest = digest
        self._index[digest] = block
        if self.worths is None:
            return
        self._evicted.give_back(digest, block)
        block.parent = parent
        if parent is not None:
            self._num_following[parent] += 1
            if self._num_following[parent] == 1:
                self._settle(parent)

    def forget(self, block: Block) -> None:
        """Make a block's content unfindable now. The block is empty once nothing references it."""
        assert not block.dependents, "an entry stands on the block"
        block.use_class = -1  # so that the uses of dropped content are not remembered
        self._unname(block)
        self.requeue(block)

    def purge(self, owner: Digest | None, begin: int, end: int) -> PurgedBlocks:
        """Forget a scope's content in blocks `begin` to `end` - 1. None: all scopes' content.

        No entry may stand on the content. Blocks with a reference can't be found afterwards. A
        block that belongs to another scope by now may still have this scope's bytes behind its own
        tokens. So the caller must clear empty blocks as a whole, and other blocks behind their
        tokens. Blocks that a sequence computes with are left out.
        """
        purged = PurgedBlocks([], [], [])
        for block in self.blocks[begin:end]:
            if block.owner == NOBODY:
                continue
            is_doomed = owner in (None, block.owner)
            if is_doomed:
                assert not block.dependents, "an entry stands on the block"
                if block.has_content:
                    self.forget(block)
            if block.ref_count > block.lease_count:
                if is_doomed:
                    purged.busy.append(block.block_id)
            elif block.ref_count or block.has_content:
                num_tokens = self.num_tokens(block)
                if num_tokens < self.block_size:
                    purged.tails.append((block.block_id, num_tokens))
            else:
                block.tokens[:] = bytes(len(block.tokens))
                block.tokens = bytearray()
                block.owner = NOBODY
                purged.empty.append(block.block_id)
        return purged

    def find(self, digest: Digest | None, packed: bytes | bytearray) -> Block | None:
        """The block with this digest, if its tokens are these."""
        block = self._index.get(digest) if digest is not None else None
        return block if block is not None and block.tokens == packed else None

    def peek(self, digest: Digest) -> Block | None:
        """The block with this digest. Its tokens are not compared: for estimates only."""
        return self._index.get(digest)

    def canonical(self, digest: Digest, block: Block) -> Block:
        """The block that is found for this digest. It is `block` unless an equal one came first."""
        return self._index.get(digest, block)

    def anchor(self, name: str, block: Block, num_tokens: int) -> bool:
        """Tie a name to the last full block of its prefix. True if the name is new there."""
        is_new = name not in block.names
        block.names[name] = num_tokens
        return is_new

    def take_broken(self) -> list[Entry]:
        """The best-effort entries that lost content since the last call."""
        broken = self._broken
        self._broken = []
        return broken

    def counts(self) -> BlockCell:
        free = len(self._empty)
        best_effort = sum(share.unreferenced.num_best_effort for share in self._shares.values())
        return BlockCell(
            free=free,
            active=self.num_blocks - self.num_reclaimable - self._num_lease_only,
            leased=self._num_lease_only,
            best_effort=best_effort,
            cached=self.num_reclaimable - free - best_effort,
            shared=self.num_shared,
        )

    # Inside.

    def _dequeue(self, block: Block) -> None:
        assert block.queue is not None
        block.queue.remove(block)
        self.num_reclaimable -= 1
        if block.share is None:
            self._join_share(block)

    def _join_share(self, block: Block) -> None:
        """Count the block for its owner. It was counted for no scope before."""
        share = self._shares.get(block.owner)
        if share is None:
            share = ScopeShare(block.owner, self._new_queue(block.owner))
            self._shares[block.owner] = share
        share.num_owned += 1
        block.share = share
        self._largest.push(share)

    def _leave_share(self, block: Block) -> None:
        """Count the block for no scope, since it has no useful content left."""
        share = block.share
        if share is not None:
            share.num_owned -= 1
            block.share = None
            if not share.num_owned:
                del self._shares[share.owner]

    def _enqueue(self, block: Block) -> None:
        """Put a block without references into its queue."""
        self.num_reclaimable += 1
        if self.on_unreferenced is not None and block.digest is not None:
            self.on_unreferenced((block, block.digest))
        share = block.share
        assert share is not None
        if block.has_content:
            was_reclaimable = share.is_reclaimable
            share.unreferenced.append(block)
            if not was_reclaimable:
                self._largest.push(share)
            return
        self._unname(block)
        self._leave_share(block)
        if self.on_forgotten is not None:
            self.on_forgotten(block)
        block.last_use = -self._num_uses  # the block that became empty last is reused first
        self._empty.append(block)

    def _new_queue(self, owner: Digest) -> BlockQueue:
        if self.worths is None:
            return BlockQueue()
        return WorthQueue(self.worths, owner, self._is_followed)

    def _is_followed(self, block: Block) -> bool:
        return block.digest is not None and block.digest in self._num_following

    def _settle(self, digest: Digest) -> None:
        """What follows the block with this digest has changed."""
        block = self._index.get(digest)
        if block is not None and block.queue is not None:
            block.queue.settle(block)

    def _unname(self, block: Block) -> None:
        if block.digest is not None:
            del self._index[block.digest]
            self._evicted.add(block.digest, block)
            block.digest = None
        parent = block.parent
        block.parent = None
        if parent is not None:
            self._num_following[parent] -= 1
            if not self._num_following[parent]:
                del self._num_following[parent]
                self._settle(parent)
        block.use_class = -1
        block.num_uses = 0
        self.changes.gone(block.names)
        block.names.clear()

    def _forget_content(self, block: Block) -> None:
        if block.has_content:
            self.num_evicted += 1
            if self.demote is not None and self.demote(block):
                block.names.clear()
                block.dependents = set()
        self._unname(block)
        block.tokens = bytearray()
        if self.on_forgotten is not None:
            self.on_forgotten(block)
        dependents = block.dependents
        block.dependents = set()
        for entry in dependents:
            entry.is_broken = True
            self._broken.append(entry)
