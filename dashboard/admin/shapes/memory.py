"""What is in the engines' memory now."""

import msgspec

from dashboard.admin.shapes.engines import Blocks, EngineStatus, Stats


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
