"""/v1/cache/entries: what a workspace has cached, and releasing it before its time.

A lease holds memory until its TTL is over. An agent can end its lease here when its session is
over. Only the key's own workspace is read. Another workspace's entry and an unknown one get the
same answer, by the same steps: every engine is asked for the id within the workspace's scope.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Annotated, Literal, TypeVar

import msgspec
from litestar import Controller, delete, get
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter

from engine.protocol import BestEffortReason, EntryState, Tier, Ttl
from engine.protocol.reports import EntryInfo
from gateway.base.errors import GatewayError, InvalidRequest, NoEngineReady, NotFound
from gateway.base.words import counted
from gateway.http.auth import KeyAuth
from gateway.http.generation import KeyRequest
from gateway.http.query import check_query
from gateway.http.services import Services
from gateway.ledger.reads import turns
from gateway.routing.engine import Engine

MAX_PAGE = 1000
_PAGE = 100
_ID = re.compile("[0-9a-f]{32}")
_FIRST = ""
"""All ids follow it."""
Reply = TypeVar("Reply")


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One prefix of the workspace that stands in memory, on one engine or on several. `tokens` are
    of the whole prefix. `expires_in_seconds` is a promise, so only a `leased` entry has it;
    `reason` says why nothing holds a `best_effort` one. `prefix` is the name under which the
    dashboard and the ledger know it, None where the engine knows none."""

    id: str
    object: Literal["cache.entry"] = "cache.entry"
    model: str | None
    tokens: int
    ttl: Ttl
    state: EntryState
    expires_in_seconds: float | None
    reason: BestEffortReason | None
    tier: Tier
    num_reads: int
    prefix: str | None


class CacheEntryList(msgspec.Struct, frozen=True, kw_only=True):
    """A page, in the order of the ids. The next one begins after `last_id`. `unreached_engines` did
    not answer: what they hold is not known."""

    object: Literal["list"] = "list"
    data: list[CacheEntry]
    has_more: bool
    first_id: str | None
    last_id: str | None
    unreached_engines: int


class DeletedCacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The entry is gone from all engines but `unreached_engines`, which did not answer."""

    id: str
    object: Literal["cache.entry"] = "cache.entry"
    deleted: Literal[True] = True
    unreached_engines: int


class CacheEntriesController(Controller):
    path = "/v1/cache/entries"
    middleware = (KeyAuth,)
    before_request = staticmethod(check_query)

    @get()
    async def list_entries(
        self,
        request: KeyRequest,
        services: NamedDependency[Services],
        after_id: Annotated[str | None, QueryParameter(name="after_id")] = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE)] = _PAGE,
        message_id: Annotated[str | None, QueryParameter(name="message_id")] = None,
    ) -> CacheEntryList:
        """The workspace's entries. With `message_id` they are the entries that the last marker of
        that answer's request wrote or read."""
        after = _FIRST if after_id is None else _checked(after_id, "after_id")
        workspace = request.user.workspace
        scope = services.keyring.scope_of(workspace)
        async with services.reads["store"].taken(workspace):
            prefix = None
            if message_id is not None:
                prefix = await _prefix_of(services, workspace, message_id)

            async def page_of(engine: Engine) -> list[EntryInfo]:
                if prefix is None:
                    return await engine.entries_after(scope, after, limit + 1)
                entries = await engine.entries(scope)
                return [
                    entry
                    for entry in entries
                    if entry.scope == scope and entry.name == prefix and entry.entry > after
                ]

            pages, num_unreached = await _asked(services, page_of)
        entries = _merged(services, pages)
        page = entries[:limit]
        return CacheEntryList(
            data=page,
            has_more=len(entries) > limit,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            unreached_engines=num_unreached,
        )

    @delete("/{entry_id:str}", status_code=200)
    async def release(
        self, request: KeyRequest, entry_id: FromPath[str], services: NamedDependency[Services]
    ) -> DeletedCacheEntry:
        """End an entry, leased or not, on every engine. Raise NotFound if all engines answered and
        none has it. Raise NoEngineReady if some did not answer and none of the others has it."""
        entry = _checked(entry_id, "id")
        workspace = request.user.workspace
        scope = services.keyring.scope_of(workspace)
        async with services.reads["store"].taken(workspace):
            released, num_unreached = await _asked(
                services, lambda engine: engine.release(scope, entry)
            )
        if not any(released.values()):
            if num_unreached:
                engines = counted(num_unreached, "engine does", "engines do")
                raise NoEngineReady(f"id: {engines} not answer and may have the entry: ask again")
            raise NotFound(f"id: the workspace has no cache entry `{entry}`")
        return DeletedCacheEntry(id=entry, unreached_engines=num_unreached)


def _checked(entry_id: str, field: str) -> str:
    """The id, if it has the form of an entry's. Raise InvalidRequest otherwise."""
    if _ID.fullmatch(entry_id) is None:
        raise InvalidRequest(f"{field}: must be 32 hexadecimal digits")
    return entry_id


async def _prefix_of(services: Services, workspace: str, message_id: str) -> str:
    """The prefix of the last marker of a turn. Raise NotFound."""
    turn = await turns.one(services.queries.ledger, message_id.replace("\0", "?"), workspace)
    if turn is None:
        raise NotFound(f"message_id: no answer `{message_id[:64]}` of this workspace is known yet")
    if turn.prefix is None:
        raise NotFound("message_id: the request of this answer marked nothing")
    return turn.prefix


async def _asked(
    services: Services, ask: Callable[[Engine], Awaitable[Reply]]
) -> tuple[dict[Engine, Reply], int]:
    """The reply of each engine that answers, and how many do not answer."""
    engines = services.fleet.engines
    replies = dict[Engine, Reply]()

    async def put(engine: Engine) -> None:
        if not engine.is_ready:
            return
        try:
            replies[engine] = await ask(engine)
        except GatewayError:
            return  # an engine without a reply counts as unreached

    await asyncio.gather(*(put(engine) for engine in engines))
    return replies, len(engines) - len(replies)


def _merged(services: Services, pages: Mapping[Engine, Iterable[EntryInfo]]) -> list[CacheEntry]:
    """Each entry once, in the order of their ids, from the engine that promises most."""
    best: dict[str, tuple[tuple[int, float], CacheEntry]] = {}
    for engine, infos in pages.items():
        model = services.name_of(engine.description)
        for info in infos:
            is_leased = info.state == "leased"
            worth = (int(is_leased), info.expires_in_seconds)
            if info.entry in best and best[info.entry][0] >= worth:
                continue
            cache_entry = CacheEntry(
                id=info.entry,
                model=model,
                tokens=info.tokens,
                ttl=info.ttl,
                state=info.state,
                expires_in_seconds=info.expires_in_seconds if is_leased else None,
                reason=info.reason,
                tier=info.tier,
                num_reads=info.reads,
                prefix=info.name,
            )
            best[info.entry] = worth, cache_entry
    return [cache_entry for _, (_, cache_entry) in sorted(best.items())]
