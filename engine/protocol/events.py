"""Events tell by names what an engine holds: one event for a chain, not one for a block."""

from typing import Literal

import msgspec

from engine.protocol.values import Tier


class HeldName(msgspec.Struct, frozen=True):
    digest: str
    tokens: int


class ChainHeld(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """These names (a chain, shortest first) are in `tier`, the leased ones for `lease_seconds`."""

    seq: int
    names: list[HeldName]
    tier: Tier = "device"
    num_leased: int = 0
    lease_seconds: float | None = None


class ChainGone(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """These names are no longer in memory."""

    seq: int
    names: list[str]
    reason: Literal["evicted", "dropped"]


class LeaseEnded(msgspec.Struct, frozen=True, kw_only=True, tag="lease_ended"):
    """A lease ended; `names` are those that lost it. The blocks may still be in memory."""

    seq: int
    entry: str
    names: list[str]
    reason: Literal["expired", "sacrificed", "yielded", "dropped", "damaged"]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """Everything held as of `seq`; events after it follow with `seq + 1`, `seq + 2`, …"""

    seq: int
    epoch: str
    chains: list[ChainHeld]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent when nothing happened for a while; `seq` is the last event's."""

    seq: int


Event = ChainHeld | ChainGone | LeaseEnded
EventFrame = Snapshot | ChainHeld | ChainGone | LeaseEnded | Heartbeat
