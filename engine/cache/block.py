"""The block, and the entry that stands on blocks."""

from dataclasses import dataclass, field
from typing import Protocol

from engine.cache.ids import NOBODY, BlockId, Digest
from engine.protocol import BestEffortReason, EntryState, MissReason, Ttl


class Home(Protocol):
    """What a block asks of the pool that it belongs to; it is `pool.BlockPool`."""

    is_host: bool

    def acquire(self, block: "Block") -> None: ...
    def release(self, block: "Block") -> None: ...
    def requeue(self, block: "Block") -> None: ...


class Queue(Protocol):
    """What unreferenced blocks wait in; it is one of `free_list`."""

    def append(self, block: "Block") -> None: ...
    def remove(self, block: "Block") -> None: ...


class Share(Protocol):
    """What one scope holds of a pool; it is `fairness.ScopeShare`."""

    held: int
    rank: int

    @property
    def owner(self) -> Digest: ...
    @property
    def cached(self) -> Queue: ...
    @property
    def stale(self) -> Queue: ...
    @property
    def best_effort(self) -> Queue: ...


@dataclass(slots=True, eq=False)
class Block:
    """One fixed-size piece of KV memory and what is known of its content.

    `tokens` (4 bytes each) only ever grows until the block is allocated anew: content that somebody
    may rely on is never overwritten. `digest` is set once the block is full and indexed.
    `lease_count` says how many of `ref_count` are leases, `idle_count` how many of these are idle.
    `last_use` numbers releases by whoever computed with it. `dependents` are the best-effort
    entries that die with the block's content, `names` the gateway's names anchored here. `home` is
    the pool it belongs to, `index` its place in the chain that it was allocated for, `owner` the
    digest of that chain's empty prefix, so of its scope. `share` counts it for the owner; None
    when nothing of use is in it.
    """

    block_id: BlockId
    home: Home
    index: int = 0
    owner: Digest = NOBODY
    ref_count: int = 0
    lease_count: int = 0
    idle_count: int = 0
    last_use: int = 0
    digest: Digest | None = None
    tokens: bytearray = field(default_factory=bytearray)
    dependents: "set[Entry]" = field(default_factory=set)
    names: dict[str, int] = field(default_factory=dict)
    share: Share | None = None
    queue: Queue | None = None
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def is_idle(self) -> bool:
        """Leased, and by idle leases alone."""
        return 0 < self.lease_count == self.idle_count

    @property
    def is_host(self) -> bool:
        """In host memory: its content must be brought back before it can be used."""
        return self.home.is_host

    @property
    def has_content(self) -> bool:
        return self.digest is not None or bool(self.dependents)


@dataclass(slots=True, eq=False)
class Entry:
    """What a breakpoint wrote: one scope's first `tokens` tokens can be read until it expires.

    `ready_at`: when its writer's response began; `expires_at`: the first moment it is dead.
    `kept_until`: the same without the refreshes of requests that have not begun to answer, each
    of which is in `refreshed_until`.
    `used_at`: when it was written, read or refreshed last; `is_idle`: that is so long ago that it
    is not spared any more, and its lease counts as an idle one. `name` is the gateway's for just
    this prefix, where one was told.
    `is_broken`: best-effort, and one of its blocks was reused. `was_sacrificed`: its last lease
    was taken so that something else could run. `is_lapsed`: its time is over, and it is kept for
    those who arrived before. `why_unleased` is None while it is leased.
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
    is_idle: bool = False
    is_leased: bool = False
    is_broken: bool = False
    is_lapsed: bool = False
    was_sacrificed: bool = False
    why_unleased: BestEffortReason | None = None
    reads: int = 0
    name: str | None = None

    @property
    def why_broken(self) -> MissReason:
        return "sacrificed" if self.was_sacrificed else "best_effort_evicted"

    @property
    def state(self) -> EntryState:
        return "leased" if self.is_leased else "best_effort"
