"""The block, the queue of blocks that nobody references, the entry that stands on blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.cache.digests import ChainKind
from engine.cache.ids import NOBODY, BlockId, Digest
from engine.cache.order import Order
from engine.protocol import BestEffortReason, EntryState, MissReason, Tier, Ttl


class Home(Protocol):
    """The part of `pool.BlockPool` that its blocks call."""

    tier: Tier

    def acquire(self, block: "Block") -> None: ...
    def release(self, block: "Block") -> None: ...
    def requeue(self, block: "Block") -> None: ...


@dataclass(slots=True, eq=False)
class Block:
    """One fixed-size piece of KV memory, and its content."""

    block_id: BlockId
    # The pool that it belongs to.
    home: Home
    # Its place in the chain that it was allocated for.
    index: int = 0
    # The digest of that chain's empty prefix, which stands for the scope.
    owner: Digest = NOBODY
    ref_count: int = 0
    # The number of references that are leases.
    lease_count: int = 0
    # The number of the latest use. The pool numbers all uses of its blocks.
    last_use: int = 0
    # The class of blocks that its worth is learned with; -1 while no prompt has used it.
    use_class: int = -1
    # When a prompt last used it, in seconds of the engine's clock.
    used_at: float = 0.0
    # How many prompts have used it.
    num_uses: int = 0
    # The digest by which it is found. None: it is not findable.
    digest: Digest | None = None
    # The digest of the block in front of it in its chain.
    parent: Digest | None = None
    # The token ids of its content, four bytes each. They are only appended to until the block is
    # allocated anew, so that content in use is never overwritten.
    tokens: bytearray = field(default_factory=bytearray)
    # The best-effort entries that end with its content.
    dependents: "set[Entry]" = field(default_factory=set)
    # The gateway's names that are anchored here, with the tokens of their prefixes.
    names: dict[str, int] = field(default_factory=dict)
    # The owner's share, which counts the block. None: the block has no useful content.
    share: "ScopeShare | None" = None
    # The queue that it waits in to be reused. None: it has a reference, or is empty.
    queue: "BlockQueue | None" = None
    # Its index in a list of the queue; -1 if the queue has no such list.
    place: int = -1

    @property
    def tier(self) -> Tier:
        return self.home.tier

    @property
    def is_away(self) -> bool:
        """Whether the block is below the device, so that its content must be copied before use."""
        return self.home.tier != "device"

    @property
    def is_promised(self) -> bool:
        """Whether a lease is on the block, or on the store's copy of an entry that stands on it."""
        return self.lease_count > 0 or any(entry.is_leased for entry in self.dependents)

    @property
    def has_content(self) -> bool:
        return self.digest is not None or bool(self.dependents)


class BlockQueue:
    """Unreferenced blocks, the least recently used first, a chain's tail first.

    When a block's dependents change, `requeue` of its pool must be called. `settle` must be called
    with a block when the first block that follows it in its chain comes, or the last one goes.
    """

    def __init__(self, blocks: Sequence[Block] = ()) -> None:
        """The queue begins with `blocks`, which are in no queue and have no dependents."""
        for block in blocks:
            block.queue = self
        self.order = Order[Block](
            lambda block: (block.last_use, -block.index) if block.queue is self else None, blocks
        )
        self._size = len(blocks)
        self._best_effort: set[Block] = set()

    @property
    def num_best_effort(self) -> int:
        """The number of its blocks that a best-effort entry stands on."""
        return len(self._best_effort)

    def __len__(self) -> int:
        return self._size

    def append(self, block: Block) -> None:
        assert block.queue is None, "the block is in a queue already"
        block.queue = self
        self._size += 1
        if block.dependents:
            self._best_effort.add(block)
        self._enter(block)

    def remove(self, block: Block) -> None:
        assert block.queue is self, "the block is in another queue"
        self._leave(block)
        block.queue = None
        self._size -= 1
        self._best_effort.discard(block)

    def settle(self, block: Block) -> None:
        """Note that what follows a queued block has changed. The order by recency stays."""

    def pop(self) -> Block:
        """Take the block that is reused next. The queue must not be empty."""
        block = self.order.pop()
        assert block is not None, "the queue is empty"
        self.remove(block)
        return block

    def _enter(self, block: Block) -> None:
        self.order.push(block)

    def _leave(self, block: Block) -> None:
        """The order notices by itself that the block is in no queue."""


