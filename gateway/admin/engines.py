"""Engines and their entries in the admin API. Changes hold until the gateway's next start."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from heapq import nsmallest
from typing import Annotated

import msgspec
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter
from msgspec import Meta

from engine.protocol.reports import EntryInfo
from gateway.admin.controller import (
    AdminController,
    Deps,
    EngineName,
    WorkspaceName,
    action,
    removal,
    view,
)
from gateway.base.errors import GatewayError, InvalidRequest, NotFound
from gateway.base.logs import get_logger
from gateway.base.rounding import ceil_div
from gateway.http.auth import AdminRequest
from gateway.http.services import Services
from gateway.ledger.reads.prefixes import named
from gateway.routing.engine import Engine
from gateway.routing.fleet import engine_url
from gateway.structs.fleet import Dropped, EngineReport, LiveEntry, OwnedId, Removed, RoutingReport


class NewEngine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An engine to add. If another model owns the id of its model, the engine is refused. With
    `gives_id` its model gets the id instead."""

    url: Annotated[str, Meta(min_length=1, max_length=2048)]
    gives_id: bool = False


class NewOwner(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The engine's model gets the id of its name. With `is_default` the ids that name no model mean
    the engine's model, too."""

    is_default: bool = False


class NewAdapter(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The name of a folder in the engine's ENGINE_ADAPTERS."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]


class EnginesController(AdminController):
    path = "/admin/v1/engines"

    @view(
        "/",
        "listEngines",
        "State, description and statistics of each engine, and what routing knows of it.",
        None,
    )
    async def list_engines(self, services: Deps) -> list[EngineReport]:
        return list(
            await asyncio.gather(*(_report(services, engine) for engine in services.fleet.engines))
        )

    @action("/", "addEngine", "Add an engine until the gateway's next start.", NewEngine)
    async def add(self, payload: NamedDependency[NewEngine], services: Deps) -> EngineReport:
        """The gateway sends the engine the engine secret. Once the engine is ready, it gets the
        turns for the ids in the answer's `ids`. An engine whose model has the name of another model
        here is not added."""
        engine = await services.fleet.add(engine_url(payload.url), gives_id=payload.gives_id)
        return await _changed(services, engine, "engine_added")

    @action("/{name:str}/drain", "drainEngine", "Send an engine no new turns.")
    async def drain(self, name: FromPath[str], services: Deps) -> EngineReport:
        """Turns that run on the engine end there."""
        return await _drain(services, name, is_draining=True)

    @action("/{name:str}/resume", "resumeEngine", "Send an engine turns again.")
    async def resume(self, name: FromPath[str], services: Deps) -> EngineReport:
        return await _drain(services, name, is_draining=False)

    @action(
        "/{name:str}/give-id",
        "giveModelId",
        "Give the id of an engine's model to the model that the engine has now.",
        NewOwner,
    )
    async def give_id(
        self, name: FromPath[str], payload: NamedDependency[NewOwner], services: Deps
    ) -> EngineReport:
        """Engines with the model that owned the id get no more turns. The ids of the engine's
        adapters are given with it."""
        engine = services.fleet.find(name)
        if engine.last_description is None or engine.status not in ("ready", "refused"):
            raise InvalidRequest("engine: its model is not known now")
        await services.fleet.ids.give_model(engine.last_description, is_default=payload.is_default)
        await asyncio.gather(*(engine.poll() for engine in services.fleet.engines))
        return await _changed(services, engine, "model_id_given")

    @action("/{name:str}/adapters", "loadAdapter", "Load an adapter on an engine.", NewAdapter)
    async def load_adapter(
        self, name: FromPath[str], payload: NamedDependency[NewAdapter], services: Deps
    ) -> EngineReport:
        """Weights that were loaded under the name before are unloaded after their last request, and
        their entries end. From now on the adapter's id means the new weights. Engines that have
        other weights under the name get no requests for it."""
        engine = services.fleet.find(name)
        info = await engine.load_adapter(payload.name)
        if engine.description is not None:
            await services.fleet.ids.give_adapter(engine.description.model, info)
        await engine.poll()
        return await _changed(services, engine, "adapter_loaded")

    @removal("/{name:str}/adapters/{adapter:str}", "unloadAdapter", "Unload an adapter.")
    async def unload_adapter(
        self, name: FromPath[str], adapter: FromPath[str], services: Deps
    ) -> EngineReport:
        """The adapter gets no more requests. After its last request it is unloaded, and its entries
        end."""
        engine = services.fleet.find(name)
        await engine.unload_adapter(adapter)
        return await _changed(services, engine, "adapter_unloaded")

    @removal(
        "/{name:str}",
        "removeEngine",
        "Forget an engine on which nothing runs, until the gateway's next start.",
    )
    async def remove(self, name: FromPath[str], services: Deps) -> Removed:
        """An engine with running turns is not removed: drain it first."""
        engine = services.fleet.find(name)
        await services.fleet.remove(name)
        _log("engine_removed", engine)
        return Removed(name=name)


async def _drain(services: Services, name: str, *, is_draining: bool) -> EngineReport:
    engine = services.fleet.find(name)
    engine.is_draining = is_draining
    return await _changed(services, engine, "engine_drains" if is_draining else "engine_resumed")


async def _changed(services: Services, engine: Engine, event: str) -> EngineReport:
    report = await _report(services, engine)
    _log(event, engine, ids=report.ids, notes=report.notes)
    return report


def _log(event: str, engine: Engine, **more: object) -> None:
    get_logger("gateway").info(event, engine=engine.name, url=engine.url, **more)


async def _report(services: Services, engine: Engine) -> EngineReport:
    stats = None
    about = engine.description
    if engine.is_ready:
        with suppress(GatewayError):  # an engine with slow answers may still take turns
            stats = await engine.stats()
    now = engine.monotonic()
    is_taken = about is not None and engine.status != "refused"
    ids = services.catalogue.ids_at(about, services.fleet.served) if about and is_taken else []
    return EngineReport(
        name=engine.name,
        url=engine.url,
        status=engine.status,
        is_draining=engine.is_draining,
        breaker=engine.breaker.state(now),
        times_opened=engine.breaker.num_opened,
        detail=engine.readiness,
        ids=ids,
        notes=[*engine.notes, *_other_models(services, engine, ids)],
        description=about
        and msgspec.structs.replace(about, model=services.catalogue.name_of(about.model)),
        stats=stats,
        routing=RoutingReport(
            is_stale=engine.holdings.is_stale(now),
            names=len(engine.holdings),
            forgotten_names=engine.holdings.num_forgotten,
            running=engine.load.num_running,
            waiting_tokens=engine.load.num_waiting_tokens,
            recent_tokens=int(engine.load.recent(now)),
        ),
    )


def _other_models(services: Services, engine: Engine, ids: Sequence[str]) -> list[str]:
    """A note, if other engines have other models. This engine gets no requests for those."""
    if not ids or engine.description is None:
        return []
    name_of = services.catalogue.name_of
    model_name = name_of(engine.description.model)
    other_models = {name_of(model) for model in services.fleet.served.models} - {model_name}
    if not other_models:
        return []
    models = ", ".join(sorted(other_models))
    return [f"it has another model than {models}, and answers only to {', '.join(ids)}"]


_MAX_ENTRIES = 2000
_ENTRY_DIGITS = 32


class ModelIdsController(AdminController):
    path = "/admin/v1/model-ids"

    @view("/", "listModelIds", "The model that each id belongs to, and since when.", None)
    async def list_ids(self, services: Deps) -> list[OwnedId]:
        return [entry for _, entry in sorted(services.fleet.ids.known.items())]


class LeasesController(AdminController):
    """Live entries, leased or not. The path says `leases` because it is a contract, and older than
    entries without a lease."""

    path = "/admin/v1/leases"

    @view(
        "/", "listLeases", "Live entries of all engines, leased or not: `entry.state` says which."
    )
    async def entries(
        self,
        request: AdminRequest,
        services: Deps,
        workspace: WorkspaceName = None,
        engine: EngineName = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=_MAX_ENTRIES)] = _MAX_ENTRIES,
    ) -> list[LiveEntry]:
        """At most `limit` entries, the largest first. The entries of an engine that does not answer
        are missing."""
        confined = request.user.confine(workspace)
        scope_of = services.keyring.scope_of
        names = {scope_of(name): name for name in await services.keys.workspaces()}
        scope = None if confined is None else scope_of(confined)
        engines = [
            candidate for candidate in services.fleet.ready if engine in (None, candidate.name)
        ]
        models = {serving.name: services.name_of(serving.description) for serving in engines}
        largest = await _largest(engines, scope, limit)
        keys = {
            (names[entry.scope], entry.name)
            for _, entry in largest
            if entry.scope in names and entry.name is not None
        }
        reports = await named(services.queries.ledger, keys, services.prices.own)
        contents = await services.cached_contents.named(
            {name for _, name in keys}, services.clock.wall()
        )
        live_entries = []
        for engine_name, entry in largest:
            key = names.get(entry.scope, ""), entry.name or ""
            content = contents.get(key)
            live_entries.append(
                LiveEntry(
                    engine=engine_name,
                    workspace=names.get(entry.scope),
                    entry=entry,
                    model=models[engine_name],
                    prefix=reports.get(key),
                    cached_content=f"cachedContents/{content}" if content else None,
                )
            )
        return live_entries

    @removal("/{entry:str}", "dropLease", "End one entry of a workspace on an engine.")
    async def drop(
        self,
        request: AdminRequest,
        entry: FromPath[str],
        services: Deps,
        workspace: Annotated[str, QueryParameter(name="workspace", min_length=1, max_length=64)],
        engine: Annotated[str, QueryParameter(name="engine", min_length=1, max_length=64)],
    ) -> Dropped:
        """The next turn that needs the entry misses with the reason `dropped`. Raise NotFound where
        the engine has no such entry of that workspace."""
        confined = request.user.confine(workspace)
        assert confined is not None
        if len(entry) != _ENTRY_DIGITS or not set(entry) <= set("0123456789abcdef"):
            raise InvalidRequest("entry: must be 32 hexadecimal digits")
        holder = services.fleet.find(engine)
        if not await holder.drop(services.keyring.scope_of(confined), entry):
            raise NotFound(f"entry: no entry `{entry}` of that workspace on that engine")
        get_logger("gateway").info("lease_dropped", engine=engine, workspace=confined, entry=entry)
        return Dropped(engine=engine, workspace=confined, entry=entry)


