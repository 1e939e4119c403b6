"""Plans of memory, engines and tiers, as the admin API answers with them.

All figures are simulated, on the product's own scheduler and pool. Times are in seconds.
"""

from typing import Literal

import msgspec


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated fleet under the traffic."""

    label: str
    engines: int
    # Tokens of one engine's memory for keys and values, in each tier.
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    # The share of prompt tokens that entries gave.
    hit_rate: float
    # The same, with automatic reuse.
    reuse_rate: float
    # The share of ended leases that lived to their expiry; None where none ended.
    promise_kept: float | None
    leases_ended: int
    # The share of breakpoints that got no lease; None where nothing was marked.
    best_effort: float | None
    # None where no turn of the range was timed, and for a fleet with a tier below the device,
    # since nobody measured the way back from there.
    first_token_p50: float | None
    first_token_p95: float | None
    prefill_saved_seconds: float | None
    refused: int
    turns: int


class LruPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What one least-recently-used memory of this size would have given: exact, without leases."""

    tokens: int
    reuse_rate: float


class PlannedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one engine, as it was planned with."""

    # Bytes of a token's keys and values; 0 is not known.
    bytes_per_token: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    # The median of the marked prefixes, and how many leases of it fit at one time.
    lease_tokens: int | None
    leases_that_fit: int | None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What one change would give, as a sentence and as the two points that it compares."""

    kind: Literal["engine", "memory", "disk"]
    text: str
    before: Point
    after: Point


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The planned fleet under the traffic, and others beside it."""

    simulated: Literal[True] = True
    text: str
    # What makes the figures another's.
    warnings: list[str] = []
    assumptions: list[str]
    turns: int
    prompt_tokens: int
    distinct_tokens: int
    # Turns in a row under which the curves' points are compared.
    stretch_turns: int
    engine: PlannedMemory
    # The planned fleet under all turns.
    whole: Point
    memory: list[Point]
    engines: list[Point]
    tiers: list[Point]
    lru: list[LruPoint]
    # What unlimited memory would give.
    ceiling: float
    # The memory of all engines together that gives 95 % of the ceiling, by `lru`.
    knee_tokens: int
    knee_text: str
    changes: list[Change]
    # How long the plan took.
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


class PlannedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that serve one model now: what a plan begins with."""

    model: str
    engines: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    bytes_per_token: int


class PlanChoices(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan can begin with."""

    engines: list[PlannedEngine]
