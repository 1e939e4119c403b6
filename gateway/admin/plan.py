"""How much memory keeps which promise: POST /admin/v1/plan, simulated in a process of its own."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from statistics import median
from typing import Any

import msgspec
from litestar import post
from litestar.di import NamedDependency
from litestar.response import Stream

from gateway.admin.advise import in_thread, min_tokens_of, row_of
from gateway.admin.bodies import JsonBody
from gateway.admin.controller import AdminController, Deps, action, view
from gateway.admin.ranges import Span, range_of
from gateway.admin.structs.advice import Plan, PlanChoices, PlanFailed, Planned, Progress
from gateway.advice.observation import Observation, observe
from gateway.base.errors import GatewayError, InvalidRequest
from gateway.http.auth import READS_BY_POST, AdminRequest, Viewer
from gateway.http.presence import while_present
from gateway.http.services import Services
from gateway.ledger.reads.sums import Range
from gateway.ledger.reads.turns import observed
from gateway.planning.asked import DEFAULT_MIN_TOKENS, DTYPES, MAX_TURNS, PlanRequest
from gateway.planning.families import family_names
from gateway.planning.traffic import Job, Numbers, Thinned, Turn
from gateway.prices.sheets import PriceSheets
from gateway.prompt.fingerprint import unpack

_LINES = "application/x-ndjson"
_LINE = "plan"
MAX_PREFIXES = 2_000_000
"""Of all turns together; older turns are left out beyond it."""
_TIMED_TOKENS = 128
"""A turn that computed fewer was timed for its fixed cost."""


class PlanController(AdminController):
    path = "/admin/v1/plan"

    @view("/", "planChoices", "What a plan can be asked for.")
    async def choices(self) -> PlanChoices:
        return PlanChoices(models=family_names(), kv_dtypes=list(DTYPES))

    @action(
        "/",
        "plan",
        "What memory, tiers and engines would give, simulated.",
        PlanRequest,
        **(READS_BY_POST | {"is_plan": True}),
    )
    async def plan(
        self,
        request: AdminRequest,
        asked: NamedDependency[PlanRequest],
        services: Deps,
    ) -> Plan:
        job = await while_present(request, _job(services, asked, request.user))
        return await while_present(request, services.planners.plan(job))

    @post(
        "/progress",
        operation_id="planWithProgress",
        summary="The same as lines of JSON: `progress`, and at last `plan` or `error`.",
        status_code=200,
        media_type=_LINES,
        opt=READS_BY_POST | {"is_plan": True},
        dependencies={"asked": JsonBody(PlanRequest)},
    )
    async def plan_with_progress(
        self,
        request: AdminRequest,
        asked: NamedDependency[PlanRequest],
        services: Deps,
    ) -> Stream:
        job = await while_present(request, _job(services, asked, request.user))
        lines = services.planners.lines(job)
        # A request that can't be planned is an error, and not the beginning of a stream.
        first = await while_present(request, _first(lines))
        return Stream(_told(first, lines), media_type=_LINES)


async def _first(lines: AsyncGenerator[Progress | Planned, None]) -> Progress | Planned:
    return await anext(lines)


async def _told(
    first: Progress | Planned, rest: AsyncGenerator[Progress | Planned, None]
) -> AsyncIterator[bytes]:
    yield msgspec.json.encode(first) + b"\n"
    try:
        async for line in rest:
            yield msgspec.json.encode(line) + b"\n"
    except GatewayError as error:
        told = PlanFailed(message=str(error), is_asked=isinstance(error, InvalidRequest))
        yield msgspec.json.encode(told) + b"\n"
    finally:
        # Closing it ends the process.
        await rest.aclose()


async def _job(services: Services, asked: PlanRequest, viewer: Viewer) -> Job:
    own = viewer.confine(asked.workspace)
    if sum(each is not None for each in (asked.trace, asked.made)) == 2:
        raise InvalidRequest("trace: give either `trace` or `made`")
    if asked.trace is not None or asked.made is not None:
        return Job(asked=asked)
    span = Span(since_ms=asked.since_ms, until_ms=asked.until_ms)
    of = range_of(services, span, own, model=asked.served_model)
    gathering = TrafficGathering(services.prices.own)
    async for rows in observed(services.queries.ledger, of, asked.key, MAX_TURNS):
        await in_thread(services, viewer, _LINE, gathering.take, rows)
        if gathering.is_full:
            break
    told = [min_tokens_of(services, model) for model in gathering.models]
    least = min(told, default=DEFAULT_MIN_TOKENS)
    job: Job = await in_thread(services, viewer, _LINE, gathering.job, asked, least)
    return job


class TrafficGathering:
    """Turns of the ledger as the planner needs them. Rows come the newest first."""

    def __init__(self, prices: PriceSheets) -> None:
        self._prices = prices
        self._numbers = Numbers()
        self._scopes = Numbers()
        self._turns: list[Turn] = []
        self._num_prefixes = 0
        self.models: set[str] = set()
        self._rates: list[float] = []
        self._decodes: list[float] = []
        self._overheads: list[float] = []

    @property
    def is_full(self) -> bool:
        return self._num_prefixes >= MAX_PREFIXES

    def take(self, rows: Sequence[Any]) -> None:
        for row in rows:
            turn = observe(row_of(row, self._prices), unpack(row.fingerprint))
            if turn is None or self.is_full:
                continue
            self._num_prefixes += len(turn.digests)
            self._turns.append(self._turn(turn, row.output_tokens))
            self.models.add(row.model)
            self._time(row)

    def _time(self, row: Any) -> None:
        if not row.prefill_seconds:
            return
        if row.computed_tokens >= _TIMED_TOKENS:
            self._rates.append(row.prefill_seconds / row.computed_tokens)
        if row.decode_seconds and row.output_tokens > 1:
            self._decodes.append(row.decode_seconds / (row.output_tokens - 1))
        if row.queue_seconds is not None:
            of_engine = row.queue_seconds + row.prefill_seconds
            self._overheads.append(max(row.first_token_seconds - of_engine, 0.0))

    def _turn(self, turn: Observation, output: int) -> Turn:
        return Turn(
            at=turn.at_ms / 1000,
            scope=self._scopes.of((turn.workspace, turn.model)),
            ids=[self._numbers.of(digest) for digest in turn.digests],
            ends=turn.tokens,
            segments=list(range(len(turn.digests))),
            marks=turn.marks,
            output=output,
            tail=turn.total - turn.tokens[-1],
            steps=[] if turn.steps.count(1) == len(turn.steps) else turn.steps,
        )

    def job(self, asked: PlanRequest, min_cache_tokens: int = DEFAULT_MIN_TOKENS) -> Job:
        thinned = Thinned()
        # The others shared their steps, so theirs took longer than their tokens alone.
        rate, decode = _quickest(self._rates), _quickest(self._decodes)
        return Job(
            asked=asked,
            turns=[thinned.of(turn) for turn in reversed(self._turns)],
            prefill_us=None if rate is None else rate * 1e6,
            timed_turns=len(self._rates),
            decode_ms=None if decode is None else decode * 1e3,
            overhead_seconds=median(self._overheads) if self._overheads else 0.0,
            min_cache_tokens=min_cache_tokens,
        )


def _quickest(seconds: list[float]) -> float | None:
    """What the quickest quarter took at most."""
    return sorted(seconds)[len(seconds) // 4] if seconds else None


def all_of(asked: PlanRequest, since_ms: int, until_ms: int) -> Range:
    return Range(
        since_ms=since_ms, until_ms=until_ms, workspace=asked.workspace, model=asked.served_model
    )
