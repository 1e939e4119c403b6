"""The stream of events: which names come, go, and lose their lease."""

from typing import Literal

import msgspec

from engine.protocol.entries import Tier


class HeldName(msgspec.Struct, frozen=True):
    digest: str
    tokens: int


class ChainHeld(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """These names are in `tier`."""

    seq: int
    # Names of prefixes of one another, the shortest prefix first.
    names: list[HeldName]
    tier: Tier = "device"
    # How many of the first names are under a lease, for `lease_seconds` more.
    num_leased: int = 0
    lease_seconds: float | None = None


class ChainGone(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """These names are no longer in memory."""

    seq: int
    names: list[str]
    reason: Literal["evicted", "dropped"]


class LeaseEnded(msgspec.Struct, frozen=True, kw_only=True, tag="lease_ended"):
    """A lease ended. The blocks may still be in memory."""

    seq: int
    entry: str
    # The names that lost the lease.
    names: list[str]
    reason: Literal["expired", "sacrificed", "yielded", "dropped", "damaged"]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """Everything that is held as of `seq`. The next events have `seq + 1`, `seq + 2`, …"""

    seq: int
    epoch: str
    chains: list[ChainHeld]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent when nothing happened for a while; `seq` is the last event's."""

    seq: int


Event = ChainHeld | ChainGone | LeaseEnded

EventFrame = Snapshot | Event | Heartbeat
