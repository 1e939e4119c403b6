"""What our engine server and our connector inside vLLM's scheduler say to each other.

The server knows requests, entries, names and time. The connector knows blocks. A `Directive`
travels with a request, as `kv_transfer_params[PARAM_KEY]` in plain JSON types. Everything else is a
call by `call_utility_async`. The scheduler's process answers a call between two of its steps, or at
once while it is idle. The connector has no clock: entries expire when the server says so.

vLLM's own routes let any client send `kv_transfer_params`. A directive therefore carries a secret
`token`. The server makes it at its start and gives it to the connector with `bind`. A directive
with another token, or before a `bind`, is ignored.

| call | arguments → what `msgspec.convert` makes of the answer |
|---|---|
| `bind` | token → `Bound`. All earlier entries end |
| `switch_off` | reason → None. All entries end for good, because the server's books failed |
| `report` | request_id of a directive → `Report`. None for one that the connector does not know |
| `release` | keys → how many of these entries there were (int). Unknown keys are no error |
| `unlease` | keys → None. Their leases end, and their entries stay as best-effort entries |
| `record` | records as JSON → None. The tier below writes them to its journal |
| `losses` | → list of each `Loss` since the last call |
| `core_stats` | → `CoreStats` |
"""

from typing import Literal

import msgspec

from engine.protocol import EntryState
from engine.protocol.reports import BlockStats, StoreStats
from engine.store.journal import Put

PARAM_KEY = "holdfast"
CALL = "holdfast_{}"
"""The name of a call in vLLM's EngineCore."""

LossReason = Literal["sacrificed", "yielded", "evicted", "reset"]


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What the tier below has. Without a tier all fields have their defaults."""

    # The most blocks that the tier keeps.
    max_blocks: int = 0
    # The secret of its entries' keys.
    chain: bytes = b""
    # The entries that it has from an earlier process. They live on.
    entries: list[Put] = []


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """Make the request's first tokens an entry. A live entry of that key stays, leased if it can
    be."""

    # The server's own id of the entry (hex), the same for the same prefix of one scope.
    key: str
    # The connector floors it to an offset at which a hit can end.
    tokens: int
    # In seconds on the server's clock. It only orders entries: the lease that would expire first
    # yields first, and is sacrificed first. A live entry keeps the later of the two ends.
    expires_at: float
    # False: the entry gets no lease, and its blocks follow vLLM's own order of reuse.
    is_asked_for: bool = True


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Tell the server when the block that ends the request's first tokens is reused.

    Nothing keeps the block. The server hears of its reuse once, as a `Loss` of `key` with the
    reason `evicted`. It hears so at once if the block is not there.
    """

    key: str
    # A multiple of the block size.
    tokens: int


class Directive(msgspec.Struct, frozen=True, kw_only=True):
    """What one request reads and writes.

    If the request ends without an output token, the entries that it made end with it. If it ends
    later, they stay.
    """

    request_id: str
    scope: str
    wants: list[Want]
    # The secret of `bind`.
    token: str = ""
    # The key of the entry that the look-up found, if any. Its blocks stay in memory from the moment
    # the scheduler's process hears of the request until the request is admitted or has ended, even
    # if the entry expires meanwhile. A waiting request gives them up only if nothing else can run.
    read: str | None = None
    # The most blocks that the scope's leases may claim from other scopes. None is the engine's
    # default.
    lease_blocks: int | None = None
    watches: list[Watch] = []
    # Unix time less the server's clock, in seconds.
    unix_offset: float = 0.0


class WantOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one want."""

    key: str
    # `none`: not all of its blocks were there.
    state: EntryState
    tokens: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a request read, wrote and computed. It is complete with the request's first token."""

    request_id: str
    # Tokens that came from vLLM's own cache, or from a connector beside ours, at every admission up
    # to the first token. Tokens that a preempted request computed itself are not among them. At
    # most vLLM's own `num_cached_tokens`, which is the first admission's.
    hit_tokens: int
    # The state of each want at the moment of the question.
    held: list[WantOutcome]
    # Positions of the prompt that were scheduled before the first token, each counted once.
    computed_tokens: int = 0


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A lease, an entry or a watched block that is lost without the server's doing.

    `losses` has them in the order in which they happened, and those of watches last. A later entry
    of the same key does not undo a loss. If the server asks for losses before it asks for a
    request's report, it hears first of losses from before that request's entries were made.
    """

    key: str
    # `sacrificed` and `yielded` end the lease alone: the entry goes on as best-effort. `evicted`
    # and `reset` end the entry.
    reason: LossReason


class CoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's blocks and requests. Counters count from the start."""

    # Its `foreign` blocks are active ones that only requests without a directive use.
    blocks: BlockStats
    running: int = 0
    waiting: int = 0
    # Running requests without a directive.
    foreign_running: int = 0
    # How often a preempted request was admitted again.
    preempted: int = 0
    # Blocks that leases hold, whether or not a request uses them too.
    leased_blocks: int = 0
    # The most blocks that leases may hold.
    max_leased_blocks: int = 0
    # Blocks whose content had to go.
    evicted_blocks: int = 0
    # How often a lease gave up its blocks while the tier below kept their content.
    leases_lowered: int = 0
    # The tier below; None without one.
    store: StoreStats | None = None
