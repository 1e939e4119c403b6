"""What memory, tiers and engines would give, simulated. Shares are 0 to 1, times seconds."""

import msgspec


class PlanChoices(msgspec.Struct, frozen=True, kw_only=True):
    models: list[str]
    kv_dtypes: list[str]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated fleet. `device_gib` is for keys and values, on each engine."""

    label: str
    engines: int
    device_gib: float
    host_gib: float
    disk_gib: float
    hit_rate: float
    reuse_rate: float
    promise_kept: float | None
    best_effort: float | None
    first_token_p50: float
    first_token_p95: float
    prefill_saved_seconds: float
    refused: int
    turns: int


class LruPoint(msgspec.Struct, frozen=True, kw_only=True):
    gib: float
    reuse_rate: float


class KvFigures(msgspec.Struct, frozen=True, kw_only=True):
    bytes_per_token: int
    kv_gib: float
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    lease_tokens: int | None
    leases_that_fit: int | None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    text: str
    before: Point
    after: Point


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    assumptions: list[str]
    kv: KvFigures
    whole: Point
    memory: list[Point]
    engines: list[Point]
    tiers: list[Point]
    lru: list[LruPoint]
    ceiling: float
    knee_gib: float
    knee_text: str
    buys: list[Change]


class PlanLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the stream: `kind` is `progress`, `plan` or `error`."""

    kind: str
    share: float = 0.0
    plan: Plan | None = None
    message: str = ""
