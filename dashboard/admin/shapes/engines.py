"""Engines, as the gateway sees them."""

from typing import Literal

import msgspec

EngineStatus = Literal["starting", "ready", "down"]


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    free: int
    active: int
    leased: int
    best_effort: int
    cached: int


class Description(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    model: str


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    uptime_seconds: float
    running: int
    waiting: int
    blocks: Blocks
    num_leases: int = 0


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine; `stats` only while it answers."""

    name: str
    url: str
    status: EngineStatus
    description: Description | None = None
    stats: Stats | None = None
