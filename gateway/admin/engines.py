"""The engines in the admin API: /admin/v1/engines. Changes hold until the gateway's next start."""

import asyncio
from typing import Annotated

import msgspec
from litestar import delete, get
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import Meta

from gateway.admin.controller import AdminController, Deps, action
from gateway.admin.structs.fleet import (
    EngineReport,
    Removed,
    RoutingReport,
)
from gateway.base.errors import GatewayError
from gateway.base.logs import get_logger
from gateway.http.services import Services
from gateway.routing.engine import Engine
from gateway.routing.fleet import engine_url


class NewEngine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    url: Annotated[str, Meta(min_length=1, max_length=2048)]


class EnginesController(AdminController):
    path = "/admin/v1/engines"

    @get(
        operation_id="listEngines",
        summary="State, description and statistics of each engine, and what routing knows of it.",
    )
    async def list_engines(self, services: Deps) -> list[EngineReport]:
        return list(await asyncio.gather(*map(_report, services.fleet.engines)))

    @action("/", "addEngine", "Add an engine until the gateway's next start.", NewEngine)
    async def add(self, asked: NamedDependency[NewEngine], services: Deps) -> EngineReport:
        """The engine gets the engine secret. It gets turns as soon as it is ready."""
        engine = await services.fleet.add(engine_url(asked.url))
        _log("engine_added", engine)
        return await _report(engine)

    @action("/{name:str}/drain", "drainEngine", "Send an engine no new turns.")
    async def drain(self, name: FromPath[str], services: Deps) -> EngineReport:
        """Turns that run on the engine end there."""
        return await _drain(services, name, is_draining=True)

    @action("/{name:str}/resume", "resumeEngine", "Send an engine turns again.")
    async def resume(self, name: FromPath[str], services: Deps) -> EngineReport:
        return await _drain(services, name, is_draining=False)

    @delete(
        "/{name:str}",
        operation_id="removeEngine",
        summary="Forget an engine on which nothing runs, until the gateway's next start.",
        status_code=200,
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
    _log("engine_drains" if is_draining else "engine_resumed", engine)
    return await _report(engine)


def _log(event: str, engine: Engine) -> None:
    get_logger("gateway").info(event, engine=engine.name, url=engine.url)


async def _report(engine: Engine) -> EngineReport:
    stats = None
    if engine.is_ready:
        try:
            stats = await engine.stats()
        except GatewayError:
            stats = None  # a slow answer says nothing of whether it takes turns
    now = engine.monotonic()
    breaker = engine.breaker.view(now)
    return EngineReport(
        name=engine.name,
        url=engine.url,
        status=engine.status,
        is_draining=engine.is_draining,
        breaker=breaker.state,
        times_opened=breaker.times_opened,
        detail=engine.readiness,
        description=engine.description,
        stats=stats,
        routing=RoutingReport(
            source=engine.holdings.source,
            is_stale=engine.holdings.is_stale(now),
            names=len(engine.holdings),
            forgotten_names=engine.holdings.num_forgotten,
            running=engine.load.num_running,
            waiting_tokens=engine.load.num_waiting_tokens,
            recent_tokens=int(engine.load.recent(now)),
        ),
    )
