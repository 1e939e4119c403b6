"""Purges remove a workspace's content from every tier, the store, the journal and the database.

A purge of a model removes everybody's content from the model's engines: their caches are then as
after a start. The database is not changed, because what it keeps belongs to workspaces.

The purge of an engine that is away is pending. The engine does it when it is back, before it gets
turns (`routing/pending_purges.py`).
"""

import asyncio
from typing import Annotated

import msgspec
from litestar.di import NamedDependency

from gateway.admin.controller import AdminController, Deps, action, now_ms
from gateway.base.errors import GatewayError, InvalidRequest, NotFound
from gateway.base.logs import get_logger
from gateway.base.words import counted
from gateway.http.auth import AdminRequest
from gateway.http.query import NO_NUL
from gateway.http.refusals import Refusals
from gateway.http.services import Services
from gateway.ledger.purge import purge_texts, running_batches
from gateway.prompt.sketch import forget_pieces
from gateway.routing.engine import Engine
from gateway.structs.fleet import EnginePurge, PendingPurge, PurgeReport

_Workspace = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=NO_NUL)]
_Model = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=NO_NUL)]


class PurgeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What to purge: exactly one of `workspace` and `model`."""

    workspace: _Workspace | None = None
    model: _Model | None = None


class PurgeController(AdminController):
    path = "/admin/v1/purge"

    @action(
        "/",
        "purge",
        "Remove a workspace's content everywhere, or all that a model's engines hold.",
        PurgeRequest,
    )
    async def purge(
        self, request: AdminRequest, payload: NamedDependency[PurgeRequest], services: Deps
    ) -> PurgeReport:
        """Turns, costs and sums stay: they have no content. Leases end as `dropped`. Raise NotFound
        for an unknown workspace or model."""
        if (payload.workspace is None) == (payload.model is None):
            raise InvalidRequest("workspace, model: give one of them")
        if payload.model is not None:
            report = await _purge_model(services, payload.model)
        else:
            assert payload.workspace is not None
            if payload.workspace not in await services.keys.workspaces():
                raise NotFound(f"workspace: no workspace `{payload.workspace}`")
            report = await _purge_workspace(services, payload.workspace)
            refusals: Refusals = request.app.state.refusals
            refusals.purge(payload.workspace)
        get_logger("gateway").info(
            "purged",
            workspace=report.workspace,
            model=report.model,
            engines=[entry.engine for entry in report.engines if entry.purged],
            pending=[entry.engine for entry in report.engines if entry.pending],
            rows=report.database,
            left=report.left,
        )
        return report


async def _purge_model(services: Services, requested: str) -> PurgeReport:
    model = services.catalogue.find(requested, services.fleet.served)
    engines = [
        engine
        for engine in services.fleet.engines
        if engine.last_description is not None and model.is_served_by(engine.last_description.model)
    ]
    purged = await _purge_engines(services, engines, None, None)
    left = _left_in(purged)
    left += [
        f"{engine.name} has not answered since this gateway's start, so its model is not known:"
        " purge again when it is back"
        for engine in services.fleet.engines
        if engine.last_description is None
    ]
    return PurgeReport(
        workspace=None,
        model=model.id,
        at_ms=now_ms(services.clock),
        engines=purged,
        left=left,
    )


async def _purge_workspace(services: Services, workspace: str) -> PurgeReport:
    """Purge what is stored before the engines. Otherwise a request could bring stored content back
    to an engine after the engine's purge."""
    running = await running_batches(services.queries.ledger, workspace)
    now = services.clock.wall()
    for batch_id in running:
        await services.batches.cancel(workspace, batch_id, now)
    num_waiting = await services.turns.content_writer.purge(workspace)
    rows = await purge_texts(services.queries.ledger, workspace)
    services.responses.forget_sizes(workspace)
    services.summaries.pop(workspace, None)
    forget_pieces()
    scope = services.keyring.scope_of(workspace)
    purged = await _purge_engines(services, services.fleet.engines, scope, workspace)
    left = _left_in(purged)
    if running:
        batches = counted(len(running), "batch was running and is", "batches were running and are")
        left.append(f"{batches} being cancelled. Purge again when that is done")
    if services.journal.damaged:
        folders = ", ".join(services.journal.damaged)
        left.append(f"damaged files of the journal, which are kept aside: {folders}")
    return PurgeReport(
        workspace=workspace,
        model=None,
        at_ms=now_ms(services.clock),
        engines=purged,
        database=rows,
        journal_contents=num_waiting,
        left=left,
    )


async def _purge_engines(
    services: Services, engines: list[Engine], scope: str | None, workspace: str | None
) -> list[EnginePurge]:
    purges = (_purge(services, engine, scope, workspace) for engine in engines)
    return list(await asyncio.gather(*purges))


async def _purge(
    services: Services, engine: Engine, scope: str | None, workspace: str | None
) -> EnginePurge:
    """Let an engine purge a scope, or remember that it still has to. Raise the ledger's errors."""
    model = services.name_of(engine.last_description)
    asked_ms = now_ms(services.clock)
    try:
        reply = await engine.purge(scope)
    except GatewayError as error:
        await services.fleet.purges.add(
            PendingPurge(engine=engine.name, scope=scope, workspace=workspace, asked_ms=asked_ms)
        )
        return EnginePurge(
            engine=engine.name, model=model, purged=False, pending=True, detail=str(error)
        )
    return EnginePurge(
        engine=engine.name,
        model=model,
        purged=True,
        entries=reply.entries,
        device_blocks=reply.device_blocks,
        host_blocks=reply.host_blocks,
        files=reply.files,
        busy_blocks=reply.busy_blocks,
        unpurged=reply.unpurged,
    )


def _left_in(engines: list[EnginePurge]) -> list[str]:
    left: list[str] = []
    for entry in engines:
        if not entry.purged:
            left.append(
                f"pending for {entry.engine}: not known, {entry.detail}. The engine purges when it"
                " is back, before it gets turns"
            )
        if entry.busy_blocks:
            blocks = counted(entry.busy_blocks, "block is", "blocks are")
            left.append(
                f"{entry.engine}: {blocks} used by running requests. Purge again when the requests"
                " have ended"
            )
        left += [f"{entry.engine}: {what}" for what in entry.unpurged]
    return left
