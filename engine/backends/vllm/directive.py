"""What our engine server and our connector inside vLLM's scheduler say to each other.

The server knows requests, entries, names and time; the connector knows blocks. A `Directive`
travels with a request (as `kv_transfer_params[PARAM_KEY]`, plain JSON types); everything else is a
call of the scheduler's process between two of its steps, by `call_utility_async`; that works while
it is idle too. The connector has no clock: entries expire when the server says so.

vLLM's own routes let any client send `kv_transfer_params`. A directive therefore carries a secret
`token`, which the server makes at its start and gives to the connector with `bind`. A directive
with another token, or before a `bind`, is ignored.

| call | arguments → what `msgspec.convert` makes of the answer |
|---|---|
| `bind` | token → `Bound`; all earlier holds end |
| `switch_off` | why → None; all holds end, for good: the server's books failed |
| `report` | request_id (the directive's) → `Report`, or None for one never heard of |
| `release` | keys → how many were held (int); unknown keys are no error |
| `unlease` | keys → None; their leases are over, their entries stay as best-effort ones |
| `record` | records as JSON → None; the tier below tells its journal of entries |
| `losses` | → list of `Loss` since the last call |
| `core_stats` | → `CoreStats` |
"""

from typing import Literal

import msgspec

from engine.protocol.reports import BlockStats, StoreStats
from engine.store.journal import Put

PARAM_KEY = "holdfast"
CALL = "holdfast_{}"
"""The name of a call in vLLM's EngineCore."""

HoldState = Literal["leased", "best_effort", "none"]
LossReason = Literal["sacrificed", "yielded", "evicted", "reset"]


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """A tier below keeps `max_blocks` at most, and has these entries of an earlier process, which
    are held. The secret of their keys is `chain`."""

    max_blocks: int = 0
    chain: bytes = b""
    entries: list[Put] = []


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the request's first `tokens` as the entry `key`.

    `tokens` is floored to a multiple of what a hit can end at.
    `key` is the server's own id of the entry (hex), the same for the same prefix of one scope; a
    live hold of that key is kept as it is and reported. `expires_at` (seconds on the server's
    clock) only orders holds: the soonest to expire goes first when one must go. The later of two is
    kept. Without `is_asked_for` it gets no lease: its blocks follow vLLM's own order of reuse.
    """

    key: str
    tokens: int
    expires_at: float
    is_asked_for: bool = True


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Tell when the block that ends the request's first `tokens` is in memory no more.

    Told once, as a `Loss` of `key` with the reason `evicted` (or `reset`): no copy of the block's
    content has been left. `tokens` is a multiple of the block size; nothing is held for it.
    """

    key: str
    tokens: int


class Directive(msgspec.Struct, frozen=True, kw_only=True):
    """One request's part. `read` is the key of the entry that the look-up found, if any.

    Its blocks are kept in memory from the moment the scheduler's process hears of the request until
    the request was admitted or has ended, also if the entry expires meanwhile.
    Only when nothing else can run does a waiting request give them up. `lease_blocks` bounds what
    the scope may hold under contention, None for the engine's default. `unix_offset` is what Unix
    time is ahead of the server's clock.

    A request that ends without an output token leaves no hold that it made; one that ends later
    keeps all. `token` is the secret of `bind`.
    """

    request_id: str
    scope: str
    wants: list[Want]
    token: str = ""
    read: str | None = None
    lease_blocks: int | None = None
    watches: list[Watch] = []
    unix_offset: float = 0.0


class WantOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one want. `none`: the blocks were not all there when they should have been."""

    key: str
    state: HoldState
    tokens: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Complete when the request's first token is there; `held` is as it is when asked.

    `hit_tokens` came from vLLM's own cache, or were loaded by a connector beside ours, at every
    admission up to the first token, so that a request that was preempted is not told what it
    computed itself; at most vLLM's own `num_cached_tokens`, which is the first admission's.
    `computed_tokens`: positions of the prompt that were scheduled before the first token, each
    counted once.
    """

    request_id: str
    hit_tokens: int
    held: list[WantOutcome]
    computed_tokens: int = 0


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """What ended without the server's doing, in the order in which it did.

    `sacrificed` and `yielded` end a lease, the entry is best-effort; `evicted` and `reset` end the
    entry. A hold that was made anew since does not undo it: whoever asks for losses before it asks
    for the report of a request hears first what that request's holds came after.
    """

    key: str
    reason: LossReason


class CoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's blocks and requests. `preempted` are those that came back, ever.

    `leased_blocks` are those that leases hold, whoever else does, of `max_leased_blocks` that they
    may. `evicted_blocks` had content that had to go, and `leases_lowered` gave their room to others
    while a tier below (`store`) kept their content, since the start. `foreign` blocks are active
    ones that only requests without a directive use; `foreign_running` are such requests.
    """

    blocks: BlockStats
    running: int = 0
    waiting: int = 0
    foreign_running: int = 0
    preempted: int = 0
    leased_blocks: int = 0
    max_leased_blocks: int = 0
    evicted_blocks: int = 0
    leases_lowered: int = 0
    store: StoreStats | None = None
