"""The engines: how each is now, and how it fared."""

from typing import Literal

import msgspec

EngineStatus = Literal["starting", "ready", "unsure", "down"]


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """The first five add up to `total`; `shared` cuts across, and `foreign` is a part of `active`.

    `foreign` is what other clients of the engine's server use: those that came by no gateway.
    """

    total: int
    free: int
    active: int
    leased: int
    best_effort: int
    cached: int
    shared: int = 0
    foreign: int = 0

    @property
    def num_in_use(self) -> int:
        """Blocks that a running sequence or a lease holds: every page counts the pool so."""
        return self.active + self.leased


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Since the engine's process began."""

    requests: int = 0
    copied_blocks: int = 0
    evicted_blocks: int = 0
    evicted_entries: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    preempted_requests: int = 0
    leases_expired: int = 0
    leases_sacrificed: int = 0
    leases_yielded: int = 0
    leases_dropped: int = 0
    leases_damaged: int = 0

    @property
    def leases_lost(self) -> dict[str, int]:
        """Leases that ended before their time, by what ended them."""
        return {
            "given up for running requests": self.leases_sacrificed,
            "yielded to another workspace": self.leases_yielded,
            "dropped by hand": self.leases_dropped,
            "damaged on disk": self.leases_damaged,
        }


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's store on disk; `refused` says why it runs without the one of its settings."""

    is_up: bool
    blocks: int = 0
    used_blocks: int = 0
    held_blocks: int = 0
    max_bytes: int = 0
    used_bytes: int = 0
    entries: int = 0
    leases: int = 0
    restored_leases: int = 0
    lost_leases: int = 0
    failed_writes: int = 0
    misses: dict[str, int] = {}
    refused: str | None = None


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    epoch: str = ""
    uptime_seconds: float
    running: int
    waiting: int
    blocks: Blocks
    counters: Counters = Counters()
    num_entries: int = 0
    num_leases: int = 0
    host_blocks: int = 0
    host_blocks_used: int = 0
    store: Store | None = None
    foreign_running: int = 0


class Guarantee(msgspec.Struct, frozen=True):
    """Whether an engine keeps one promise of the engine protocol, and by what, or why not."""

    name: str
    is_kept: bool
    note: str = ""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """`upstream`: the kind of server that an engine of that backend stands in front of.

    `attention`: what attends on the native engine, see `engine.protocol.Description`.
    """

    backend: str
    model: str
    upstream: str | None = None
    attention: str = ""
    guarantees: tuple[Guarantee, ...] = ()

    @property
    def server(self) -> str:
        """What computes."""
        return self.backend if self.upstream is None else f"{self.upstream}, as it is"


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    is_stale: bool = False
    names: int = 0
    running: int = 0
    waiting_tokens: int = 0
    recent_tokens: int = 0


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """`stats` is None while the engine does not answer."""

    name: str
    url: str
    status: EngineStatus
    is_draining: bool = False
    breaker: str = "closed"
    times_opened: int = 0
    description: Description | None = None
    stats: Stats | None = None
    routing: Routing = Routing()


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    written_tokens: int


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """Between the last turn of one process and the first of the next."""

    engine: str
    epoch: str
    last_ms: int
    first_ms: int
    lost: Lost


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """`engine` None is all."""

    engine: str | None
    turns: int
    prompt_tokens: int
    available_tokens: int
    captured_tokens: int
    delivered_tokens: int


class FleetHistory(msgspec.Struct, frozen=True, kw_only=True):
    restarts: list[Restart]
    attribution: list[Attribution]