async def _largest(
    engines: Sequence[Engine], scope: str | None, limit: int
) -> list[tuple[str, EntryInfo]]:
    """The largest entries of all engines, each with the name of its engine.

    An engine is first asked for twice its equal part of `limit`. If its smallest entry may be among
    the largest of all, it is asked for `limit` entries.
    """
    entries_of = dict[Engine, list[EntryInfo]]()
    limits = {engine: ceil_div(2 * limit, max(len(engines), 1)) for engine in engines}
    while True:

        async def ask(engine: Engine, number: int) -> None:
            entries_of[engine] = []
            with suppress(GatewayError):  # the engine went away, or is too busy to answer
                entries = await engine.entries(scope, number)
                entries_of[engine] = [entry for entry in entries if scope in (None, entry.scope)]

        await asyncio.gather(*(ask(engine, number) for engine, number in limits.items()))
        pairs: list[tuple[str, EntryInfo]] = []
        for engine, entries in entries_of.items():
            pairs += [(engine.name, entry) for entry in entries]
        largest = nsmallest(limit, pairs, key=lambda pair: (-pair[1].tokens, pair[1].entry))
        least = largest[-1][1].tokens if len(largest) == limit else 0
        limits = {
            engine: limit
            for engine, number in limits.items()
            if number < limit
            and len(entries_of[engine]) >= number
            and entries_of[engine][-1].tokens >= least
        }
        if not limits:
            return largest
