"""What is in an engine's memory: blocks in their order, entries, and how long entries lived."""

import msgspec

from engine.protocol.stats import BlockStats
from engine.protocol.values import BestEffortReason, EntryState, Tier, Ttl


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """`counts[i]` values were at most `edges_seconds[i]`; the last count is of all above."""

    edges_seconds: list[float]
    counts: list[int]


class Lifetimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times in the lives of entries since the epoch began.

    `expired` and `evicted` are how long such entries lived. `idle_before_eviction` is how long an
    evicted entry had not been used. `reuse_gaps` are from one use of an entry to its next.
    """

    expired: Histogram
    evicted: Histogram
    idle_before_eviction: Histogram
    reuse_gaps: Histogram


class BlockCell(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks by what holds them, as in `BlockStats`: the first five add up."""

    free: int = 0
    active: int = 0
    leased: int = 0
    best_effort: int = 0
    cached: int = 0
    shared: int = 0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What is in an engine's memory.

    `cells` are the pool in the order of its blocks, `blocks_per_cell` each (the last may have
    fewer), at most MAX_CELLS; none without the capability `block_map`. Cells are read between
    steps, a part of the pool at a time, so they may be of moments some steps apart.
    `unused_tokens` is the room in `referenced_blocks` that no token is in; None without a map.
    `host` is the host tier; None without one.
    """

    epoch: str
    block_size: int
    blocks_per_cell: int = 0
    cells: list[BlockCell] = []
    referenced_blocks: int | None = None
    unused_tokens: int | None = None
    host: BlockStats | None = None
    lifetimes: Lifetimes


class EntryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One live entry; `entry` (32 hex digits) identifies it within its scope.

    `name` is the gateway's name of just this prefix, where it is known. `shared_by` counts the
    sequences that hold its deepest full block at the moment. `reason` says why nothing holds an
    entry that is `best_effort`. It ends at `expires_in_seconds` at the latest. `tier` is where its
    first block is. An entry that `is_stored` outlives a restart.
    """

    entry: str
    scope: str
    tokens: int
    blocks: int
    ttl: Ttl
    state: EntryState
    expires_in_seconds: float
    reads: int
    name: str | None = None
    shared_by: int = 0
    reason: BestEffortReason | None = None
    tier: Tier = "device"
    is_stored: bool = False
