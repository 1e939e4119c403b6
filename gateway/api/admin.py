"""The admin API: JSON for the dashboard. It shows no prompt text, because none is stored."""

from typing import Annotated

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from engine.protocol import Description, EntryInfo, Stats
from gateway.api.auth import AdminAuth
from gateway.api.services import Services
from gateway.engines import Engine, EngineStatus
from gateway.errors import GatewayError
from gateway.ledger.queries import Bucket, Totals, Turn

DEFINITIONS = {
    "token_hit_rate": "cache_read / (input + cache_read + cache_write_5m + cache_write_1h) tokens",
    "cacheable_hit_rate": "cache_read / (cache_read + cache_write_5m + cache_write_1h) tokens",
    "request_hit_rate": "requests with a read / requests",
    "saved_nano": "cost of the same tokens without a cache - cost, in nano-dollars, write premium"
    " included; negative while writes have not been read",
    "unpriced": "requests whose model has no price: they are in the tokens, not in the money",
    "automatic_tokens": "reused from memory beyond the read, billed as input or write",
}


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """None where there is nothing to divide by."""

    token_hit_rate: float | None
    cacheable_hit_rate: float | None
    request_hit_rate: float | None


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    now_ms: int
    seconds: int
    bucket_seconds: int
    totals: Totals
    rates: Rates
    saved_nano: int
    series: list[Bucket]
    miss_reasons: dict[str, int]
    journal_backlog: int
    definitions: dict[str, str]


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    url: str
    status: EngineStatus
    detail: dict[str, object]
    description: Description | None
    stats: Stats | None


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One live entry of one engine. `workspace` None: a scope of no workspace known here."""

    engine: str
    workspace: str | None
    entry: EntryInfo


class AdminController(Controller):
    path = "/admin/v1"
    middleware = (AdminAuth,)

    @get("/overview")
    async def overview(
        self,
        services: NamedDependency[Services],
        seconds: Annotated[int, QueryParameter(name="seconds", ge=60, le=31_536_000)] = 3600,
    ) -> Overview:
        now_ms = int(services.clock.wall().timestamp() * 1000)
        since_ms = now_ms - seconds * 1000
        totals = await services.queries.totals(since_ms)
        series = await services.queries.series(since_ms, now_ms)
        return Overview(
            now_ms=now_ms,
            seconds=seconds,
            bucket_seconds=series.bucket_seconds,
            totals=totals,
            rates=rates_of(totals),
            saved_nano=totals.saved_nano,
            series=series.buckets,
            miss_reasons=await services.queries.miss_reasons(since_ms),
            journal_backlog=services.journal.backlog,
            definitions=DEFINITIONS,
        )

    @get("/engines")
    async def engines(self, services: NamedDependency[Services]) -> list[EngineReport]:
        return [await _report(engine) for engine in services.fleet.engines]

    @get("/turns")
    async def turns(
        self,
        services: NamedDependency[Services],
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 100,
    ) -> list[Turn]:
        return await services.queries.turns(limit)

    @get("/leases")
    async def leases(self, services: NamedDependency[Services]) -> list[Lease]:
        workspaces = await services.keys.workspaces()
        names = {services.keyring.scope_of(workspace): workspace for workspace in workspaces}
        return [
            Lease(engine=engine.name, workspace=names.get(entry.scope), entry=entry)
            for engine in services.fleet.ready
            for entry in await engine.entries()
        ]


def rates_of(totals: Totals) -> Rates:
    marked = totals.prompt_tokens - totals.input_tokens
    return Rates(
        token_hit_rate=_share(totals.cache_read_tokens, totals.prompt_tokens),
        cacheable_hit_rate=_share(totals.cache_read_tokens, marked),
        request_hit_rate=_share(totals.requests_with_read, totals.requests),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


async def _report(engine: Engine) -> EngineReport:
    stats = None
    if engine.is_ready:
        try:
            stats = await engine.stats()
        except GatewayError:
            engine.mark_down("no stats")
    return EngineReport(
        name=engine.name,
        url=engine.url,
        status=engine.status,
        detail=engine.readiness,
        description=engine.description,
        stats=stats,
    )
