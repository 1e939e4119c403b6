"""What our engine server and our connector inside vLLM's scheduler say to each other.

The server knows requests, entries, names and time; the connector knows blocks. A `Directive`
travels with a request (as `kv_transfer_params[PARAM_KEY]`, plain JSON types); everything else is a
call of the scheduler's process between two of its steps. The connector has no clock: entries expire
when the server says `release`.
"""

from typing import Literal

import msgspec

PARAM_KEY = "holdfast"

HoldState = Literal["leased", "best_effort", "none"]
LossReason = Literal["sacrificed", "yielded", "evicted", "reset"]


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the request's first `tokens` (a multiple of the block size) as the entry `key`.

    `key` is the server's own id of the entry (hex), the same for the same prefix of one scope; a
    live hold of that key is kept as it is and reported. `expires_at` (seconds on the server's
    clock) only orders holds: the soonest to expire goes first when one must go.
    """

    key: str
    tokens: int
    expires_at: float


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
    the request was admitted or has ended, also if the entry expires meanwhile; `read_tokens` long.
    `lease_blocks` bounds what the scope may hold under contention, None for the engine's default.
    """

    request_id: str
    scope: str
    wants: list[Want]
    read: str | None = None
    read_tokens: int = 0
    lease_blocks: int | None = None
    watches: list[Watch] = []


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one want. `none`: the blocks were not all there when they should have been."""

    key: str
    state: HoldState
    tokens: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Complete when the request's first token is there.

    `hit_tokens` came from vLLM's own cache at admission (its `num_cached_tokens`);
    `read_tokens` is as much of them as the directive's entry covers.
    """

    request_id: str
    hit_tokens: int
    read_tokens: int
    held: list[Held]


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that ended without the server's doing."""

    key: str
    reason: LossReason


class HoldStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks by what holds them (`BlockStats` says how it counts), and totals since the start.

    free_blocks: unreferenced, without content; hashed_blocks: unreferenced, with content, those of
    best-effort entries among them; best_effort_blocks: of hashed_blocks, those that an entry is
    lost with; leased_blocks: under a lease; lease_only_blocks: of those, referenced by leases only.
    `running` and `waiting` are the scheduler's requests.
    """

    total_blocks: int
    free_blocks: int
    hashed_blocks: int
    leased_blocks: int
    max_leased_blocks: int
    best_effort_blocks: int = 0
    lease_only_blocks: int = 0
    shared_blocks: int = 0
    evicted_blocks: int = 0
    preempted_requests: int = 0
    running: int = 0
    waiting: int = 0
    num_leases: int
    num_best_effort: int
    sacrificed: int = 0
    yielded: int = 0
    denied: int = 0
