"""What engines hold now, and how they fared: leases, memory, restarts, samples."""

import msgspec

from dashboard.admin.shapes.engines import EngineStatus
from dashboard.admin.shapes.savings import Prefix


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    entry: str
    tokens: int
    blocks: int
    ttl: str
    state: str
    expires_in_seconds: float
    reads: int
    name: str | None = None
    shared_by: int = 0


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One live entry; `prefix` is what the ledger knows of it."""

    engine: str
    workspace: str | None
    entry: Entry
    prefix: Prefix | None = None


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    entry: str


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """The first five add up to `total`; `shared` cuts across."""

    total: int
    free: int
    active: int
    leased: int
    best_effort: int
    cached: int
    shared: int = 0


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Since the engine's process began."""

    requests: int = 0
    copied_blocks: int = 0
    evicted_blocks: int = 0
    evicted_entries: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    preempted_requests: int = 0
    leases_expired: int = 0
    leases_sacrificed: int = 0
    leases_yielded: int = 0
    leases_dropped: int = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    epoch: str = ""
    uptime_seconds: float
    running: int
    waiting: int
    blocks: Blocks
    counters: Counters = Counters()
    num_entries: int = 0
    num_leases: int = 0
    host_blocks: int = 0
    host_blocks_used: int = 0


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """`counts[i]` were at most `edges_seconds[i]`; the last count is of all above."""

    edges_seconds: list[float]
    counts: list[int]


class Lifetimes(msgspec.Struct, frozen=True, kw_only=True):
    expired: Histogram
    evicted: Histogram
    idle_before_eviction: Histogram
    reuse_gaps: Histogram


class Cell(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks by what holds them."""

    free: int = 0
    active: int = 0
    leased: int = 0
    best_effort: int = 0
    cached: int = 0
    shared: int = 0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """No `cells` where the engine has no map."""

    block_size: int
    blocks_per_cell: int = 0
    cells: list[Cell] = []
    referenced_blocks: int | None = None
    unused_tokens: int | None = None
    host: Blocks | None = None
    lifetimes: Lifetimes


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    status: EngineStatus
    backend: str | None
    model: str | None
    kv_bytes_per_token: int = 0
    stats: Stats | None = None
    memory: Memory | None = None


class Description(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    model: str


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    is_stale: bool = False
    names: int = 0
    running: int = 0
    waiting_tokens: int = 0
    recent_tokens: int = 0


class EngineNow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    url: str
    status: EngineStatus
    is_draining: bool = False
    breaker: str = "closed"
    times_opened: int = 0
    description: Description | None = None
    stats: Stats | None = None
    routing: Routing = Routing()


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    written_tokens: int


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """Between the last turn of one process and the first of the next."""

    engine: str
    epoch: str
    last_ms: int
    first_ms: int
    lost: Lost


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """`engine` None is all."""

    engine: str | None
    turns: int
    prompt_tokens: int
    available_tokens: int
    captured_tokens: int
    delivered_tokens: int


class FleetHistory(msgspec.Struct, frozen=True, kw_only=True):
    restarts: list[Restart]
    attribution: list[Attribution]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    opened_ms: int
    engine: str | None
    prompt_tokens: int
    cache_read_tokens: int
    first_token_seconds: float


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    start_ms: int
    turns: int
    p50: float
    p95: float


class LatencySamples(msgspec.Struct, frozen=True, kw_only=True):
    since_ms: int
    until_ms: int
    samples: list[Sample]
    overhead: list[Overhead]
