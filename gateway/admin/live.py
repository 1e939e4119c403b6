"""What engines hold and how they fared: memory maps, restarts, hit attribution, latency samples."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated

from litestar import get
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from gateway.admin.controller import AdminController, Deps, view
from gateway.admin.ranges import ASKED_RANGE, EngineName, ModelName, Span, range_of
from gateway.admin.structs.fleet import Attribution, EngineMemory, FleetHistory
from gateway.admin.structs.usage import LatencySamples, Overhead, Sample
from gateway.base.errors import GatewayError
from gateway.ledger.reads import turns as queries_samples
from gateway.ledger.reads.sums import Range
from gateway.ledger.reads.turns import NUM_PARTS
from gateway.routing.engine import Engine

_MAX_SAMPLES = 4000
_ATTRIBUTION_SAMPLES = 2000


class LiveController(AdminController):
    path = "/admin/v1"
    dependencies = ASKED_RANGE

    @get(
        "/engines/memory",
        operation_id="getMemory",
        summary="What is in each engine's memory.",
    )
    async def memory(self, services: Deps, engine: EngineName = None) -> list[EngineMemory]:
        return [await _memory(e) for e in services.fleet.engines if engine in (None, e.name)]

    @get(
        "/engines/history",
        operation_id="getFleetHistory",
        summary="Restarts in a range, and where hits were lost.",
    )
    async def history(
        self,
        services: Deps,
        span: NamedDependency[Span],
        engine: EngineName = None,
        model: ModelName = None,
    ) -> FleetHistory:
        of = range_of(services, span, engine=engine, model=model)
        ledger = services.queries.ledger
        by_engine = await services.queries.totals_by(of, ("engine",))
        names = sorted(name for (name,) in by_engine if name)
        found = await queries_samples.samples(ledger, of, _ATTRIBUTION_SAMPLES)
        return FleetHistory(
            since_ms=of.since_ms,
            until_ms=of.until_ms,
            restarts=await queries_samples.epochs(ledger, of, names),
            attribution=attributions(found),
        )

    @view(
        "/latency/samples",
        "getLatencySamples",
        "A bounded sample of turns: time to first token against prompt length.",
    )
    async def samples(
        self,
        services: Deps,
        of: NamedDependency[Range],
        limit: Annotated[int, QueryParameter(name="limit", ge=NUM_PARTS, le=_MAX_SAMPLES)] = 1600,
    ) -> LatencySamples:
        found = await queries_samples.samples(services.queries.ledger, of, limit)
        return LatencySamples(
            since_ms=of.since_ms,
            until_ms=of.until_ms,
            samples=found,
            overhead=overheads(found, of.since_ms, of.until_ms),
        )


async def _memory(engine: Engine) -> EngineMemory:
    stats = memory = None
    if engine.is_ready:
        with suppress(GatewayError):  # what did not come is not shown
            stats = await engine.stats()
            memory = await engine.memory()
    about = engine.description
    return EngineMemory(
        name=engine.name,
        status=engine.status,
        backend=about.backend if about else None,
        model=about.model if about else None,
        kv_bytes_per_token=about.kv_bytes_per_token if about else 0,
        stats=stats,
        memory=memory,
    )


def attributions(samples: Sequence[Sample]) -> list[Attribution]:
    """Of all engines together, then of each. Only turns that were routed by held prefixes count."""
    routed = [each for each in samples if each.available_tokens is not None]
    engines = sorted({each.engine for each in routed if each.engine})
    return [
        _attribution(engine, [each for each in routed if engine in (None, each.engine)])
        for engine in [None, *engines]
        if routed
    ]


def _attribution(engine: str | None, samples: Sequence[Sample]) -> Attribution:
    captured = [max(each.captured_tokens or 0, each.delivered_tokens) for each in samples]
    available = [
        max(each.available_tokens or 0, held) for each, held in zip(samples, captured, strict=True)
    ]
    return Attribution(
        engine=engine,
        turns=len(samples),
        prompt_tokens=sum(each.prompt_tokens for each in samples),
        available_tokens=sum(available),
        captured_tokens=sum(captured),
        delivered_tokens=sum(each.delivered_tokens for each in samples),
    )


def overheads(samples: Iterable[Sample], since_ms: int, until_ms: int) -> list[Overhead]:
    """By parts of the range; none where no turn of a part was timed by its engine."""
    step = max((until_ms - since_ms) // NUM_PARTS, 1)
    parts: dict[int, list[float]] = {}
    for each in samples:
        if each.overhead_seconds is not None:
            start = since_ms + (each.opened_ms - since_ms) // step * step
            parts.setdefault(start, []).append(each.overhead_seconds)
    return [
        Overhead(start_ms=start, turns=len(found), p50=_rank(found, 0.5), p95=_rank(found, 0.95))
        for start, found in sorted(parts.items())
    ]


def _rank(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
