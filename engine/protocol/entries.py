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
"""Why something was not read. Only a breakpoint has `grew`: the read ended before it, and no entry
ever ended there."""

BestEffortReason = Literal[
    "automatic", "over_budget", "sacrificed", "yielded", "on_host", "on_disk", "no_hold"
]
"""Why nothing holds an entry. `automatic`: no breakpoint with `hold` asked for a lease."""


class BreakpointReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one breakpoint."""

    segment: int
    state: EntryState
    tokens: int | None = None
    ttl: Ttl | None = None
    # The rest of the lease. Only a `leased` entry has it, for it is a promise.
    expires_in_seconds: float | None = None
    # Why there is no entry, or why nothing holds it.
    reason: MissReason | BestEffortReason | None = None
    # Why the prefix was not read in full; None: it was. Engines of earlier versions leave it out.
    missed: MissReason | UnsetType | None = UNSET
    # The fewest tokens that an entry may have. Only the reason `below_minimum` comes with it.
    min_cache_tokens: int | UnsetType = UNSET


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the request's names are held now."""

    # The tokens up to each of the request's `names`, in their order.
    name_tokens: list[int]
    # How many of the first names are in `tier`.
    num_held: int
    # How many of the first names are under a lease, for `lease_seconds` more.
    num_leased: int = 0
    lease_seconds: float | None = None
    tier: Tier = "device"
    # For each document, in prompt order, the positions [start, end) copied from its entry.
    copied: list[tuple[int, int]] = []
