"""Probes and metrics. They name no tenant and no content, so they need no key."""

from typing import Any, Literal

import msgspec
from litestar import Controller, Response, get
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec

from engine.protocol.reports import BlockStats
from engine.supervisor import LoopHealth
from gateway.base.metrics import EngineState
from gateway.http.services import Services
from gateway.routing.engine import Engine
from gateway.structs.conditions import Condition
from gateway.structs.fleet import EngineStatus

_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """`detail` is the engine's own readiness report, with the progress of loading its model."""

    name: str
    status: EngineStatus
    model: str | None
    detail: dict[str, Any]


class JournalHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The journal of turns.

    - `backlog`: turns that the ledger does not have yet
    - `set_aside`: turns that the ledger can't get
    - `damaged`: folders in the journal's own that have its damaged files
    """

    backlog: int
    bytes: int
    max_bytes: int
    has_room: bool
    set_aside: int
    damaged: list[str]


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the gateway is ready, and what is wrong.

    - `stopping`: the gateway was told to end
    - `loops`: the gateway's own loops that are failing; empty while it is ready
    - `ledger`: what is wrong with the database for good; null while it is ready
    - `limits_hold`: over which gateways the limits of workspaces hold now
    - `conditions`: all that is wrong, the worst first, also of a gateway that is ready: the list of
      `GET /admin/v1/conditions`
    """

    ready: bool
    stopping: bool
    engines: list[EngineHealth]
    journal_backlog: int
    journal: JournalHealth
    loops: list[LoopHealth]
    ledger: str | None
    limits_hold: Literal["all_gateways", "this_gateway"]
    conditions: list[Condition]


class HealthController(Controller):
    @get("/healthz", operation_id="getHealth", summary="The process serves.")
    async def healthz(self) -> dict[str, str]:
        return {"status": "ok"}

    @get(
        ["/readyz", "/health"],
        # One for each of the two paths.
        operation_id=lambda handler, method, path: (
            "getReadinessAsHealth" if "health" in path else "getReadiness"
        ),
        summary="Ready while at least one engine is. `/health` is vLLM's name for `/readyz`.",
        responses={503: ResponseSpec(Readiness, description="Not ready.")},
    )
    async def readyz(
        self, state: State, services: NamedDependency[Services]
    ) -> Response[Readiness]:
        """Whether the gateway takes turns: an engine is ready (or was until just now), the journal
        has room, no loop is failing, and the gateway was not told to stop. A database that is away
        does not count, since it may come back by itself. A database that is damaged, or that was
        replaced, makes the gateway not ready. `/health` is vLLM's name, which GuideLLM asks for."""
        journal = services.journal
        shared = services.shared_limits
        loops = services.supervisor.failing
        ledger = services.ledger.problem
        if not journal.is_in_place:
            journal.look()
        can_record = journal.has_room and journal.is_in_place
        is_able = services.fleet.takes_turns and can_record and not (loops or ledger)
        body = Readiness(
            ready=is_able and not state.stopping.is_set(),
            stopping=state.stopping.is_set(),
            engines=[
                EngineHealth(
                    name=engine.name,
                    status=engine.status,
                    model=services.name_of(engine.description),
                    detail=engine.readiness,
                )
                for engine in services.fleet.engines
            ],
            journal_backlog=journal.backlog,
            journal=JournalHealth(
                backlog=journal.backlog,
                bytes=journal.num_bytes,
                max_bytes=journal.max_bytes,
                has_room=journal.has_room,
                set_aside=journal.num_set_aside,
                damaged=journal.damaged,
            ),
            loops=loops,
            ledger=ledger,
            limits_hold="all_gateways" if shared and shared.is_shared else "this_gateway",
            conditions=services.conditions.now(),
        )
        return Response(body, status_code=200 if body.ready else 503)

    @get(
        "/metrics", operation_id="getMetrics", summary="Prometheus metrics.", media_type=_EXPOSITION
    )
    async def metrics(self, services: NamedDependency[Services]) -> Response[bytes]:
        metrics = services.metrics
        metrics.show_engines(
            {
                engine.name: EngineState(
                    is_ready=engine.is_ready,
                    is_draining=engine.is_draining,
                    breaker=engine.breaker.state(engine.monotonic()),
                    num_names=_num_names_of(engine),
                    model=services.name_of(engine.description),
                    description=engine.description,
                    num_running=engine.load.num_running,
                    epoch=engine.last_stats.epoch if engine.last_stats else "",
                    blocks=_blocks_of(engine),
                    num_preempted=(
                        engine.last_stats.counters.preempted_requests if engine.last_stats else 0
                    ),
                )
                for engine in services.fleet.engines
            }
        )
        metrics.set("loops_failing", len(services.supervisor.failing))
        metrics.show_conditions(services.conditions.counts())
        return Response(metrics.exposition(), media_type=_EXPOSITION)


def _num_names_of(engine: Engine) -> int | None:
    """How many prefixes an engine reported to hold; None while it reports nothing."""
    return None if engine.holdings.is_stale(engine.monotonic()) else len(engine.holdings)


def _blocks_of(engine: Engine) -> BlockStats | None:
    """The blocks of the process that answers; None before it reported them."""
    stats = engine.last_stats
    return stats.blocks if stats is not None and stats.epoch == engine.answers_in else None
