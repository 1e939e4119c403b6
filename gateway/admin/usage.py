"""The admin API's numbers over a range of time: usage, savings, latency, prefixes, turns."""

import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter

from engine.protocol import TTLS, WRITE_FIELDS
from gateway.admin.controller import (
    ASKED_RANGE,
    HOUR_MS,
    AdminController,
    Deps,
    EngineName,
    ModelName,
    Span,
    WorkspaceName,
    now_ms,
    range_of,
    view,
)
from gateway.admin.prompts import turn_of
from gateway.base.errors import InvalidRequest
from gateway.http.auth import AdminRequest
from gateway.http.services import Services
from gateway.ledger.reads import turns as queries_turns
from gateway.ledger.reads.prefill_times import avoided, token_times
from gateway.ledger.reads.prefixes import prefixes as prefixes_of
from gateway.ledger.reads.sums import Priced, Range, comparisons, waterfall
from gateway.ledger.reads.sums import latency as latency_of
from gateway.ledger.reads.turns import Cursor, TurnFilter
from gateway.prompt.ask import AGENT_CHARACTERS
from gateway.structs import fleet
from gateway.structs import usage as structs

GroupBy = Literal["workspace", "key", "engine", "model"]
_CHOICES_MS = 31 * 86_400_000
# How far another gateway's clock may be ahead of ours.
_SKEW_MS = 86_400_000
# The dimension of the ledger's sums that each word means.
_DIMENSIONS: dict[str, str] = {
    "workspace": "workspace_id",
    "key": "key_id",
    "engine": "engine",
    "model": "model",
}


_WRITES = " + ".join(name.removesuffix("_tokens") for name in WRITE_FIELDS.values())
_TABLE = Path(__file__).with_name("meanings.toml").read_text("utf-8")
_TABLE = _TABLE.replace("PROMPT", "input + cache_read + WRITES").replace("WRITES", _WRITES)
DEFINITIONS = {
    name: fleet.Definition(title=title, unit=unit, formula=formula)
    for name, (title, unit, formula) in tomllib.loads(_TABLE).items()
}
DEFINITIONS |= {
    name: fleet.Definition(
        title=f"Written, {TTLS[ttl].words}",
        unit="tokens",
        formula=f"prompt tokens written to entries with a TTL of {TTLS[ttl].words}",
    )
    for ttl, name in WRITE_FIELDS.items()
}


