"""The block, the queue of blocks that nobody references, the entry that stands on blocks."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.cache.digests import ActiveAdapter
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
    # So many of the references are leases.
    lease_count: int = 0
    # The number of the last release by a sequence that computed with the block.
    last_use: int = 0
    # Set once the block is full and indexed.
    digest: Digest | None = None
    # Four bytes a token. They only grow until the block is allocated anew, so that content in use
    # is never overwritten.
    tokens: bytearray = field(default_factory=bytearray)
    # The best-effort entries that end with its content.
    dependents: "set[Entry]" = field(default_factory=set)
    # The gateway's names that are anchored here, with their tokens.
    names: dict[str, int] = field(default_factory=dict)
    # Counts the block for the owner; None: it has no useful content.
    share: "ScopeShare | None" = None
    queue: "BlockQueue | None" = None

    @property
    def tier(self) -> Tier:
        return self.home.tier

    @property
    def is_away(self) -> bool:
        """Whether the block is not on the device. Then its content must be brought before use."""
        return self.home.tier != "device"

    @property
    def is_promised(self) -> bool:
        """Whether a lease holds the block, or the store's copy of it."""
        return self.lease_count > 0 or any(entry.is_leased for entry in self.dependents)

    @property
    def has_content(self) -> bool:
        return self.digest is not None or bool(self.dependents)


class BlockQueue:
    """Unreferenced blocks, the least recently used first, a chain's tail first.

    `requeue` of their pool must be called when their dependents have changed.
    """

    def __init__(self) -> None:
        self.order = Order[Block](
            lambda block: (block.last_use, -block.index) if block.queue is self else None
        )
        self._size = 0
        self._best_effort: set[Block] = set()

    @property
    def num_best_effort(self) -> int:
        """How many of them a best-effort entry stands on."""
        return len(self._best_effort)

    def __len__(self) -> int:
        return self._size

    def append(self, block: Block) -> None:
        assert block.queue is None, "the block is in a queue already"
        block.queue = self
        self._size += 1
        if block.dependents:
            self._best_effort.add(block)
        self.order.push(block)

    def remove(self, block: Block) -> None:
        assert block.queue is self, "the block is in another queue"
        block.queue = None
        self._size -= 1
        self._best_effort.discard(block)

    def pop(self) -> Block:
        """Take the block that is reused next. The queue must not be empty."""
        block = self.order.pop()
        assert block is not None, "the queue is empty"
        self.remove(block)
        return block


@dataclass(slots=True, eq=False)
class ScopeShare:
    """One scope's blocks: `held` counts them. Those that are unreferenced wait to be reused."""

    owner: Digest
    held: int = 0
    unreferenced: BlockQueue = field(default_factory=BlockQueue)

    @property
    def is_reclaimable(self) -> bool:
        return bool(self.unreferenced)

    def pop(self) -> Block:
        """Take the scope's block that was used least recently. There must be one."""
        return self.unreferenced.pop()


class Recorded(NamedTuple):
    """What a line of the store's journal tells of an entry: its copy, and whether it is leased."""

    stored: list[Block]
    is_leased: bool


@dataclass(slots=True, eq=False)
class Entry:
    """An entry: a scope's first `tokens` tokens can be read until it expires.

    `ready_at`: the beginning of its writer's response. `expires_at`: the first moment at which it
    is expired. `kept_until`: the expiry without the refreshes of requests that have not begun to
    answer; those are in `refreshed_until`. `used_at`: the last write, read or refresh.

    `seconds` is a lifetime of its own, in place of the TTL's; None is the TTL's.

    `adapter` acts on some of its tokens; None: they are the base model's.

    `stored` are the blocks of a whole copy in the store, which the store holds for the entry; None
    without one. `recorded` is what the store's journal tells of it on the disk. `lease_tier` says
    where a leased entry's lease holds blocks.

    `name` is the gateway's name of exactly this prefix, if there is one. `is_broken`: the entry is
    best-effort, and one of its blocks was reused. `was_sacrificed`: its last lease was ended so
    that something else could run. `is_lapsed`: its time is over, and it is kept for requests that
    arrived before. `why_unleased` is None while the entry is leased. `is_asked_for`: a breakpoint
    with `hold` wrote or read it. Nothing else is ever leased.
    """

    scope: str
    key: Digest
    tokens: int
    ttl: Ttl
    blocks: list[Block]
    ready_at: float
    expires_at: float
    kept_until: float = 0.0
    refreshed_until: list[float] = field(default_factory=list)
    used_at: float = 0.0
    is_leased: bool = False
    is_broken: bool = False
    is_lapsed: bool = False
    was_sacrificed: bool = False
    why_unleased: BestEffortReason | None = None
    is_asked_for: bool = True
    reads: int = 0
    name: str | None = None
    stored: list[Block] | None = None
    recorded: Recorded | None = None
    lease_tier: Tier = "device"
    seconds: float | None = None
    adapter: ActiveAdapter | None = None

    @property
    def why_broken(self) -> MissReason:
        return "sacrificed" if self.was_sacrificed else "best_effort_evicted"

    @property
    def state(self) -> EntryState:
        return "leased" if self.is_leased else "best_effort"

    @property
    def holds_device(self) -> bool:
        """Whether its lease holds blocks of the device."""
        return self.is_leased and self.lease_tier == "device"

    @property
    def outlives_restarts(self) -> bool:
        """Whether the store's copy, and the lease if there is one, are on the disk and told there.

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
