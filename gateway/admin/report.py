"""Usage for other programs: Anthropic's usage and cost reports, and CSV.

The reports have the shape of the Admin API (`platform.claude.com/docs/en/api/admin`). Fields
without a meaning here are null. `cost_report` counts the operator's own prices, in cents.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import QueryParameter
from litestar.response import Stream

from gateway.admin.controller import ASKED_RANGE, MAX_MS, AdminController, Deps, now_ms, view
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.request import Ttl as MessagesTtl
from gateway.http.auth import EXPORT
from gateway.http.services import Services
from gateway.ledger.reads.sums import Range, costs_by_class
from gateway.ledger.upkeep import check_rows, moment, turn_lines, usage_lines
from gateway.structs.usage import Totals

Width = Literal["1m", "1h", "1d"]
UsageKey = Literal["api_key_id", "workspace_id", "model"]
CostKey = Literal["workspace_id", "description"]
_SECONDS: dict[Width, int] = {"1m": 60, "1h": 3600, "1d": 86_400}
# How many intervals a page holds: by default, and at most.
_LIMITS: dict[Width, tuple[int, int]] = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}
_DIMENSIONS = {"api_key_id": "key_id", "workspace_id": "workspace_id", "model": "model"}
_NANO_PER_CENT = 10_000_000
_CSV = "text/csv; charset=utf-8"
Result = TypeVar("Result")
StartingAt = Annotated[str, QueryParameter(name="starting_at", max_length=40)]
EndingAt = Annotated[str | None, QueryParameter(name="ending_at", max_length=40)]
Limit = Annotated[int | None, QueryParameter(name="limit", ge=1, le=1440)]
_BY = QueryParameter(name="group_by[]", min_items=1)
UsageGroups = Annotated[list[UsageKey] | None, _BY]
CostGroups = Annotated[list[CostKey] | None, _BY]
PageToken = Annotated[str | None, QueryParameter(name="page", max_length=40)]


class ServerToolUse(msgspec.Struct, frozen=True, kw_only=True):
    web_search_requests: int = 0


class UsageResult(msgspec.Struct, frozen=True, kw_only=True):
    """What is not grouped by is null. `cache_creation` is by TTL class."""

    uncached_input_tokens: int
    cache_creation: dict[str, int]
    cache_read_input_tokens: int
    output_tokens: int
    server_tool_use: ServerToolUse = ServerToolUse()
    api_key_id: str | None = None
    workspace_id: str | None = None
    model: str | None = None
    service_tier: None = None
    context_window: None = None
    inference_geo: None = None
    account_id: None = None
    service_account_id: None = None


class CostResult(msgspec.Struct, frozen=True, kw_only=True):
    """`amount` is in cents, exact."""

    amount: str
    currency: Literal["USD"] = "USD"
    cost_type: Literal["tokens"] | None = None
    description: str | None = None
    model: str | None = None
    token_type: str | None = None
    workspace_id: str | None = None
    service_tier: None = None
    context_window: None = None
    inference_geo: None = None


class Bucket(msgspec.Struct, Generic[Result], frozen=True, kw_only=True):
    starting_at: str
    ending_at: str
    results: list[Result]


class Report(msgspec.Struct, Generic[Result], frozen=True, kw_only=True):
    data: list[Bucket[Result]]
    has_more: bool
    next_page: str | None


class Pages(msgspec.Struct, frozen=True, kw_only=True):
    """The intervals of one page: [since_ms, until_ms) in steps, and where the next page begins."""

    since_ms: int
    until_ms: int
    step_ms: int
    next_page: str | None

    @property
    def starts(self) -> range:
        return range(self.since_ms, self.until_ms, self.step_ms)


def pages(
    now_ms: int, width: Width, bounds: tuple[str, str | None], page: str | None, limit: int | None
) -> Pages:
    """Intervals that start at or after the first bound and end before the second one."""
    step = _SECONDS[width] * 1000
    default, most = _LIMITS[width]
    count = min(limit or default, most)
    since = _ms(bounds[0], "starting_at") // step * step
    until = now_ms if bounds[1] is None else _ms(bounds[1], "ending_at")
    # A report without an end includes the running interval.
    until = -(-until // step) * step if bounds[1] is None else until // step * step
    if until <= since:
        raise InvalidRequest("ending_at: must be after starting_at")
    if page is not None:
        given = page.removeprefix("page_")
        if not (given.isascii() and given.isdigit() and len(given) < 16):
            raise InvalidRequest("page: not a page that a report has returned")
        since = min(max(since, int(given) // step * step), until)
    end = min(until, since + count * step)
    return Pages(
        since_ms=since, until_ms=end, step_ms=step, next_page=f"page_{end}" if end < until else None
    )


def _ms(written: str, field: str) -> int:
    try:
        found = datetime.fromisoformat(written)
        ms = int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{field}: must be an RFC 3339 time") from None
    if not 0 <= ms <= MAX_MS:
        raise InvalidRequest(f"{field}: must be an RFC 3339 time from 1970 on")
    return ms


async def _report(
    services: Services,
    found: Pages,
    by: list[str],
    make: Callable[[dict[str, Any], Totals], list[Result]],
) -> Report[Result]:
    """What `make` says of the groups of each interval."""
    of = Range(since_ms=found.since_ms, until_ms=found.until_ms)
    totals = await services.queries.totals_by(of, by, found.step_ms // 1000)
    results: dict[int, list[Result]] = {start: [] for start in found.starts}
    for (start, *values), sums in sorted(totals.items()):
        # Where turns are deleted the ledger answers with whole days, also those before this page.
        if start in results:
            results[start] += make(dict(zip(by, values, strict=True)), sums)
    data = [
        Bucket(starting_at=moment(start), ending_at=moment(start + found.step_ms), results=each)
        for start, each in results.items()
    ]
    return Report(data=data, has_more=found.next_page is not None, next_page=found.next_page)


def _usage_results(own: dict[str, Any], totals: Totals) -> list[UsageResult]:
    return [
        UsageResult(
            uncached_input_tokens=totals.input_tokens,
            cache_creation={
                f"ephemeral_{ttl}_input_tokens": tokens
                for ttl, tokens in totals.writes.items()
                if tokens or ttl in get_args(MessagesTtl)
            },
            cache_read_input_tokens=totals.cache_read_tokens,
            output_tokens=totals.output_tokens,
            api_key_id=own.get("key_id"),
            workspace_id=own.get("workspace_id"),
            model=own.get("model"),
        )
    ]


def cents(nano: int) -> str:
    return f"{(Decimal(nano) / _NANO_PER_CENT).normalize():f}"


class ReportController(AdminController):
    dependencies = ASKED_RANGE

    @view(
        "/v1/organizations/usage_report/messages",
        "getUsageReport",
        "Usage in the shape of Anthropic's Admin API.",
        None,
    )
    async def usage_report(
        self,
        services: Deps,
        starting_at: StartingAt,
        ending_at: EndingAt = None,
        bucket_width: Annotated[Width, QueryParameter(name="bucket_width")] = "1d",
        group_by: UsageGroups = None,
        limit: Limit = None,
        page: PageToken = None,
    ) -> Report[UsageResult]:
        found = pages(now_ms(services.clock), bucket_width, (starting_at, ending_at), page, limit)
        by = [_DIMENSIONS[name] for name in dict.fromkeys(group_by or ())]
        return await _report(services, found, by, _usage_results)

    @view(
        "/v1/organizations/cost_report",
        "getCostReport",
        "Own costs in the shape of Anthropic's Admin API.",
        None,
    )
    async def cost_report(
        self,
        services: Deps,
        starting_at: StartingAt,
        ending_at: EndingAt = None,
        group_by: CostGroups = None,
        limit: Limit = None,
        page: PageToken = None,
    ) -> Report[CostResult]:
        found = pages(now_ms(services.clock), "1d", (starting_at, ending_at), page, limit)
        wanted = group_by or []
        by = ["workspace_id"] if "workspace_id" in wanted else []
        by += ["model", "price", "prompt_above"] if "description" in wanted else []
        return await _report(services, found, by, partial(_cost_results, services))

    @get(
        "/admin/v1/export.csv",
        operation_id="exportUsage",
        summary="Usage as CSV.",
        media_type=_CSV,
        opt=EXPORT,
    )
    async def export(
        self,
        services: Deps,
        of: NamedDependency[Range],
        rows: Annotated[Literal["hours", "days", "turns"], QueryParameter(name="rows")] = "hours",
    ) -> Stream:
        ledger = services.queries.ledger
        # The first query runs before the answer begins: without a database, or beyond the bound,
        # the answer is an error and not half a file.
        step = {"turns": None, "hours": _SECONDS["1h"], "days": _SECONDS["1d"]}[rows]
        await check_rows(ledger, of, step, services.bounds.max_export_rows)
        lines = usage_lines(ledger, of, step) if step else turn_lines(ledger, of)
        headers = {"content-disposition": f'attachment; filename="holdfast-{rows}.csv"'}
        return Stream(lines, media_type=_CSV, headers=headers)


def _cost_results(services: Services, own: dict[str, Any], totals: Totals) -> list[CostResult]:
    """One result; or one for each class of tokens, where the price they were billed at is known."""
    workspace = own.get("workspace_id")
    if "price" not in own:
        return [CostResult(amount=cents(totals.cost_nano), workspace_id=workspace)]
    costs: dict[str | None, int] = {None: totals.cost_nano}
    if (price := services.prices.own.with_id(own["price"])) is not None:
        costs = dict(costs_by_class(price.rates_above(own["prompt_above"]), totals).items())
    return [
        CostResult(
            amount=cents(nano),
            cost_type="tokens",
            description=" - ".join(filter(None, (own["model"], token_type))),
            model=own["model"],
            token_type=token_type,
            workspace_id=workspace,
        )
        for token_type, nano in costs.items()
        if nano
    ]
