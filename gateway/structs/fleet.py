"""Engines, leases, workspaces and keys, as the admin API answers with them."""

from datetime import datetime
from typing import Any, Literal

import msgspec

from engine.protocol.reports import Description, EntryInfo, Holding, Memory, ModelIdentity, Stats
from gateway.structs.usage import PrefixLook, PrefixReport


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """`formula` says how the number is computed, from fields of the ledger or of the engines."""

    title: str
    formula: str
    unit: str


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """An id of `GET /v1/models`: of an adapter `root` is its name and `parent` its model, of an
    alias `root` is what it stands for. A model that `sees` is shown images; others get a
    placeholder, or their request is refused (`HOLDFAST_UNREADABLE`)."""

    id: str
    root: str | None
    parent: str | None
    sees: bool = False


class About(msgspec.Struct, frozen=True, kw_only=True):
    """`workspace` is the only workspace that this key sees; None is all. `workspaces`, `engines`
    and `models` are the values of the filters: those that exist, and those of turns of the last 31
    days. `first_ms`: the first turn in the ledger that this key may see. `served` are the models
    that engines have now, `listed` the ids of `GET /v1/models`. `sample`: the ledger holds made-up
    turns. `may_send`: this key can call the model APIs here. `may_change`: it can make the changes
    of the admin API. `has_placeholder_prices`: money counts the shipped price."""

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
    """The id of a model or an adapter, or `*` for the ids that name no model. It is owned by the
    model that served it first, or that an operator gave it to. `engine_model` is the name that its
    engine gave it, `identity` all that engines said of it; of an adapter only `weights` are."""

    id: str
    engine_model: str
    identity: ModelIdentity
    since: datetime


class RoutingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What this gateway knows of an engine for routing. `names` counts the prefixes that it holds
    by its events; `is_stale`: it was silent for so long that these no longer count.
    `waiting_tokens` belong to turns without an answer yet. `recent_tokens` fade."""

    is_stale: bool
    names: int
    forgotten_names: int
    running: int
    waiting_tokens: int
    recent_tokens: int


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """`ids` are those of `/v1/models` that the engine answers. `notes` say what of it is not used,
    and why. `description` is of the model that it had when it was taken last."""

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
    """Whose blocks of the device are: an engine's `Holding` with names. `key_id` is of the newest
    request that wrote this prefix, None where none of the ledger ended with just this one, and for
    content without an entry. `workspace` None: a scope of no workspace known here."""

    workspace: str | None
    key_id: str | None
    key: str | None
    look: PrefixLook | None
    holding: Holding


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """`memory` and `stats` are None where the engine does not answer; `held` has the holdings of
    `memory`. `state_blocks`: the blocks of one recurrent state; 0 for a model without linear
    layers."""

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
    """One restart of an engine, between `last_ms`, the last turn of the old process, and
    `first_ms`, the first turn of the new one. `lost` counts until the next restart."""

    engine: str
    epoch: str
    last_ms: int
    first_ms: int
    lost: Lost


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the prompts of `turns` sampled turns; `engine` None is all engines.
    `available_tokens` were held by some engine, `captured_tokens` by the chosen one,
    `delivered_tokens` were reused; reuse that was not foreseen counts as all three."""

    engine: str | None
    turns: int
    prompt_tokens: int
    available_tokens: int
    captured_tokens: int
    delivered_tokens: int


class FleetHistory(msgspec.Struct, frozen=True, kw_only=True):
    """`restarts` are those between turns of the range. `attribution` is of all its answered turns
    where `is_whole`, else of a sample of them that the turns' ids decide; `num_turns` are all."""

    since_ms: int
    until_ms: int
    num_turns: int
    is_whole: bool
    restarts: list[Epoch]
    attribution: list[Attribution]


class LoadPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One interval from `start_ms` on, as this gateway saw it. `in_use` and `leased` are shares of
    the pools' blocks on average, None where no engine answered. `running` and `waiting` are the
    most requests at engines in any minute, `queued` the most turns that waited at this gateway."""

    start_ms: int
    in_use: float | None
    leased: float | None
    running: int
    waiting: int
    queued: int


class LiveEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One live entry of one engine. Whether it is leased says `entry.state`."""

    engine: str
    # None: a scope of no workspace known here.
    workspace: str | None
    entry: EntryInfo
    # The engine's model.
    model: str | None = None
    # What the ledger knows of this prefix over its whole life, on all engines and of all models.
    # None where it came only once, or the engine does not know its name.
    prefix: PrefixReport | None = None
    # The name of the cached content (Google's dialect) that it is held for.
    cached_content: str | None = None


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
    """What became of leases in a range, of all workspaces, by the ledger. `expired` ones lived
    to their end. `released` ones ended before it since their own workspace let go of them: no
    promise was broken, so they count in no share. `lost` ones ended before it, by why:
    `sacrificed` for running requests, `yielded` to another workspace, `dropped` by an operator,
    `damaged` in the store, with the process in a `restart`, from the store that should have
    brought them back (`store_lost`), or with an engine that is in the fleet no more
    (`engine_lost`). A lease that ended with its process ended when the engine was last heard.
    `not_known` were granted by engines that have not answered since `not_known_since_ms`, the
    earliest of them, or whose end no gateway saw. `held` live now. Ranges are widened to whole
    minutes, and to hours or days where turns are gone."""

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


class EnginePurge(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine let go of. With `purged` false nothing is known of it: the engine did not
    answer, and `detail` says more. A restart takes its memory, and not its store. `busy_blocks` are
    used by running requests: purge again when they have ended. `unpurged` is what the engine can't
    remove, in words."""

    engine: str
    model: str | None
    purged: bool
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
    """A null limit is no limit. Money is in nano-dollars, months are in UTC. `auto_cache` says what
    is leased of requests without markers; null is the installation's setting, which leases none.
    Prompts and answers are kept for `keep_days`, encrypted; with null none is. Requests of one that
    `may_approximate` may ask that only a part of a prefix is kept."""

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
    """`spent_nano` is what this month's turns in the ledger cost, those without a price nothing. A
    change counts on every gateway within `effective_within_seconds`, on this one at once."""

    workspace: Workspace
    month: datetime
    spent_nano: int
    effective_within_seconds: int


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """`last_used_at` is known to about a minute. `replaces` is the id of the key before it in a
    rotation. A null `auto_cache` is the workspace's."""

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
    """`key` is shown this once."""

    key: str
    info: KeyInfo


class Revoked(msgspec.Struct, frozen=True, kw_only=True):
    """This gateway refuses the key at once, others within `effective_within_seconds`. A gateway
    that does not reach its database may take it for an hour."""

    info: KeyInfo
    effective_within_seconds: int
