"""Plans of memory, engines and tiers: the turns of a range as the planner's process needs them."""

from collections.abc import AsyncIterator, Sequence
from statistics import median
from typing import Any

import msgspec
from litestar import post
from litestar.di import NamedDependency
from litestar.response import Stream

from gateway.admin import controller
from gateway.admin.advice import in_thread, observation_of
from gateway.base.errors import GatewayError, InvalidRequest, NotFound
from gateway.http.auth import READS_BY_POST, AdminRequest, Viewer
from gateway.http.generation import while_present
from gateway.http.services import Services
from gateway.ledger.reads.turns import observed
from gateway.planning import traffic
from gateway.prices.price import PriceSheets
from gateway.routing.engine import Engine
from gateway.structs import plan as structs

MAX_PREFIXES = 2_000_000
"""The most prefixes of all turns together. Beyond it older turns are left out."""
_LINES = "application/x-ndjson"
# The place of all plans in the line for threads: one thread gathers at a time.
_LINE = "plan"
# The fewest computed tokens of a turn whose time counts. With fewer, a turn's fixed cost would be
# most of its time.
_TIMED_TOKENS = 128


class PlanController(controller.AdminController):
    path = "/admin/v1/plan"

    @controller.view("/", "planChoices", "The engines that a plan can begin with.")
    async def choices(self, services: controller.Deps) -> structs.PlanChoices:
        by_model: dict[str, list[Engine]] = {}
        for engine in services.fleet.engines:
            model = services.name_of(engine.description)
            if model is not None:
                by_model.setdefault(model, []).append(engine)
        planned = []
        for model, engines in sorted(by_model.items()):
            facts = facts_of(engines)
            if facts is not None:
                planned.append(
                    structs.PlannedEngine(
                        model=model,
                        engines=facts.engines,
                        device_tokens=facts.device_tokens,
                        host_tokens=facts.host_tokens,
                        disk_tokens=facts.disk_tokens,
                        bytes_per_token=facts.bytes_per_token,
                    )
                )
        return structs.PlanChoices(engines=planned)

    @controller.action(
        "/",
        "plan",
        "What other memory, engines and tiers would give the turns of a range; simulated.",
        traffic.PlanRequest,
        **(READS_BY_POST | {"is_plan": True}),
    )
    async def plan(
        self,
        request: AdminRequest,
        payload: NamedDependency[traffic.PlanRequest],
        services: controller.Deps,
    ) -> structs.Plan:
        job = await while_present(request.scope, _job(services, payload, request.user))
        return await while_present(request.scope, services.planners.plan(job))

    @post(
        "/progress",
        operation_id="planWithProgress",
        summary="The same as lines of JSON: `progress`, and at last `plan` or `error`.",
        status_code=200,
        media_type=_LINES,
        opt=READS_BY_POST | {"is_plan": True},
        dependencies={"payload": controller.JsonBody(traffic.PlanRequest)},
    )
    async def plan_with_progress(
        self,
        request: AdminRequest,
        payload: NamedDependency[traffic.PlanRequest],
        services: controller.Deps,
    ) -> Stream:
        job = await while_present(request.scope, _job(services, payload, request.user))
        lines = services.planners.lines(job)
        # A request that can't be planned is an error, and not the beginning of a stream.
        first = await while_present(request.scope, lines.asend(None))

        async def encoded() -> AsyncIterator[bytes]:
            yield msgspec.json.encode(first) + b"\n"
            try:
                async for line in lines:
                    yield msgspec.json.encode(line) + b"\n"
            except GatewayError as error:
                failed = structs.PlanFailed(
                    message=str(error), is_asked=isinstance(error, InvalidRequest)
                )
                yield msgspec.json.encode(failed) + b"\n"
            finally:
                # Closing the lines ends the planner's process.
                await lines.aclose()

        return Stream(encoded(), media_type=_LINES)


async def _job(services: Services, payload: traffic.PlanRequest, viewer: Viewer) -> traffic.Job:
    workspace = viewer.confine(payload.workspace)
    span = controller.Span(since_ms=payload.since_ms, until_ms=payload.until_ms)
    of = controller.range_of(services, span, workspace, model=payload.served_model)
    gathering = TrafficGathering(services.prices.own)
    async for rows in observed(services.queries.ledger, of, payload.key, traffic.MAX_TURNS):
        await in_thread(services, viewer, _LINE, gathering.take, rows)
        if gathering.is_full:
            break
    models = sorted(gathering.models)
    if payload.served_model is not None and not models:
        models = [payload.served_model]
    engines = [engine for model in models for engine in engines_of(services, model)]
    facts = facts_of(list(dict.fromkeys(engines)))
    job: traffic.Job = await in_thread(services, viewer, _LINE, gathering.job, payload, facts)
    return job


