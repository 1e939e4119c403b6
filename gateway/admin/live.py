"""What engines hold now, and how turns fared at them."""

import asyncio
import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated

import msgspec
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from engine.protocol.reports import Holding
from gateway.admin.controller import (
    ASKED_RANGE,
    AdminController,
    Deps,
    EngineName,
    ModelName,
    Span,
    range_of,
    view,
)
from gateway.base.errors import GatewayError
from gateway.http.services import Services
from gateway.ledger.reads import turns as queries_turns
from gateway.ledger.reads.leases import leases_kept
from gateway.ledger.reads.prefixes import named, writers
from gateway.ledger.reads.sums import Range
from gateway.routing.engine import Engine
from gateway.structs import fleet
from gateway.structs import usage as structs

_MAX_SAMPLES = 4000
_ATTRIBUTION_SAMPLES = 2000
NUM_PARTS = 40
"""The number of a range's intervals for which the gateway's overhead is given."""


class LiveController(AdminController):
    path = "/admin/v1"
    dependencies = ASKED_RANGE

    @view("/engines/memory", "getMemory", "What is in each engine's memory.", None)
    async def memory(self, services: Deps, engine: EngineName = None) -> list[fleet.EngineMemory]:
        questions = (
            _memory(services, e) for e in services.fleet.engines if engine in (None, e.name)
        )
        memories = await asyncio.gather(*questions)
        names = {services.keyring.scope_of(name): name for name in await services.keys.workspaces()}
        holdings: list[Holding] = []
        for report in memories:
            if report.memory is not None:
                holdings += report.memory.holdings
        with_names = [
            holding for holding in holdings if holding.scope in names and holding.name is not None
        ]
        kinds = ("active", "leased", "lowered", "best_effort", "cached")
        largest = heapq.nlargest(
            _MAX_LOOKED_UP,
            with_names,
            key=lambda holding: sum(getattr(holding, kind) for kind in kinds),
        )
        prefixes = {(names[holding.scope or ""], holding.name or "") for holding in largest}
        ledger = services.queries.ledger
        key_ids = await writers(ledger, prefixes)
        reports = await named(ledger, prefixes, services.prices.own)
        keys = {key.id: key.name for key in await services.keys.all(None)} if key_ids else {}

        def held(holding: Holding) -> fleet.Held:
            workspace = names.get(holding.scope or "")
            prefix = workspace or "", holding.name or ""
            key_id = key_ids.get(prefix)
            report = reports.get(prefix)
            return fleet.Held(
                workspace=workspace,
                key_id=key_id,
                key=keys.get(key_id or ""),
                look=report.look if report else None,
                holding=holding,
            )

        return [
            msgspec.structs.replace(
                report,
                memory=msgspec.structs.replace(report.memory, holdings=[]),
                held=[held(holding) for holding in report.memory.holdings],
            )
            if report.memory
            else report
            for report in memories
        ]

    @view(
        "/engines/history",
        "getFleetHistory",
        "Restarts in a range, and where hits were lost.",
        None,
    )
    async def history(
        self,
        services: Deps,
        span: NamedDependency[Span],
        engine: EngineName = None,
        model: ModelName = None,
    ) -> fleet.FleetHistory:
        of = range_of(services, span, engine=engine, model=model)
        ledger = services.queries.ledger
        samples = await queries_turns.samples(ledger, of, _ATTRIBUTION_SAMPLES)
        num_turns = (await services.queries.totals(of)).requests
        return fleet.FleetHistory(
            since_ms=of.since_ms,
            until_ms=of.until_ms,
            num_turns=num_turns,
            is_whole=num_turns <= _ATTRIBUTION_SAMPLES,
            restarts=await queries_turns.epochs(ledger, of),
            attribution=attributions(samples),
        )

    @view(
        "/leases/kept",
        "getLeasesKept",
        "How many leases of a range lived to their end, how others ended, and what is not known.",
        None,
    )
    async def kept(
        self, services: Deps, span: NamedDependency[Span], engine: EngineName = None
    ) -> fleet.LeasesKept:
        """The leases of all workspaces count."""
        of = range_of(services, span, engine=engine)
        return await leases_kept(services.queries.ledger, of, services.fleet.answering)

    @view(
        "/engines/load",
        "getLoad",
        "Memory in use and requests that wait over time, since this gateway's start.",
        None,
    )
    async def load(
        self, services: Deps, span: NamedDependency[Span], engine: EngineName = None
    ) -> list[fleet.LoadPoint]:
        of = range_of(services, span)
        return services.load_history.between(of.since_ms, of.until_ms, engine)

    @view(
        "/latency/samples",
        "getLatencySamples",
        "All turns of a range, or a fixed sample: time to first token against prompt length.",
    )
    async def samples(
        self,
        services: Deps,
        of: NamedDependency[Range],
        limit: Annotated[int, QueryParameter(name="limit", ge=NUM_PARTS, le=_MAX_SAMPLES)] = 1600,
    ) -> structs.LatencySamples:
        samples = await queries_turns.samples(services.queries.ledger, of, limit)
        num_turns = (await services.queries.totals(of)).requests
        added = [
            sample.overhead_seconds for sample in samples if sample.overhead_seconds is not None
        ]
        return structs.LatencySamples(
            since_ms=of.since_ms,
            until_ms=of.until_ms,
            num_turns=num_turns,
            is_whole=num_turns <= limit,
            samples=samples,
            overhead=overheads(samples, of.since_ms, of.until_ms),
            overhead_p50=_rank(added, 0.5) if added else None,
            overhead_p95=_rank(added, 0.95) if added else None,
        )


