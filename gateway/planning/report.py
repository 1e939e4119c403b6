"""What a plan answers. All rates are simulated; shares are 0 to 1."""

from typing import Literal

import msgspec


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated fleet under the traffic.

    `hit_rate` is the share of prompt tokens that entries gave; `reuse_rate` has automatic reuse
    too. `promise_kept` is the share of ended leases that lived to their expiry, None without any.
    `best_effort` is the share of breakpoints that got no lease. First-token times are in seconds,
    from arrival to the end of the prefill.
    """

    label: str
    engines: int
    device_gib: float
    host_gib: float
    disk_gib: float
    kv_dtype: str
    device_tokens: int
    hit_rate: float
    reuse_rate: float
    promise_kept: float | None
    leases_ended: int
    best_effort: float | None
    first_token_p50: float
    first_token_p95: float
    prefill_saved_seconds: float
    refused: int
    turns: int


class LruPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What one least-recently-used memory of this size would have given: exact, without leases."""

    gib: float
    reuse_rate: float


class KvFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of keys and values on one engine.

    `lease_tokens` is the median of the marked prefixes, of which `leases_that_fit` at one time.
    """

    bytes_per_token: int
    kv_gib: float
    weights_gib: float
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    lease_tokens: int | None
    leases_that_fit: int | None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What one purchase would change, as a sentence and as the two points that it compares."""

    kind: Literal["engine", "disk", "int8", "memory"]
    text: str
    before: Point
    after: Point


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`whole` is the asked fleet under all turns. The curves compare points of one stretch.

    `knee_gib` is the memory for keys and values, of all engines together, that gives 95 % of what
    unlimited memory would give (by `lru`).
    """

    simulated: Literal[True] = True
    text: str
    assumptions: list[str]
    turns: int
    prompt_tokens: int
    distinct_tokens: int
    stretch_turns: int
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
    seconds: float


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="progress"):
    """`share` of the work is done."""

    share: float


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="plan"):
    plan: Plan


class PlanFailed(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="error"):
    """`is_asked`: the request is wrong, and the message names the field."""

    message: str
    is_asked: bool


Line = Progress | Planned | PlanFailed