def engines_of(services: Services, model: str) -> list[Engine]:
    """The engines that serve a model now; an empty list for an unknown model."""
    try:
        served_model = services.catalogue.find(model, services.fleet.served)
    except NotFound:
        return []
    return [
        engine
        for engine in services.fleet.engines
        if engine.description is not None and served_model.is_served_by(engine.description.model)
    ]


def facts_of(engines: Sequence[Engine]) -> traffic.EngineFacts | None:
    """The facts about the engines, as the first engine with blocks of its own tells them. None
    where no engine has such blocks."""
    for engine in engines:
        about = engine.description
        if about is None or not about.num_blocks:
            continue
        stats = engine.last_stats
        host_blocks = stats.host_blocks if stats is not None else 0
        store = stats.store if stats is not None else None
        disk_blocks = store.blocks if store is not None else 0
        return traffic.EngineFacts(
            engines=min(len(engines), traffic.MAX_ENGINES),
            device_tokens=about.num_blocks * about.block_size,
            host_tokens=host_blocks * about.block_size,
            disk_tokens=disk_blocks * about.block_size,
            bytes_per_token=about.kv_bytes_per_token,
            max_running=about.max_running,
            min_cache_tokens=max(about.min_cache_tokens, 1),
        )
    return None


class TrafficGathering:
    """Gathers turns of the ledger as the planner needs them. Rows must come the newest first."""

    def __init__(self, prices: PriceSheets) -> None:
        self._prices = prices
        self._numbers = traffic.Numbers()
        self._scopes = traffic.Numbers()
        self._turns: list[traffic.Turn] = []
        self._num_prefixes = 0
        self._num_rows = 0
        self._num_unknown = 0
        self.models: set[str] = set()
        # Seconds to compute one token of a prompt, by turn.
        self._rates: list[float] = []
        # Seconds to write one token of an answer, by turn.
        self._decodes: list[float] = []
        # Seconds of a first token that are not the engine's work, by turn.
        self._overheads: list[float] = []

    @property
    def is_full(self) -> bool:
        return self._num_prefixes >= MAX_PREFIXES

    def take(self, rows: Sequence[Any]) -> None:
        for row in rows:
            if self.is_full:
                return
            self._num_rows += 1
            turn = observation_of(row, self._prices)
            if turn is None:
                self._num_unknown += 1
                continue
            self._num_prefixes += len(turn.digests)
            self.models.add(row.model)
            self._turns.append(
                traffic.Turn(
                    at=turn.at_ms / 1000,
                    scope=self._scopes.of((turn.workspace, turn.model)),
                    ids=[self._numbers.of(digest) for digest in turn.digests],
                    ends=turn.tokens,
                    segments=list(range(len(turn.digests))),
                    marks=turn.marks,
                    output=row.output_tokens,
                    tail=turn.total - turn.tokens[-1],
                    steps=[] if turn.steps.count(1) == len(turn.steps) else turn.steps,
                    unheld=sorted(turn.unheld),
                )
            )
            self._take_times(row)

    def _take_times(self, row: Any) -> None:
        if not row.prefill_seconds:
            return
        if row.computed_tokens >= _TIMED_TOKENS:
            self._rates.append(row.prefill_seconds / row.computed_tokens)
        if row.decode_seconds and row.output_tokens > 1:
            self._decodes.append(row.decode_seconds / (row.output_tokens - 1))
        if row.queue_seconds is not None:
            of_engine = row.queue_seconds + row.prefill_seconds
            self._overheads.append(max(row.first_token_seconds - of_engine, 0.0))

    def job(self, payload: traffic.PlanRequest, engine: traffic.EngineFacts | None) -> traffic.Job:
        """The planner's job. If the request has a trace, the job has no turns of the ledger. The
        times are always the ledger's."""
        is_of_ledger = payload.trace is None
        return traffic.Job(
            request=payload,
            turns=self._turns[::-1] if is_of_ledger else [],
            is_cut=is_of_ledger and (self.is_full or self._num_rows >= traffic.MAX_TURNS),
            num_unknown=self._num_unknown if is_of_ledger else 0,
            models=sorted(self.models),
            engine=engine,
            times=self._times(),
        )

    def _times(self) -> traffic.Times | None:
        if not self._rates:
            return None
        return traffic.Times(
            prefill_us=_quickest(self._rates) * 1e6,
            timed_turns=len(self._rates),
            decode_ms=_quickest(self._decodes) * 1e3 if self._decodes else 0.0,
            overhead_seconds=median(self._overheads) if self._overheads else 0.0,
        )


def _quickest(seconds: list[float]) -> float:
    """The longest time in the quickest quarter. Most other turns shared their steps with further
    turns, so their times are too long."""
    return sorted(seconds)[len(seconds) // 4]
