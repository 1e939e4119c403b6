"""The admin API's numbers over a range of time: usage, savings, latency, prefixes, turns."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter

from gateway.admin.controller import AdminController, Deps, view
from gateway.admin.meanings import DEFINITIONS
from gateway.admin.ranges import (
    ASKED_RANGE,
    HOUR_MS,
    EngineName,
    ModelName,
    Span,
    WorkspaceName,
    now_ms,
    range_of,
)
from gateway.admin.structs.fleet import About
from gateway.admin.structs.usage import (
    Group,
    HitRates,
    Latency,
    Overview,
    PrefixReport,
    Savings,
    Totals,
    Turn,
    TurnPage,
    Usage,
)
from gateway.base.errors import InvalidRequest, NotFound
from gateway.http.auth import AdminRequest
from gateway.ledger.reads import latency as queries_latency
from gateway.ledger.reads import prefixes as queries_prefixes
from gateway.ledger.reads import turns as queries_turns
from gateway.ledger.reads.savings import Priced, avoided, comparisons, waterfall
from gateway.ledger.reads.sums import Range
from gateway.ledger.reads.turns import Cursor, TurnFilter

GroupBy = Literal["workspace", "key", "engine", "model"]

_CHOICES_MS = 31 * 86_400_000
# Another gateway's clock may be ahead of ours.
_SKEW_MS = 86_400_000
# The dimension of the ledger's sums that each word means.
_DIMENSIONS: dict[str, str] = {
    "workspace": "workspace_id",
    "key": "key_id",
    "engine": "engine",
    "model": "model",
}


class UsageController(AdminController):
    path = "/admin/v1"
    dependencies = ASKED_RANGE

    @view(
        "/about", "getAbout", "Who is asking, what can be filtered by, and what each number means."
    )
    async def about(self, request: AdminRequest, services: Deps) -> About:
        now = now_ms(services.clock)
        own = request.user.workspace
        of = Range(since_ms=now - _CHOICES_MS, until_ms=now + HOUR_MS, workspace=own)
        found = list(await services.queries.totals_by(of, ("workspace_id", "engine", "model")))
        workspaces = {workspace for workspace, _, _ in found}
        workspaces |= {w.id for w in await services.workspaces.all() if request.user.sees(w.id)}
        engines = {engine for _, engine, _ in found if engine}
        if own is None:
            engines |= {engine.name for engine in services.fleet.engines}
        return About(
            now_ms=now,
            workspace=own,
            sample=services.keyring.is_sample,
            may_send=request.user.may_send and not services.keyring.is_sample,
            has_placeholder_prices=services.prices.is_placeholder,
            workspaces=sorted(workspaces),
            engines=sorted(engines),
            models=sorted({model for _, _, model in found}),
            served=sorted(services.fleet.served),
            definitions=DEFINITIONS,
        )

    @view("/overview", "getOverview", "Totals, rates, savings and time buckets.")
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
        ledger = services.queries.ledger
        return (await queries_turns.page(ledger, of, TurnFilter(), limit)).turns

    @view("/usage", "getUsage", "A range, the one before it, and its intervals.")
    async def usage(self, services: Deps, of: NamedDependency[Range]) -> Usage:
        queries = services.queries
        totals, before = await queries.totals(of), await queries.totals(of.before())
        series, reasons = await queries.series(of), await queries.reasons(of)
        return Usage(
            since_ms=of.since_ms,
            until_ms=of.until_ms,
            bucket_seconds=series.bucket_seconds,
            totals=totals,
            rates=rates_of(totals),
            saved_nano=totals.saved_nano,
            before=before,
            rates_before=rates_of(before),
            saved_nano_before=before.saved_nano,
            series=series.buckets,
            miss_reasons=reasons.misses,
            outcomes=reasons.outcomes,
        )

    @view(
        "/usage/groups",
        "getUsageGroups",
        "A range by workspace, key, engine, model or several of them.",
    )
    async def groups(
        self,
        services: Deps,
        of: NamedDependency[Range],
        group_by: Annotated[list[GroupBy], QueryParameter(name="group_by", min_items=1)],
    ) -> list[Group]:
        names = list(dict.fromkeys(group_by))
        found = await services.queries.totals_by(of, [_DIMENSIONS[name] for name in names])
        made = []
        for values, totals in found.items():
            own: dict[str, Any] = dict.fromkeys(_DIMENSIONS) | dict(zip(names, values, strict=True))
            made.append(
                Group(
                    workspace=own["workspace"],
                    key=own["key"],
                    engine=own["engine"] or None,
                    model=own["model"],
                    totals=totals,
                    rates=rates_of(totals),
                    saved_nano=totals.saved_nano,
                )
            )
        return sorted(made, key=lambda group: (-group.totals.requests, str(group)))

    @view("/savings", "getSavings", "What caching saved, and how.")
    async def savings(self, services: Deps, of: NamedDependency[Range]) -> Savings:
        queries, prices = services.queries, services.prices
        found = await queries.totals_by(of, ("price", "prompt_above"))
        groups = [Priced(price, above, totals) for (price, above), totals in found.items()]
        by_engine = await queries.totals_by(of, ("engine", "model"))
        spared = [
            avoided(engine or None, model, totals)
            for (engine, model), totals in sorted(by_engine.items())
            if totals.cache_read_tokens
        ]
        timed = [each.prefill_seconds for each in spared if each.prefill_seconds is not None]
        seconds = sum(timed) if timed else None
        on = datetime.fromtimestamp((of.until_ms - 1) / 1000, UTC).date()
        return Savings(
            since_ms=of.since_ms,
            until_ms=of.until_ms,
            own=waterfall(groups, prices.own),
            hosted=comparisons(groups, prices.hosted, on),
            avoided=spared,
            prefill_tokens_avoided=sum(each.prefill_tokens for each in spared),
            prefill_seconds_avoided=seconds,
            gpu_hours_avoided=None if seconds is None else seconds / 3600,
            unmeasured_tokens=sum(e.prefill_tokens for e in spared if e.prefill_seconds is None),
        )

    @view("/latency", "getLatency", "Times to first token.")
    async def latency(self, services: Deps, of: NamedDependency[Range]) -> Latency:
        return await queries_latency.latency(services.queries.ledger, of)

    @view("/prefixes", "listPrefixes", "Prefixes that came more than once.")
    async def prefixes(
        self,
        request: AdminRequest,
        services: Deps,
        span: NamedDependency[Span],
        workspace: WorkspaceName = None,
        model: ModelName = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 100,
    ) -> list[PrefixReport]:
        own = request.user.confine(workspace)
        of = range_of(services, span, own, model=model)
        ledger, prices = services.queries.ledger, services.prices.own
        return await queries_prefixes.prefixes(ledger, of, prices, limit)

    @view("/turns/search", "searchTurns", "Turns, page by page, the newest first.")
    async def search_turns(
        self,
        request: AdminRequest,
        services: Deps,
        span: NamedDependency[Span],
        workspace: WorkspaceName = None,
        engine: EngineName = None,
        model: ModelName = None,
        outcome: Annotated[str | None, QueryParameter(name="outcome", max_length=32)] = None,
        miss_reason: Annotated[
            str | None, QueryParameter(name="miss_reason", max_length=32)
        ] = None,
        key: Annotated[str | None, QueryParameter(name="key", max_length=32)] = None,
        prefix: Annotated[str | None, QueryParameter(name="prefix", max_length=16)] = None,
        has_read: Annotated[bool | None, QueryParameter(name="has_read")] = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 100,
        after: Annotated[str | None, QueryParameter(name="after", max_length=96)] = None,
    ) -> TurnPage:
        """The default range is all time, since `limit` bounds the page."""
        until_ms = span.until_ms
        of = Range(
            since_ms=span.since_ms or 0,
            until_ms=now_ms(services.clock) + HOUR_MS if until_ms is None else until_ms,
            workspace=request.user.confine(workspace),
            engine=engine,
            model=model,
        )
        which = TurnFilter(
            outcome=outcome, miss_reason=miss_reason, key_id=key, prefix=prefix, has_read=has_read
        )
        ledger = services.queries.ledger
        return await queries_turns.page(ledger, of, which, limit, cursor_of(after))

    @view("/turns/{turn_id:str}", "getTurn", "One turn.")
    async def turn(self, request: AdminRequest, turn_id: FromPath[str], services: Deps) -> Turn:
        ledger, own = services.queries.ledger, request.user.workspace
        found = await queries_turns.one(ledger, turn_id[:64], own)
        if found is None:
            raise NotFound(f"turn: `{turn_id[:64]}`")
        return found


def cursor_of(written: str | None) -> Cursor | None:
    try:
        return None if written is None else Cursor.parse(written)
    except ValueError:
        raise InvalidRequest("after: not a cursor that a page has returned") from None


def rates_of(totals: Totals) -> HitRates:
    marked = totals.prompt_tokens - totals.input_tokens
    return HitRates(
        token_hit_rate=_share(totals.cache_read_tokens, totals.prompt_tokens),
        cacheable_hit_rate=_share(totals.cache_read_tokens, marked),
        request_hit_rate=_share(totals.requests_with_read, totals.requests),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
