"""The admin API: JSON for the dashboard. It shows no prompt text, because none is stored."""

from typing import Annotated

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter

from gateway.api.auth import OWN_WORKSPACE, AdminAuth, AdminRequest
from gateway.api.definitions import DEFINITIONS
from gateway.api.services import Services
from gateway.diagnostics import divergence_of
from gateway.errors import NotFound
from gateway.ledger.queries import Bucket, Totals
from gateway.ledger.queries_turns import Turn, TurnFilter, page
from gateway.ledger.ranges import Range
from gateway.prefix.fingerprint import DivergenceKind

# Another gateway's clock may be ahead of ours.
_SKEW_MS = 86_400_000


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """None where there is nothing to divide by."""

    token_hit_rate: float | None
    cacheable_hit_rate: float | None
    request_hit_rate: float | None


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """`journal_backlog` is of all workspaces, and None for a key that sees only its own."""

    now_ms: int
    seconds: int
    bucket_seconds: int
    totals: Totals
    rates: Rates
    saved_nano: int
    series: list[Bucket]
    miss_reasons: dict[str, int]
    journal_backlog: int | None
    definitions: dict[str, str]


class TurnDivergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where a turn's prompt first differs from an earlier one's; `kind` None where it only grew.

    `segment` counts the earlier prompt's tools, system and message blocks from 0;
    `missed_tokens`, an estimate by bytes, are those of the earlier prompt from there on.
    """

    turn: str
    earlier: str
    kind: DivergenceKind | None = None
    segment: int | None = None
    missed_tokens: int | None = None


class AdminController(Controller):
    path = "/admin/v1"
    middleware = (AdminAuth,)

    @get("/overview", opt=OWN_WORKSPACE)
    async def overview(
        self,
        request: AdminRequest,
        services: NamedDependency[Services],
        seconds: Annotated[int, QueryParameter(name="seconds", ge=60, le=31_536_000)] = 3600,
    ) -> Overview:
        now_ms = int(services.clock.wall().timestamp() * 1000)
        since_ms = now_ms - seconds * 1000
        of = Range(since_ms=since_ms, until_ms=now_ms + 1, workspace=request.user.workspace)
        totals = await services.queries.totals(of)
        series = await services.queries.series(of)
        return Overview(
            now_ms=now_ms,
            seconds=seconds,
            bucket_seconds=series.bucket_seconds,
            totals=totals,
            rates=rates_of(totals),
            saved_nano=totals.saved_nano,
            series=series.buckets,
            miss_reasons=(await services.queries.reasons(of)).misses,
            journal_backlog=services.journal.backlog if request.user.workspace is None else None,
            definitions={name: each.formula for name, each in DEFINITIONS.items()},
        )

    @get("/turns")
    async def turns(
        self,
        services: NamedDependency[Services],
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 100,
    ) -> list[Turn]:
        now_ms = int(services.clock.wall().timestamp() * 1000)
        of = Range(since_ms=0, until_ms=now_ms + _SKEW_MS)
        return (await page(services.queries.ledger, of, TurnFilter(), limit)).turns

    @get("/turns/{turn_id:str}/divergence", opt=OWN_WORKSPACE)
    async def divergence(
        self,
        request: AdminRequest,
        turn_id: FromPath[str],
        services: NamedDependency[Services],
        earlier: Annotated[str, QueryParameter(name="from", min_length=1, max_length=64)],
    ) -> TurnDivergence:
        """Compare two turns of the ledger, whatever their clients asked for."""
        own = request.user.workspace
        before = await _fingerprint(services, earlier, own)
        found = divergence_of(before, await _fingerprint(services, turn_id, own))
        if found is None:
            return TurnDivergence(turn=turn_id, earlier=earlier)
        return TurnDivergence(
            turn=turn_id,
            earlier=earlier,
            kind=found.kind,
            segment=found.segment,
            missed_tokens=found.missed_tokens,
        )


async def _fingerprint(services: Services, turn_id: str, workspace: str | None) -> bytes:
    found = await services.queries.fingerprint(turn_id, workspace)
    if found is None:
        raise NotFound(f"turn: no fingerprint of `{turn_id[:64]}`")
    return found


def rates_of(totals: Totals) -> Rates:
    marked = totals.prompt_tokens - totals.input_tokens
    return Rates(
        token_hit_rate=_share(totals.cache_read_tokens, totals.prompt_tokens),
        cacheable_hit_rate=_share(totals.cache_read_tokens, marked),
        request_hit_rate=_share(totals.requests_with_read, totals.requests),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
