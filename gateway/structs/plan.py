"""Plans of memory, engines and tiers, as the admin API answers with them.

All figures are simulated, with the product's own scheduler and pool. Times are in seconds.

OpenAPI shows the docstrings of these structs. So each docstring describes the struct's fields, one
line a field.
"""

from typing import Literal

import msgspec


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated fleet under the traffic.

    - `device_tokens`, `host_tokens`, `disk_tokens`: the tokens of keys and values that one engine's
      memory holds, in each tier
    - `hit_rate`: the share of prompt tokens that were read from entries, 0 to 1
    - `reuse_rate`: the share of prompt tokens that were read or reused automatically, 0 to 1
    - `promise_kept`: the share of ended leases that lived to their end; null if no lease ended
    - `best_effort`: the share of breakpoints that got no lease; null if nothing was marked
    - `first_token_p50`, `first_token_p95`: percentiles of the time to the first token; null if no
      turn of the range was timed, and for a fleet with a tier below the device, because nobody
      measured the way back from there
    - `prefill_saved_seconds`: the time of the prefill that reuse avoided; null if it is not known
    - `refused`: how many turns the fleet refused
    """

    label: str
    engines: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    hit_rate: float
    reuse_rate: float
    promise_kept: float | None
    leases_ended: int
    best_effort: float | None
    first_token_p50: float | None
    first_token_p95: float | None
    prefill_saved_seconds: float | None
    refused: int
    turns: int


class LruPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What one least-recently-used memory of this size would have reused. It is exact, and it is
    without leases."""

    tokens: int
    reuse_rate: float


class PlannedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one engine, as the plan assumes it.

    - `bytes_per_token`: the bytes of a token's keys and values; 0: not known
    - `lease_tokens`: the median of the marked prefixes' tokens
    - `leases_that_fit`: how many leases of that size fit at one time
    """

    bytes_per_token: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    lease_tokens: int | None
    leases_that_fit: int | None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What one change would give: a sentence, and the two points that the sentence compares."""

    kind: Literal["engine", "memory", "disk"]
    text: str
    before: Point
    after: Point


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The planned fleet under the traffic, and other fleets beside it.

    - `text`: a sentence on what was planned
    - `warnings`: why the figures may not be those of the whole range
    - `distinct_tokens`: the prompt tokens, where tokens that prompts share count once
    - `stretch_turns`: how many turns in a row every point except `whole` is simulated under
    - `whole`: the planned fleet under all turns
    - `memory`, `engines`, `tiers`: fleets with other sizes of memory, other numbers of engines, and
      other tiers
    - `lru`: the exact curve of one memory without leases
    - `ceiling`: the share of prompt tokens that unlimited memory would reuse, 0 to 1
    - `knee_tokens`: the memory of all engines together that reuses 95 % of the ceiling, by `lru`
    - `seconds`: how long the plan took
    """

    simulated: Literal[True] = True
    text: str
    warnings: list[str] = []
    assumptions: list[str]
    turns: int
    prompt_tokens: int
    distinct_tokens: int
    stretch_turns: int
    engine: PlannedMemory
    whole: Point
    memory: list[Point]
    engines: list[Point]
    tiers: list[Point]
    lru: list[LruPoint]
    ceiling: float
    knee_tokens: int
    knee_text: str
    changes: list[Change]
    seconds: float


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="progress"):
    """How far a plan is: the share of the work that is done, 0 to 1."""

    share: float


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="plan"):
    """The plan, when it is made."""

    plan: Plan


class PlanFailed(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="error"):
    """No plan could be made.

    - `is_asked`: whether the request is wrong; then the message names the field
    """

    message: str
    is_asked: bool


Line = Progress | Planned | PlanFailed


class PlannedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that serve one model now. A plan begins with them."""

    model: str
    engines: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    bytes_per_token: int


class PlanChoices(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that a plan can begin with, by model."""

    engines: list[PlannedEngine]
