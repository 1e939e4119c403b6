"""The admin API: JSON for the dashboard. It shows no prompt text, because none is stored."""

from typing import Annotated

from litestar import get
from litestar.params import QueryParameter

from gateway.admin.controller import AdminController, Deps
from gateway.admin.meanings import DEFINITIONS
from gateway.admin.ranges import now_ms
from gateway.admin.structs.usage import HitRates, Overview, Totals, Turn
from gateway.http.auth import OWN_WORKSPACE, AdminRequest
from gateway.ledger.reads.sums import Range
from gateway.ledger.reads.turns import TurnFilter, page

# Another gateway's clock may be ahead of ours.
_SKEW_MS = 86_400_000


class OverviewController(AdminController):
    path = "/admin/v1"

    @get(
        "/overview",
        operation_id="getOverview",
        summary="Totals, rates, savings and time buckets.",
        opt=OWN_WORKSPACE,
    )
    async def overview(
        self,
        request: AdminRequest,
        services: Deps,
        seconds: Annotated[int, QueryParameter(name="seconds", ge=60, le=31_536_000)] = 3600,
    ) -> Overview:
        now = now_ms(services.clock)
        backlog = services.journal.backlog if request.user.workspace is None else None
        since_ms = now - seconds * 1000
        of = Range(since_ms=since_ms, until_ms=now + 1, workspace=request.user.workspace)
        totals = await services.queries.totals(of)
        series = await services.queries.series(of)
        return Overview(
            now_ms=now,
            seconds=seconds,
            bucket_seconds=series.bucket_seconds,
            totals=totals,
            rates=rates_of(totals),
            saved_nano=totals.saved_nano,
            series=series.buckets,
            miss_reasons=(await services.queries.reasons(of)).misses,
            journal_backlog=backlog,
            definitions={name: each.formula for name, each in DEFINITIONS.items()},
        )

    @get("/turns", operation_id="listTurns", summary="The newest turns.")
    async def turns(
        self,
        services: Deps,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 100,
    ) -> list[Turn]:
        of = Range(since_ms=0, until_ms=now_ms(services.clock) + _SKEW_MS)
        return (await page(services.queries.ledger, of, TurnFilter(), limit)).turns


def rates_of(totals: Totals) -> HitRates:
    marked = totals.prompt_tokens - totals.input_tokens
    return HitRates(
        token_hit_rate=_share(totals.cache_read_tokens, totals.prompt_tokens),
        cacheable_hit_rate=_share(totals.cache_read_tokens, marked),
        request_hit_rate=_share(totals.requests_with_read, totals.requests),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
