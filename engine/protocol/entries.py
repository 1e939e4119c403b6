"""What became of a request's breakpoints and names in the engine's memory."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.protocol.ttls import Ttl

Tier = Literal["device", "host", "disk"]
EntryState = Literal["leased", "best_effort", "none"]

MissReason = Literal[
    "cold",
    "no_breakpoint",
    "no_boundary",
    "below_minimum",
    "ttl_expired",
    "best_effort_evicted",
    "sacrificed",
    "dropped",
    "adapter_unloaded",
    "lookback_exceeded",
    "in_progress_race",
    "not_told",
    "damaged",
    "grew",
]
"""`grew` is said of a breakpoint alone: what was read ends before it, and nothing ever stood
there."""

BestEffortReason = Literal[
    "automatic", "over_budget", "sacrificed", "yielded", "on_host", "on_disk", "no_hold"
]
"""`automatic`: no breakpoint with `hold` asked for a lease."""


class BreakpointReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one breakpoint."""

    segment: int
    state: EntryState
    tokens: int | None = None
    ttl: Ttl | None = None
    # A promise: only a `leased` entry has it.
    expires_in_seconds: float | None = None
    # Why there is no entry, or why nothing holds it.
    reason: MissReason | BestEffortReason | None = None
    # Why what stands up to the breakpoint was not read in full; None: it was. Engines of earlier
    # versions leave it out.
    missed: MissReason | UnsetType | None = UNSET
    # The fewest tokens that an entry has; told where the breakpoint has fewer (`below_minimum`).
    min_cache_tokens: int | UnsetType = UNSET


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the request's names are held now."""

    # Of each of the request's `names`, in its order.
    name_tokens: list[int]
    # So many of the first names are in `tier`.
    num_held: int
    # How many of the first names are under a lease, for `lease_seconds` more.
    num_leased: int = 0
    lease_seconds: float | None = None
    tier: Tier = "device"
    # Of each document, in order, the positions that are copied of it, up to its end.
    copied: list[tuple[int, int]] = []