@dataclass(slots=True, eq=False)
class ScopeShare:
    """One scope's blocks."""

    owner: Digest
    # The scope's blocks that wait to be reused.
    unreferenced: BlockQueue
    # The number of all its blocks.
    num_owned: int = 0

    @property
    def is_reclaimable(self) -> bool:
        return bool(self.unreferenced)

    def pop(self) -> Block:
        """Take the scope's block that makes way next. There must be one."""
        return self.unreferenced.pop()


class Recorded(NamedTuple):
    """What the store's journal says of an entry."""

    # The blocks of its copy. None: its only copy is in another program's file.
    stored: list[Block] | None
    is_leased: bool


@dataclass(slots=True, eq=False)
class Entry:
    """The KV of a scope's first `tokens` tokens, which can be read until it expires.

    Moments are in seconds of the engine's clock.
    """

    scope: str
    # The chain digest of its tokens.
    key: Digest
    tokens: int
    ttl: Ttl
    blocks: list[Block]
    # When its writer's response began.
    ready_at: float
    # The first moment at which it is expired.
    expires_at: float
    # When it would expire without the refreshes of requests that have not begun to answer.
    kept_until: float = 0.0
    # Until when each of those refreshes keeps it.
    refreshed_until: list[float] = field(default_factory=list)
    # The last write, read or refresh.
    used_at: float = 0.0
    is_leased: bool = False
    # It is best-effort, and one of its blocks was reused.
    is_broken: bool = False
    # Its time is over. It is kept for requests that arrived before.
    is_lapsed: bool = False
    # Its last lease was ended so that something else could run.
    was_sacrificed: bool = False
    # None while it is leased.
    why_unleased: BestEffortReason | None = None
    # A breakpoint with `hold` wrote or read it. Nothing else is ever leased.
    is_asked_for: bool = True
    reads: int = 0
    # The gateway's name of exactly this prefix, if there is one.
    name: str | None = None
    # The blocks of a whole copy, which the store keeps for the entry; None without a copy.
    stored: list[Block] | None = None
    # What the store's journal on the disk says of it. None: nothing.
    recorded: Recorded | None = None
    # The tier of the leased blocks, if it is leased.
    lease_tier: Tier = "device"
    # A lifetime of its own, in seconds. None: it has the TTL's.
    seconds: float | None = None
    # The kind that acts on some of its tokens. None: all are the model's.
    kind: ChainKind | None = None

    @property
    def why_broken(self) -> MissReason:
        return "sacrificed" if self.was_sacrificed else "best_effort_evicted"

    @property
    def state(self) -> EntryState:
        return "leased" if self.is_leased else "best_effort"

    @property
    def is_leased_on_device(self) -> bool:
        """Whether blocks of the device are leased for it."""
        return self.is_leased and self.lease_tier == "device"

    @property
    def outlives_restarts(self) -> bool:
        """Whether the journal on the disk has the store's copy, and the lease if there is one.

        A copy whose line in the journal is not on the disk yet is lost with the process.
        """
        recorded = self.recorded
        if recorded is None or recorded.stored is not self.stored:
            return False
        return recorded.is_leased or not self.is_leased

    @property
    def is_partly_away(self) -> bool:
        """Whether content must be brought to the device before it is read."""
        return any(block.is_away for block in self.blocks)

    def begins_with(self, packed: bytes) -> bool:
        """Compare all token ids. A digest alone never makes a hit."""
        return b"".join([block.tokens for block in self.blocks]).startswith(packed)

    def depend(self) -> None:
        """From now on the entry ends with its blocks' content. The last block goes first, so that a
        chain is reused from its tail."""
        for block in reversed(self.blocks):
            block.dependents.add(self)
            block.home.requeue(block)


class Refresh(NamedTuple):
    """A request's refresh of an expiry."""

    entry: Entry
    until: float
