"""Engines, leases, workspaces and keys, as the admin API answers with them."""

from datetime import datetime
from typing import Any, Literal

import msgspec

from engine.protocol.reports import Description, EntryInfo, Holding, Memory, ModelIdentity, Stats
from gateway.structs.usage import PrefixLook, PrefixReport


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """What a number means.

    - `formula`: how the number is computed from fields of the ledger or of the engines
    """

    title: str
    formula: str
    unit: str


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """An id of `GET /v1/models`.

    - `root`: an adapter's name, or the id that an alias stands for
    - `parent`: an adapter's model
    - `sees`: whether the model is shown images; any other model gets a placeholder, or its request
      is refused (`HOLDFAST_UNREADABLE`)
    """

    id: str
    root: str | None
    parent: str | None
    sees: bool = False


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What this gateway and this key are.

    - `now_ms`: the gateway's clock
    - `workspace`: the only workspace that this key sees; null: it sees all
    - `sample`: whether the ledger holds made-up turns
    - `may_send`: whether this key can call the model APIs here
    - `may_change`: whether this key can make the changes of the admin API
    - `first_ms`: when the first turn came that is in the ledger and that this key may see
    - `has_placeholder_prices`: whether money is counted at the shipped price
    - `workspaces`, `engines`, `models`: the values for filters: the names that exist now, and the
      names in turns of the last 31 days
    - `served`: the models that engines have now
    - `listed`: the ids of `GET /v1/models`
    - `definitions`: what each number of the admin API means
    """

    now_ms: int
    workspace: str | None
    sample: bool
    may_send: bool
    may_change: bool
    first_ms: int | None
    has_placeholder_prices: bool
    workspaces: list[str]
    engines: list[str]
    models: list[str]
    served: list[str]
    listed: list[ListedModel]
    definitions: dict[str, Definition]


BreakerState = Literal["closed", "open", "half_open"]
EngineStatus = Literal["starting", "ready", "unsure", "down", "refused"]
"""A `refused` engine answers, but gets no turns, because its model's name belongs to another
model."""


class OwnedId(msgspec.Struct, frozen=True, kw_only=True):
    """The id of a model or of an adapter, or `*`, which stands for the ids that name no model.

    The model that first served an id owns it, unless an operator gave the id to another model.

    - `engine_model`: the name that the engine gave the owner
    - `identity`: all that engines said of the owner; for an adapter, only its `weights`
    - `since`: since when this model owns the id
    """

    id: str
    engine_model: str
    identity: ModelIdentity
    since: datetime


class RoutingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What this gateway knows of an engine for routing.

    - `is_stale`: the engine was silent for so long that its `names` no longer count
    - `names`: how many prefixes the engine holds, by its events
    - `forgotten_names`: how many prefixes this gateway has dropped because it knew too many
    - `running`: the turns that this gateway has at the engine
    - `waiting_tokens`: the tokens of turns without an answer yet
    - `recent_tokens`: the tokens of recent turns, which count less with time
    """

    is_stale: bool
    names: int
    forgotten_names: int
    running: int
    waiting_tokens: int
    recent_tokens: int


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    - `detail`: what the engine last said about its readiness
    - `ids`: the ids of `/v1/models` for which the engine answers
    - `notes`: which parts of the engine are not used, and why
    - `description`: how the engine last described itself
    """

    name: str
    url: str
    status: EngineStatus
    is_draining: bool
    breaker: BreakerState
    times_opened: int
    detail: dict[str, Any]
    ids: list[str]
    notes: list[str]
    description: Description | None
    stats: Stats | None
    routing: RoutingReport


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """The engine is out of the fleet, and gets no more turns.

    The engine keeps its last counts, which no gateway has acknowledged.
    """

    name: str


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of the device, and whose they are.

    - `workspace`: null if no workspace that is known here has their scope
    - `key_id`: the key of the newest request that wrote exactly this prefix; null if no request of
      the ledger ended with it, and for content without an entry
    - `key`: the name of that key
    - `look`: what the last request of the prefix tells about it
    """

    workspace: str | None
    key_id: str | None
    key: str | None
    look: PrefixLook | None
    holding: Holding


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one engine.

    - `kv_bytes_per_token`: what a token's keys and values take; 0 if the engine does not say
    - `state_blocks`: the blocks of one recurrent state; 0 for a model without linear layers
    - `stats`, `memory`: null if the engine does not answer
    - `held`: the holdings of `memory`, with the names of those that have them
    """

    name: str
    status: EngineStatus
    backend: str | None
    model: str | None
    kv_bytes_per_token: int
    state_blocks: int
    stats: Stats | None
    memory: Memory | None
    held: list[Held] = []


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """What turns missed because their engine had restarted.

    - `requests`: how many turns missed
    - `written_tokens`: the tokens that these turns wrote again
    """

    requests: int
    written_tokens: int


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """One restart of an engine.

    - `epoch`: the epoch of the new process
    - `last_ms`: when the last turn of the old process began
    - `first_ms`: when the first turn of the new process began
    - `lost`: what turns missed, up to the next restart
    """

    engine: str
    epoch: str
    last_ms: int
    first_ms: int
    lost: Lost


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the prompts was held, and how much of that was reused.

    Reuse that the gateway did not foresee counts as available, captured and delivered.

    - `engine`: null: all engines together
    - `turns`: how many turns of the sample these are
    - `prompt_tokens`: all tokens of their prompts
    - `available_tokens`: the tokens that some engine held
    - `captured_tokens`: the tokens that the chosen engine held
    - `delivered_tokens`: the tokens that were reused
    """

    engine: str | None
    turns: int
    prompt_tokens: int
    available_tokens: int
    captured_tokens: int
    delivered_tokens: int


class FleetHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The engines in a range.

    - `num_turns`: how many turns the range has
    - `is_whole`: whether `attribution` is of all answered turns; else it is of a sample, which the
      turns' ids decide
    - `restarts`: the restarts between turns of the range
    - `attribution`: of all engines together, and then of each engine
    """

    since_ms: int
    until_ms: int
    num_turns: int
    is_whole: bool
    restarts: list[Epoch]
    attribution: list[Attribution]


class LoadPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One interval of `width_ms` from `start_ms` on, as this gateway saw it.

    - `in_use`, `leased`: the share of the pools' blocks, 0 to 1, on average; null if no engine
      answered
    - `running`, `waiting`: the most requests at engines in any minute
    - `queued`: the most turns that waited at this gateway in any minute
    """

    start_ms: int
    in_use: float | None
    leased: float | None
    running: int
    waiting: int
    queued: int
    width_ms: int = 60_000


class LiveEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One live entry of one engine. `entry.state` says whether a lease holds it.

    - `workspace`: null if no workspace that is known here has the entry's scope
    - `model`: the engine's model
    - `prefix`: what the ledger knows of the entry's prefix over its whole life, on all engines and
      with all models; null if the prefix came only once, or if the engine does not know its name
    - `cached_content`: the name of the cached content (Google's dialect) that holds the entry
    """

    engine: str
    workspace: str | None
    entry: EntryInfo
    model: str | None = None
    prefix: PrefixReport | None = None
    cached_content: str | None = None

    @property
    def has_own_end(self) -> bool:
        """Whether a client chose the time at which the entry ends. Any other entry lives on after
        its last use for as long as its TTL class says."""
        return self.entry.has_own_lifetime or self.cached_content is not None


ENDED_EARLY = {
    "sacrificed": "given up for running requests",
    "yielded": "yielded to another workspace",
    "dropped": "dropped by an operator",
    "damaged": "damaged on disk",
    "restart": "lost in a restart",
    "store_lost": "lost from the store",
    "engine_lost": "lost with an engine",
}
"""How a lease can end before its time, in words."""


class LeasesKept(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the leases of all workspaces in a range, by the ledger.

    The range is widened to whole minutes, and to whole hours or days if turns of it are deleted.

    - `expired`: how many leases lived to their end
    - `released`: how many ended early because their own workspace let go of them; they broke no
      promise, so no share counts them
    - `lost`: how many other leases ended early, by the reason: `sacrificed` for running requests,
      `yielded` to another workspace, `dropped` by an operator, `damaged` in the store, `restart`
      (they ended with the engine's process), `store_lost` (the store should have brought them back)
      or `engine_lost` (their engine is no longer in the fleet); a lease that ended with a process
      counts as ended when the engine was last heard
    - `not_known`: how many leases have an unknown fate, because their engine has not answered since
      or because no gateway saw their end
    - `not_known_since_ms`: since when the fate of the first of these is unknown
    - `held`: how many leases live now
    """

    since_ms: int
    until_ms: int
    expired: int
    released: int = 0
    lost: dict[str, int]
    not_known: int
    not_known_since_ms: int | None
    held: int

    @property
    def num_ended(self) -> int:
        return self.expired + sum(self.lost.values())

    @property
    def share(self) -> float | None:
        """The share of ended leases that lived to their end; None if no lease ended. A lease with
        an unknown fate counts as ended early, so the share is the least that it can be."""
        return self.expired / (self.num_ended + self.not_known) if self.num_ended else None


class PendingPurge(msgspec.Struct, frozen=True, kw_only=True):
    """A purge that an engine still has to do, because it was away when an operator asked for it.

    - `scope`: the scope whose content is to go (hexadecimal); null: everybody's content
    - `workspace`: the workspace that has the scope; null if everybody's content is to go
    - `asked_ms`: when an operator asked for the purge, in milliseconds since 1970
    """

    engine: str
    scope: str | None
    workspace: str | None
    asked_ms: int


class EnginePurge(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine let go of in a purge.

    - `purged`: whether the engine did the purge; if not, `detail` says why
    - `pending`: the engine will do the purge when it is back, before it gets turns
    - `entries`, `device_blocks`, `host_blocks`, `files`: how many the engine let go of
    - `busy_blocks`: how many blocks running requests still use; purge again when these have ended
    - `unpurged`: what the engine can't remove, in words
    """

    engine: str
    model: str | None
    purged: bool
    pending: bool = False
    detail: str = ""
    entries: int = 0
    device_blocks: int = 0
    host_blocks: int = 0
    files: int = 0
    busy_blocks: int = 0
    unpurged: list[str] = []


class PurgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a purge removed, and what it did not.

    - `workspace`, `model`: whose content was purged; one of them is null
    - `database`: how many rows of the workspace's texts were deleted, by their kind
    - `journal_contents`: how many texts were deleted that waited for the database in the journal of
      this gateway
    - `left`: what is not gone, in words
    """

    workspace: str | None
    model: str | None
    at_ms: int
    engines: list[EnginePurge]
    database: dict[str, int] = {}
    journal_contents: int = 0
    left: list[str] = []


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """The engine no longer holds the entry. No later turn reads it."""

    engine: str
    workspace: str
    entry: str


# An `inference` key calls the model APIs, and may read what a `read_only` key may. In the admin API
# a `read_only` key reads its own workspace, and a `read_only_admin` key reads all workspaces. An
# `admin` key does everything, in all workspaces.
KeyScope = Literal["inference", "read_only", "read_only_admin", "admin"]
AutoCacheMode = Literal["off", "prefix", "conversation"]
AutoCacheTtl = Literal["5m", "1h"]


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    """A workspace and its limits. A limit that is null is no limit.

    - `monthly_spend_nano`: in nano-dollars, for each calendar month in UTC
    - `lease_share`: the share of an engine's lease budget that the workspace may claim from others,
      0 to 1
    - `auto_cache`: which parts of requests without markers are leased; null: the installation's
      setting holds, which leases none
    - `keep_days`: for how many days prompts and answers are stored, encrypted; null: none is stored
    - `may_approximate`: whether its requests may ask that only a part of a prefix is kept
    """

    id: str
    display_name: str
    created_at: datetime
    archived_at: datetime | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrency: int | None
    monthly_spend_nano: int | None
    lease_share: float | None
    auto_cache: AutoCacheMode | None = None
    auto_cache_ttl: AutoCacheTtl | None = None
    keep_days: int | None = None
    may_approximate: bool = False


class WorkspaceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A workspace and its spending.

    - `month`: when the month began, in UTC
    - `spent_nano`: what this month's turns in the ledger cost; a turn without a price counts as 0
    - `effective_within_seconds`: the time within which a change counts on every other gateway; on
      this gateway it counts at once
    """

    workspace: Workspace
    month: datetime
    spent_nano: int
    effective_within_seconds: int


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """An API key.

    - `last_used_at`: when the key was last used, to about a minute
    - `replaces`: the id of the key that this key replaced in a rotation
    - `auto_cache`: null: the workspace's holds
    """

    id: str
    workspace: str
    name: str
    scope: KeyScope
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    replaces: str | None
    auto_cache: AutoCacheMode | None
    auto_cache_ttl: AutoCacheTtl | None


class KeyInfo(Key, frozen=True, kw_only=True):
    """An API key, and whether it works now."""

    is_active: bool


class MadeKey(msgspec.Struct, frozen=True, kw_only=True):
    """A new key.

    - `key`: the key itself, which is shown only this once
    """

    key: str
    info: KeyInfo


class Revoked(msgspec.Struct, frozen=True, kw_only=True):
    """A key that was revoked.

    This gateway refuses the key at once, and every other gateway within `effective_within_seconds`.
    A gateway that can't reach its database may accept the key for another hour.
    """

    info: KeyInfo
    effective_within_seconds: int