class UsageController(AdminController):
    path = "/admin/v1"
    dependencies = ASKED_RANGE

    @view(
        "/about", "getAbout", "Who is asking, what can be filtered by, and what each number means."
    )
    async def about(self, request: AdminRequest, services: Deps) -> fleet.About:
        now = now_ms(services.clock)
        workspace_id = request.user.workspace
        of = Range(since_ms=now - _CHOICES_MS, until_ms=now + HOUR_MS, workspace=workspace_id)
        names = await services.queries.names(of)
        workspaces = {workspace for workspace, _, _ in names}
        workspaces |= {w.id for w in await services.workspaces.all() if request.user.sees(w.id)}
        engines = {engine for _, engine, _ in names if engine}
        if workspace_id is None:
            engines |= {engine.name for engine in services.fleet.engines}
        return fleet.About(
            now_ms=now,
            workspace=workspace_id,
            sample=services.keyring.is_sample,
            may_send=request.user.may_send and not services.keyring.is_sample,
            may_change=request.user.may_change and not services.keyring.is_sample,
            first_ms=await queries_turns.first_ms(services.queries.ledger, workspace_id),
            has_placeholder_prices=services.prices.is_placeholder,
            workspaces=sorted(workspaces),
            engines=sorted(engines),
            models=sorted({model for _, _, model in names}),
            served=sorted(
                {services.catalogue.name_of(model) for model in services.fleet.served.models}
            ),
            listed=_listed(services),
            definitions=DEFINITIONS,
        )

    @view("/turns", "listTurns", "The newest turns.", None)
    async def turns(
        self,
        services: Deps,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 100,
    ) -> list[structs.Turn]:
        of = Range(since_ms=0, until_ms=now_ms(services.clock) + _SKEW_MS)
        ledger = services.queries.ledger
        return (await queries_turns.page(ledger, of, TurnFilter(), limit)).turns

    @view("/usage", "getUsage", "A range, the one before it, and its intervals.")
    async def usage(self, services: Deps, of: NamedDependency[Range]) -> structs.Usage:
        return await _usage_of(services, of)

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
    ) -> list[structs.Group]:
        names = list(dict.fromkeys(group_by))
        sums = await services.queries.totals_by(of, [_DIMENSIONS[name] for name in names])
        rows = []
        for values, totals in sums.items():
            # Turns without an engine are summed under an empty name.
            keys_of_row = (value or None for value in values)
            whose: dict[str, Any] = dict.fromkeys(_DIMENSIONS) | dict(
                zip(names, keys_of_row, strict=True)
            )
            saved = totals.saved_nano
            rows.append(
                structs.Group(**whose, totals=totals, rates=rates_of(totals), saved_nano=saved)
            )
        return sorted(rows, key=lambda group: (-group.totals.requests, str(group)))

    @view("/savings", "getSavings", "What caching saved, and how.")
    async def savings(self, services: Deps, of: NamedDependency[Range]) -> structs.Savings:
        queries = services.queries
        prices = services.prices
        sums = await queries.totals_by(of, ("price", "prompt_above"))
        groups = [Priced(price, above, totals) for (price, above), totals in sums.items()]
        by_engine = await queries.totals_by(of, ("engine", "model"))
        times = await token_times(queries.ledger, services.catalogue.name_of)
        avoided_by_engine = [
            avoided(engine or None, model, totals.cache_read_tokens, times.of(engine, model))
            for (engine, model), totals in sorted(by_engine.items())
            if totals.cache_read_tokens
        ]
        seconds = [
            entry.prefill_seconds
            for entry in avoided_by_engine
            if entry.prefill_seconds is not None
        ]
        gpu_hours = [entry.gpu_hours for entry in avoided_by_engine if entry.gpu_hours is not None]
        on = datetime.fromtimestamp((of.until_ms - 1) / 1000, UTC).date()
        return structs.Savings(
            since_ms=of.since_ms,
            until_ms=of.until_ms,
            own=waterfall(groups, prices.own),
            hosted=comparisons(groups, prices.hosted, on),
            avoided=avoided_by_engine,
            prefill_tokens_avoided=sum(entry.prefill_tokens for entry in avoided_by_engine),
            prefill_seconds_avoided=sum(seconds) if seconds else None,
            gpu_hours_avoided=sum(gpu_hours) if gpu_hours else None,
            unmeasured_tokens=sum(
                entry.prefill_tokens for entry in avoided_by_engine if entry.prefill_seconds is None
            ),
        )

    @view("/latency", "getLatency", "Times to first token.")
    async def latency(self, services: Deps, of: NamedDependency[Range]) -> structs.Latency:
        return await latency_of(services.queries.ledger, of)

    @view("/prefixes", "listPrefixes", "Prefixes that came more than once.")
    async def prefixes(
        self,
        request: AdminRequest,
        services: Deps,
        span: NamedDependency[Span],
        workspace: WorkspaceName = None,
        model: ModelName = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 100,
    ) -> list[structs.PrefixReport]:
        confined = request.user.confine(workspace)
        of = range_of(services, span, confined, model=model)
        ledger = services.queries.ledger
        prices = services.prices.own
        return await prefixes_of(ledger, of, prices, limit)

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
        client: Annotated[
            str | None, QueryParameter(name="client", max_length=AGENT_CHARACTERS)
        ] = None,
        min_read_percent: Annotated[
            int | None, QueryParameter(name="min_read_percent", ge=0, le=100)
        ] = None,
        max_read_percent: Annotated[
            int | None, QueryParameter(name="max_read_percent", ge=0, le=100)
        ] = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 100,
        after: Annotated[str | None, QueryParameter(name="after", max_length=96)] = None,
    ) -> structs.TurnPage:
        """The default range is all time, since `limit` bounds the page.

        `client` is the beginning of the user agent. The percents are shares of the prompt's tokens.
        To filter by these, by `key` or by `has_read`, a page searches 20,000 turns at most. Its
        `num_searched` says how many it searched.
        """
        until_ms = span.until_ms
        of = Range(
            since_ms=span.since_ms or 0,
            until_ms=now_ms(services.clock) + HOUR_MS if until_ms is None else until_ms,
            workspace=request.user.confine(workspace),
            engine=engine,
            model=model,
        )
        which = TurnFilter(
            outcome=outcome,
            miss_reason=miss_reason,
            key_id=key,
            prefix=prefix,
            has_read=has_read,
            client=client,
            min_read_percent=min_read_percent,
            max_read_percent=max_read_percent,
        )
        try:
            cursor = None if after is None else Cursor.parse(after)
        except ValueError:
            raise InvalidRequest("after: not a cursor that a page has returned") from None
        return await queries_turns.page(services.queries.ledger, of, which, limit, cursor)

    @view("/turns/{turn_id:str}", "getTurn", "One turn.")
    async def turn(
        self, request: AdminRequest, turn_id: FromPath[str], services: Deps
    ) -> structs.Turn:
        return await turn_of(services, turn_id, request.user.workspace)


async def _usage_of(services: Services, of: Range) -> structs.Usage:
    queries = services.queries
    totals = await queries.totals(of)
    before = await queries.totals(of.before())
    series = await queries.series(of)
    reasons = await queries.reasons(of)
    return structs.Usage(
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
        part_reasons=reasons.parts,
        mixed_reasons=reasons.mixed,
        mark_reasons=reasons.marks,
        outcomes=reasons.outcomes,
    )


def _listed(services: Services) -> list[fleet.ListedModel]:
    catalogue = services.catalogue
    return [
        fleet.ListedModel(
            id=model.id,
            root=model.adapter or model.stands_for or None,
            parent=catalogue.base_of(model) if model.adapter is not None else None,
            sees=catalogue.sees(model.id, services.fleet.served),
        )
        for model in catalogue.models(services.fleet.served)
    ]


def rates_of(totals: structs.Totals) -> structs.HitRates:
    read = totals.cache_read_tokens
    prompt = totals.prompt_tokens
    marked = prompt - totals.input_tokens
    return structs.HitRates(
        token_hit_rate=read / prompt if prompt else None,
        cacheable_hit_rate=read / marked if marked else None,
        request_hit_rate=totals.requests_with_read / totals.requests if totals.requests else None,
    )