async def _memory(services: Services, engine: Engine) -> fleet.EngineMemory:
    stats = memory = None
    if engine.is_ready:
        with suppress(GatewayError):  # the memory of an engine that does not answer is not known
            stats = await engine.stats()
            memory = await engine.memory()
    about = engine.description
    return fleet.EngineMemory(
        name=engine.name,
        status=engine.status,
        backend=about.backend if about else None,
        model=services.name_of(about),
        kv_bytes_per_token=about.kv_bytes_per_token if about else 0,
        state_blocks=about.state_blocks if about else 0,
        stats=stats,
        memory=memory,
    )


_MAX_LOOKED_UP = 1000
"""The most prefixes of all engines' memory whose writers are looked up in the ledger."""


def attributions(samples: Sequence[structs.Sample]) -> list[fleet.Attribution]:
    """The attribution of all engines together, and then of each. Only turns that were routed by
    held prefixes count."""
    counts: dict[str, Counter[str]] = {}
    for sample in samples:
        if sample.available_tokens is None:
            continue
        captured = max(sample.captured_tokens or 0, sample.delivered_tokens)
        shares = {
            "turns": 1,
            "prompt_tokens": sample.prompt_tokens,
            "available_tokens": max(sample.available_tokens, captured),
            "captured_tokens": captured,
            "delivered_tokens": sample.delivered_tokens,
        }
        for engine in {"", sample.engine or ""}:
            counts.setdefault(engine, Counter()).update(shares)
    return [fleet.Attribution(engine=name or None, **sums) for name, sums in sorted(counts.items())]


def overheads(
    samples: Iterable[structs.Sample], since_ms: int, until_ms: int
) -> list[structs.Overhead]:
    """The gateway's overhead by interval. Intervals without a turn that its engine timed are left
    out. Intervals are aligned to 1970, so that a turn stays in its interval while the range
    moves."""
    step = max((until_ms - since_ms) // NUM_PARTS, 1)
    parts: dict[int, list[float]] = {}
    for sample in samples:
        if sample.overhead_seconds is not None:
            start = sample.opened_ms // step * step
            parts.setdefault(start, []).append(sample.overhead_seconds)
    return [
        structs.Overhead(
            start_ms=start, turns=len(part), p50=_rank(part, 0.5), p95=_rank(part, 0.95)
        )
        for start, part in sorted(parts.items())
    ]


def _rank(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
