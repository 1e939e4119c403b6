"""Leases in the admin API: /admin/v1/leases, what engines hold now; and dropping one."""

from contextlib import suppress
from typing import Annotated

from litestar import delete
from litestar.params import FromPath, QueryParameter

from engine.protocol import EntryInfo
from gateway.admin.controller import AdminController, Deps, view
from gateway.admin.ranges import EngineName, WorkspaceName
from gateway.admin.structs.fleet import Dropped, Lease
from gateway.base.errors import GatewayError, InvalidRequest, NotFound
from gateway.base.logs import get_logger
from gateway.http.auth import AdminRequest
from gateway.http.services import Services
from gateway.ledger.reads.prefixes import named
from gateway.routing.engine import Engine

_MAX_LEASES = 2000
_ENTRY_DIGITS = 32


class LeasesController(AdminController):
    path = "/admin/v1/leases"

    @view("/", "listLeases", "Live entries of all engines.")
    async def leases(
        self,
        request: AdminRequest,
        services: Deps,
        workspace: WorkspaceName = None,
        engine: EngineName = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=_MAX_LEASES)] = _MAX_LEASES,
    ) -> list[Lease]:
        """At most `limit` leases, the largest first. An engine that does not answer adds none."""
        own = request.user.confine(workspace)
        names = await _workspaces_by_scope(services)
        wanted = None if own is None else services.keyring.scope_of(own)
        found = [
            (each.name, names.get(entry.scope), entry)
            for each in services.fleet.ready
            if engine in (None, each.name)
            for entry in await _entries(each, wanted)
            if wanted in (None, entry.scope)
        ]
        found.sort(key=lambda lease: (-lease[2].tokens, lease[2].entry))
        return await _with_prefixes(services, found[:limit])

    @delete(
        "/{entry:str}",
        operation_id="dropLease",
        summary="End one entry of a workspace on an engine.",
        status_code=200,
    )
    async def drop(
        self,
        request: AdminRequest,
        entry: FromPath[str],
        services: Deps,
        workspace: Annotated[str, QueryParameter(name="workspace", min_length=1, max_length=64)],
        engine: Annotated[str, QueryParameter(name="engine", min_length=1, max_length=64)],
    ) -> Dropped:
        """End one entry of a workspace on an engine.

        The next turn with that prefix misses with the reason `dropped`. Raise NotFound where the
        engine has no such entry of that workspace.
        """
        own = request.user.confine(workspace)
        assert own is not None
        if len(entry) != _ENTRY_DIGITS or not set(entry) <= set("0123456789abcdef"):
            raise InvalidRequest("entry: must be 32 hexadecimal digits")
        place = services.fleet.find(engine)
        if not await place.drop(services.keyring.scope_of(own), entry):
            raise NotFound(f"entry: no entry `{entry}` of that workspace on that engine")
        get_logger("gateway").info("lease_dropped", engine=engine, workspace=own, entry=entry)
        return Dropped(engine=engine, workspace=own, entry=entry)


async def _workspaces_by_scope(services: Services) -> dict[str, str]:
    workspaces = await services.keys.workspaces()
    return {services.keyring.scope_of(workspace): workspace for workspace in workspaces}


async def _entries(engine: Engine, scope: str | None) -> list[EntryInfo]:
    with suppress(GatewayError):  # it went away, or is too busy to say
        return await engine.entries(scope)
    return []


async def _with_prefixes(
    services: Services, found: list[tuple[str, str | None, EntryInfo]]
) -> list[Lease]:
    keys = {
        (workspace, entry.name)
        for _, workspace, entry in found
        if workspace is not None and entry.name is not None
    }
    known = await named(services.queries.ledger, keys, services.prices.own)
    prefixes = {name for _, name in keys}
    cached = await services.cached_contents.named(prefixes, services.clock.wall())
    return [
        Lease(
            engine=engine,
            workspace=workspace,
            entry=entry,
            prefix=known.get((workspace or "", entry.name or "")),
            cached_content=_cached_name(cached.get((workspace or "", entry.name or ""))),
        )
        for engine, workspace, entry in found
    ]


def _cached_name(content_id: str | None) -> str | None:
    return None if content_id is None else f"cachedContents/{content_id}"
