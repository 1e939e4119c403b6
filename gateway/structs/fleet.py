"""Engines, leases, workspaces and keys, as the admin API answers with them."""

from datetime import datetime
from typing import Any, Literal

import msgspec

from engine.protocol.reports import Description, EntryInfo, Holding, Memory, ModelIdentity, Stats
from gateway.structs.usage import PrefixLook, PrefixReport


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """What a number means.

    - `formula`: how it is computed from fields of the ledger or of the engines
    """

    title: str
    formula: str
    unit: str


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """An id of `GET /v1/models`.

    - `root`: of an adapter its name, of an alias what it stands for
    - `parent`: of an adapter its model
    - `sees`: whether it is shown images; other models get a placeholder, or their request is
      refused (`HOLDFAST_UNREADABLE`)
    """

    id: str
    root: str | None
    parent: str | None
    sees: bool = False


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What this gateway and this key are.

    - `workspace`: the only workspace that this key sees; null is all
    - `sample`: the ledger holds made-up turns
    - `may_send`: this key can call the model APIs here
    - `may_change`: this key can make the changes of the admin API
    - `first_ms`: the first turn in the ledger that this key may see
    - `has_placeholder_prices`: money counts the shipped price
    - `workspaces`, `engines`, `models`: the values of the filters: those that exist, and those of
      turns of the last 31 days
    - `served`: the models that engines have now
    - `listed`: the ids of `GET /v1/models`
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
"""A `refused` engine answers, and gets no turn: its name belongs to another model."""


class OwnedId(msgspec.Struct, frozen=True, kw_only=True):
    """The id of a model or an adapter, or `*` for the ids that name no model. The model that served
    it first owns it, or the one that an operator gave it to.

    - `engine_model`: the name that the model's engine gave it
    - `identity`: all that engines said of the model; of an adapter only its `weights`
    """

    id: str
    engine_model: str
    identity: ModelIdentity
    since: datetime


class RoutingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What this gateway knows of an engine for routing.

    - `names`: prefixes that the engine holds by its events
    - `is_stale`: the engine was silent for so long that these no longer count
    - `waiting_tokens`: of turns without an answer yet
    - `recent_tokens`: they fade
    """

    is_stale: bool
    names: int
    forgotten_names: int
    running: int
    waiting_tokens: int
    recent_tokens: int


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    - `ids`: those of `/v1/models` that it answers
    - `notes`: what of it is not used, and why
    - `description`: of its model, as it last described itself
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
    """The engine gets no more turns. It keeps its last counts, unacknowledged."""

    name: str


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Whose blocks of the device these are.

    - `workspace`: null: a scope of no workspace known here
    - `key_id`: of the newest request that wrote this prefix; null where no request of the ledger
      ended with just this one, and for content without an entry
    """

    workspace: str | None
    key_id: str | None
    key: str | None
    look: PrefixLook | None
    holding: Holding


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one engine.

    - `state_blocks`: the blocks of one recurrent state; 0 for a model without linear layers
    - `stats`, `memory`: null where the engine does not answer
    - `held`: the holdings of `memory`, with names
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
    """The tokens that turns missed because their engine had restarted."""

    requests: int
    written_tokens: int


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """One restart of an engine.

    - `last_ms`: the last turn of the old process
    - `first_ms`: the first turn of the new one
    - `lost`: up to the next restart
    """

    engine: str
    epoch: str
    last_ms: int
    first_ms: int
    lost: Lost


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the prompts of `turns` sampled turns. Reuse that was not foreseen counts as
    available, captured and delivered.

    - `engine`: null is all engines
    - `available_tokens`: held by some engine
    - `captured_tokens`: held by the chosen engine
    - `delivered_tokens`: reused
    """

    engine: str | None
    turns: int
    prompt_tokens: int
    available_tokens: int
    captured_tokens: int
    delivered_tokens: int


class FleetHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The engines in a range.

    - `num_turns`: all turns of the range
    - `is_whole`: `attribution` is of all its answered turns; else of a sample that the turns' ids
      decide
    - `restarts`: those between turns of the range
    """

    since_ms: int
    until_ms: int
    num_turns: int
    is_whole: bool
    restarts: list[Epoch]
    attribution: list[Attribution]


class LoadPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One interval of `width_ms` from `start_ms` on, as this gateway saw it.

    - `in_use`, `leased`: shares of the pools' blocks on average; null where no engine answered
    - `running`, `waiting`: the most requests at engines in any minute
    - `queued`: the most turns that waited at this gateway
    """

    start_ms: int
    in_use: float | None
    leased: float | None
    running: int
    waiting: int
    queued: int
    width_ms: int = 60_000


class LiveEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One live entry of one engine. `entry.state` says whether it is leased.

    - `workspace`: null: a scope of no workspace known here
    - `model`: the engine's
    - `prefix`: what the ledger knows of this prefix over its whole life, on all engines and of all
      models; null where it came only once, or the engine does not know its name
    - `cached_content`: the name of the cached content (Google's dialect) that it is held for
    """

    engine: str
    workspace: str | None
    entry: EntryInfo
    model: str | None = None
    prefix: PrefixReport | None = None
    cached_content: str | None = None

    @property
    def has_own_end(self) -> bool:
        """Whether it ends at a time that a client chose. Else its TTL class says how long it lives
        after its last use."""
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
    """What became of leases in a range, of all workspaces, by the ledger. Ranges are widened to
    whole minutes, and to hours or days where turns are deleted.

    - `expired`: lived to their end
    - `released`: ended before, because their own workspace let go of them. No promise was broken,
    so
      they count in no share
    - `lost`: ended before, by why: `sacrificed` for running requests; `yielded` to another
      workspace; `dropped` by an operator; `damaged` in the store; with the process in a `restart`;
      from the store that should have brought them back (`store_lost`); with an engine that is in
      the fleet no more (`engine_lost`). A lease that ended with its process ended when the engine
      was last heard
    - `not_known`: granted by engines that have not answered since, or whose end no gateway saw
    - `not_known_since_ms`: the earliest moment of these
    - `held`: live now
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
        """Of those that ended, how many lived to their end. What is not known counts as ended and
        not as kept: the share is then the least that it can be. None where nothing ended."""
        return self.expired / (self.num_ended + self.not_known) if self.num_ended else None


class PendingPurge(msgspec.Struct, frozen=True, kw_only=True):
    """A purge that an engine still has to do, because it was away when an operator asked for it.

    - `scope`: whose content is to go (hexadecimal); null: everybody's
    - `workspace`: the one that has the scope; null where everybody's content is to go
    - `asked_ms`: when an operator asked for it, in milliseconds since 1970
    """

    engine: str
    scope: str | None
    workspace: str | None
    asked_ms: int


class EnginePurge(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine let go of.

    - `purged`: false: the engine did not do it, and `detail` says why
    - `pending`: the engine does it when it is back, before it gets turns
    - `busy_blocks`: used by running requests: purge again when they have ended
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
    """What is gone, by kind, and in `left` what is not, in words. `database` counts rows of what
    was kept of the workspace's texts; `journal_contents` those that waited for the database in the
    journal of the gateway that was asked."""

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


# `inference` calls the model APIs, `read_only` reads its own workspace in the admin API,
# `read_only_admin` reads all workspaces there, `admin` does everything, in other workspaces too. An
# `inference` key may read what a `read_only` one may.
KeyScope = Literal["inference", "read_only", "read_only_admin", "admin"]
AutoCacheMode = Literal["off", "prefix", "conversation"]
AutoCacheTtl = Literal["5m", "1h"]


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    """A null limit is no limit. Money is in nano-dollars, months are in UTC.

    - `auto_cache`: what is leased of requests without markers; null is the installation's setting,
      which leases none
    - `keep_days`: for so many days prompts and answers are stored, encrypted; null stores none
    - `may_approximate`: its requests may ask that only a part of a prefix is kept
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

    - `spent_nano`: what this month's turns in the ledger cost; turns without a price cost nothing
      here
    - `effective_within_seconds`: a change counts on this gateway at once, and on every other one
      within this time
    """

    workspace: Workspace
    month: datetime
    spent_nano: int
    effective_within_seconds: int


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """An API key.

    - `last_used_at`: to about a minute
    - `replaces`: the id of the key before it in a rotation
    - `auto_cache`: null is the workspace's
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
    is_active: bool


class MadeKey(msgspec.Struct, frozen=True, kw_only=True):
    """A new key.

    - `key`: shown this once
    """

    key: str
    info: KeyInfo


class Revoked(msgspec.Struct, frozen=True, kw_only=True):
    """This gateway refuses the key at once, others within `effective_within_seconds`. A gateway
    that does not reach its database may take it for an hour."""

    info: KeyInfo
    effective_within_seconds: int
