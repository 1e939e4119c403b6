"""The admin API's numbers over a range of time: usage, savings, latency, prefixes, turns.

Also what engines hold and how they fared, why a prompt missed, and the newest error answers.
"""

import asyncio
import dataclasses
import heapq
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter

from engine.protocol import TTLS, WRITE_FIELDS, Prompt
from engine.protocol.reports import Holding
from gateway.admin.controller import (
    ASKED_RANGE,
    ASKED_SPAN,
    HOUR_MS,
    AdminController,
    Deps,
    EngineName,
    ModelName,
    Span,
    WorkspaceName,
    now_ms,
    range_of,
    removal,
    view,
)
from gateway.base.errors import Forbidden, GatewayError, InvalidRequest, NotFound
from gateway.http.auth import AdminRequest
from gateway.http.refusals import Refusals
from gateway.http.services import Services
from gateway.ledger.reads import turns as queries_turns
from gateway.ledger.reads.leases import leases_kept
from gateway.ledger.reads.prefill_times import avoided, token_times
from gateway.ledger.reads.prefixes import named, writers
from gateway.ledger.reads.prefixes import prefixes as prefixes_of
from gateway.ledger.reads.sums import Priced, Range, comparisons, waterfall
from gateway.ledger.reads.sums import latency as latency_of
from gateway.ledger.reads.turns import Cursor, TurnFilter
from gateway.ledger.refusals import MINUTE_MS
from gateway.prompt.difference import Difference, first_difference
from gateway.prompt.fingerprint import (
    Divergence,
    Fingerprint,
    compare,
    conversation,
    known_to_differ,
    shared_bytes,
    unpack,
)
from gateway.routing.engine import Engine
from gateway.structs import fleet
from gateway.structs import usage as structs

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
        own = request.user.workspace
        of = Range(since_ms=now - _CHOICES_MS, until_ms=now + HOUR_MS, workspace=own)
        names = await services.queries.names(of)
        workspaces = {workspace for workspace, _, _ in names}
        workspaces |= {w.id for w in await services.workspaces.all() if request.user.sees(w.id)}
        engines = {engine for _, engine, _ in names if engine}
        if own is None:
            engines |= {engine.name for engine in services.fleet.engines}
        return fleet.About(
            now_ms=now,
            workspace=own,
            sample=services.keyring.is_sample,
            may_send=request.user.may_send and not services.keyring.is_sample,
            may_change=request.user.may_change and not services.keyring.is_sample,
            first_ms=await queries_turns.first_ms(services.queries.ledger, own),
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
        queries, prices = services.queries, services.prices
        sums = await queries.totals_by(of, ("price", "prompt_above"))
        groups = [Priced(price, above, totals) for (price, above), totals in sums.items()]
        by_engine = await queries.totals_by(of, ("engine", "model"))
        times = await token_times(queries.ledger, services.catalogue.name_of)
        spared = [
            avoided(engine or None, model, totals.cache_read_tokens, times.of(engine, model))
            for (engine, model), totals in sorted(by_engine.items())
            if totals.cache_read_tokens
        ]
        timed = [
            engine_spared.prefill_seconds
            for engine_spared in spared
            if engine_spared.prefill_seconds is not None
        ]
        on_gpus = [
            engine_spared.gpu_hours
            for engine_spared in spared
            if engine_spared.gpu_hours is not None
        ]
        on = datetime.fromtimestamp((of.until_ms - 1) / 1000, UTC).date()
        return structs.Savings(
            since_ms=of.since_ms,
            until_ms=of.until_ms,
            own=waterfall(groups, prices.own),
            hosted=comparisons(groups, prices.hosted, on),
            avoided=spared,
            prefill_tokens_avoided=sum(engine_spared.prefill_tokens for engine_spared in spared),
            prefill_seconds_avoided=sum(timed) if timed else None,
            gpu_hours_avoided=sum(on_gpus) if on_gpus else None,
            unmeasured_tokens=sum(e.prefill_tokens for e in spared if e.prefill_seconds is None),
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
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 100,
        after: Annotated[str | None, QueryParameter(name="after", max_length=96)] = None,
    ) -> structs.TurnPage:
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
        try:
            cursor = None if after is None else Cursor.parse(after)
        except ValueError:
            raise InvalidRequest("after: not a cursor that a page has returned") from None
        return await queries_turns.page(services.queries.ledger, of, which, limit, cursor)

    @view("/turns/{turn_id:str}", "getTurn", "One turn.")
    async def turn(
        self, request: AdminRequest, turn_id: FromPath[str], services: Deps
    ) -> structs.Turn:
        return await _turn_of(services, turn_id, request.user.workspace)


async def _usage_of(services: Services, of: Range) -> structs.Usage:
    queries = services.queries
    totals = await queries.totals(of)
    before = await queries.totals(of.before())
    series, reasons = await queries.series(of), await queries.reasons(of)
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
        outcomes=reasons.outcomes,
    )


def _listed(services: Services) -> list[fleet.ListedModel]:
    catalogue = services.catalogue
    return [
        fleet.ListedModel(
            id=model.id,
            root=model.adapter or model.stands_for or None,
            parent=catalogue.base_of(model) if model.adapter is not None else None,
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


_MAX_SAMPLES = 4000
_ATTRIBUTION_SAMPLES = 2000
NUM_PARTS = 40
"""Intervals of a range that the gateway's overhead is told of."""


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
        told = [each for one in memories if one.memory for each in one.memory.holdings]
        named_ones = [
            holding for holding in told if holding.scope in names and holding.name is not None
        ]
        kinds = ("active", "leased", "lowered", "best_effort", "cached")
        largest = heapq.nlargest(
            _MAX_LOOKED_UP,
            named_ones,
            key=lambda holding: sum(getattr(holding, kind) for kind in kinds),
        )
        prefixes = {(names[holding.scope or ""], holding.name or "") for holding in largest}
        ledger = services.queries.ledger
        wrote = await writers(ledger, prefixes)
        known = await named(ledger, prefixes, services.prices.own)
        keys = {key.id: key.name for key in await services.keys.all(None)} if wrote else {}

        def held(holding: Holding) -> fleet.Held:
            workspace = names.get(holding.scope or "")
            key_id = wrote.get((workspace or "", holding.name or ""))
            report = known.get((workspace or "", holding.name or ""))
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
        """Of all workspaces."""
        of = range_of(services, span, engine=engine)
        answering = {engine.name: engine.answers_in for engine in services.fleet.engines}
        return await leases_kept(services.queries.ledger, of, answering)

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
        with suppress(GatewayError):  # what did not come is not shown
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
"""Prefixes of all engines' memory whose writers are looked up in the ledger."""


def attributions(samples: Sequence[structs.Sample]) -> list[fleet.Attribution]:
    """Of all engines together, then of each. Only turns that were routed by held prefixes count."""
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
    """By intervals that are aligned to the epoch, so that a turn stays in its own while the range
    moves on; none where no turn of an interval was timed by its engine."""
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


# How many earlier turns are compared where the query names none.
_MAX_CANDIDATES = 200
_MAX_BESIDE = 300
# By how much the blocks of two prompts may differ in length and still be taken for two versions of
# one: a date, a name or an id in a block is shorter.
_ALIKE_BYTES = 32
_ALIKE_SHARE = 0.02


class DivergenceController(AdminController):
    path = "/admin/v1/turns/{turn_id:str}/divergence"

    @view("/", "getDivergence", "Where a turn's prompt first differs from an earlier one's.")
    async def divergence(
        self,
        request: AdminRequest,
        turn_id: FromPath[str],
        services: Deps,
        earlier: Annotated[
            str | None, QueryParameter(name="from", min_length=1, max_length=64)
        ] = None,
    ) -> structs.TurnDivergence:
        """Compare two turns of the ledger, whatever their clients asked for."""
        workspace = request.user.workspace
        turn, packed = await _turn(services, turn_id, workspace)
        later = unpack(packed)
        if earlier is None:
            nearest = await _nearest(services, turn, later)
            if nearest is None:
                return structs.TurnDivergence(turn=turn_id)
            before_id, before = nearest
        else:
            before_id = earlier
            before = unpack((await _turn(services, earlier, workspace))[1])
        tokens = before.num_tokens
        differs = compare(before, later)
        exact = None
        if differs is not None and differs.segment is not None:
            exact = await _exact(services, turn, before_id)
        if exact is not None and differs is not None:
            differs = dataclasses.replace(
                differs,
                segment=exact.segment,
                characters=exact.characters,
                missed_tokens=max(round(tokens * (1 - exact.share)), 1),
            )
        shared = shared_bytes(before, later) / before.num_bytes if before.num_bytes else 0.0
        if exact is not None:
            shared = exact.share
        report = structs.TurnDivergence(
            turn=turn.id,
            earlier=before_id,
            shared_tokens=round(tokens * shared) if tokens and before.num_bytes else None,
            is_exact=exact is not None,
            earlier_tokens=tokens or None,
        )
        if differs is None:
            return msgspec.structs.replace(report, is_exact=True)
        if exact is None:
            report = _bounded(report, before, later, differs)
        section, block = _place_of(before, differs)
        # What reading those tokens would have saved this turn, at its own price.
        price = services.prices.own.with_id(turn.price or "")
        lost = None
        if shared and price is not None and differs.missed_tokens is not None:
            rates = price.rates_above(turn.prompt_tokens - 1)
            missed = min(differs.missed_tokens, turn.input_tokens + turn.written_tokens)
            lost = missed * (rates.input - rates.read)
        divergence = {name: getattr(differs, name) for name in ("kind", "segment", "missed_tokens")}
        divergence |= {"section": section, "block": block, "characters": differs.characters}
        return msgspec.structs.replace(report, **divergence, missed_nano=lost)


async def _exact(services: Services, turn: structs.Turn, earlier: str) -> Difference | None:
    """Where the texts of two turns differ; None where one is not kept, or is too much to open."""
    keeper = services.turns.keeper
    try:
        before, _ = await keeper.read(turn.workspace, earlier)
        after, _ = await keeper.read(turn.workspace, turn.id)
    except GatewayError:
        return None

    def found() -> Difference | None:
        prompts = (msgspec.convert(content.prompt, Prompt) for content in (before, after))
        return first_difference(*prompts)

    return await asyncio.to_thread(found)


def _bounded(
    report: structs.TurnDivergence, before: Fingerprint, later: Fingerprint, divergence: Divergence
) -> structs.TurnDivergence:
    """The report with the place before which the difference stands."""
    point = known_to_differ(before, later)
    if point is None:
        return report
    below = None
    if point.segment == divergence.segment and point.characters is not None:
        below = point.characters
    tokens = before.num_tokens
    return msgspec.structs.replace(
        report,
        characters_below=below,
        shared_tokens_below=round(tokens * point.num_bytes / before.num_bytes) if tokens else None,
    )


async def _turn(
    services: Services, turn_id: str, workspace: str | None
) -> tuple[structs.Turn, bytes]:
    turn = await _turn_of(services, turn_id, workspace)
    packed = await services.queries.fingerprint(turn.id)
    if packed is None:
        raise NotFound(f"turn: no fingerprint of `{turn_id[:64]}`")
    return turn, packed


async def _nearest(
    services: Services, turn: structs.Turn, later: Fingerprint
) -> tuple[str, Fingerprint] | None:
    """The earlier turn that shares the longest prefix with this one, the latest of equals. Without
    a shared point (short prompts have few) it is the latest whose tools and system blocks are as
    many and as long: any other prompt explains nothing."""
    best: tuple[int, str, Fingerprint] | None = None
    alike: tuple[str, Fingerprint] | None = None
    for turn_id, packed in await queries_turns.earlier(
        services.queries.ledger, turn, _MAX_CANDIDATES
    ):
        candidate = unpack(packed)
        shared = shared_bytes(candidate, later)
        if shared and (best is None or shared > best[0]):
            best = shared, turn_id, candidate
        if alike is None and _is_alike(candidate, later):
            alike = turn_id, candidate
    return alike if best is None else (best[1], best[2])


def _is_alike(earlier: Fingerprint, other: Fingerprint) -> bool:
    """Whether the tools and system blocks of two prompts are as many, each about as long, and the
    messages as many. Of a prompt of messages alone all but the last block are compared."""
    shapes = [(f.num_tools, f.num_system, f.points[-1].segment) for f in (earlier, other)]
    fixed = (earlier.num_tools + earlier.num_system) or earlier.points[-1].segment
    if not fixed or shapes[0] != shapes[1]:
        return False
    pairs = zip(_lengths(earlier, fixed), _lengths(other, fixed), strict=False)
    return all(abs(a - b) <= _ALIKE_BYTES + _ALIKE_SHARE * max(a, b) for a, b in pairs)


def _lengths(fingerprint: Fingerprint, count: int) -> list[int]:
    """The bytes up to the end of each of the first `count` segments whose end has a point."""
    ends = {p.segment: p.num_bytes for p in fingerprint.points if p.characters is None}
    return [ends[segment] for segment in range(count) if segment in ends]


def _place_of(
    before: Fingerprint, divergence: Divergence
) -> tuple[structs.Section | None, int | None]:
    """A block that was added at a section's end belongs to that section, as its next block."""
    place = divergence.segment
    if place is None:
        return None, None
    if divergence.kind == "tools_changed" or place < before.num_tools:
        return "tools", place
    place -= before.num_tools
    if divergence.kind == "system_changed" or place < before.num_system:
        return "system", place
    return "messages", place - before.num_system


class ContentController(AdminController):
    path = "/admin/v1/turns/{turn_id:str}/content"

    @view("/", "getContent", "The prompt and the answer of a turn, where its workspace keeps them.")
    async def content(
        self, request: AdminRequest, turn_id: FromPath[str], services: Deps
    ) -> structs.TurnContent:
        """For keys of the workspace and for those of scope `admin`."""
        if request.user.workspace is None and not request.user.may_change:
            raise Forbidden("what people wrote needs a key of the workspace or of scope `admin`")
        turn = await _turn_of(services, turn_id, request.user.workspace)
        body, until_ms = await services.turns.keeper.read(turn.workspace, turn.id)
        return structs.TurnContent(
            turn=turn.id, until_ms=until_ms, prompt=body.prompt, answer=body.answer
        )

    @removal("/", "deleteContent", "Delete what is kept of a turn's prompt and answer.")
    async def remove(self, turn_id: FromPath[str], services: Deps) -> structs.Turn:
        """The turn's counts stay."""
        turn = await _turn_of(services, turn_id, None)
        await services.turns.keeper.remove(turn.id)
        return turn


async def _turn_of(services: Services, turn_id: str, workspace: str | None) -> structs.Turn:
    turn = await queries_turns.one(services.queries.ledger, turn_id[:64], workspace)
    if turn is None:
        raise NotFound(f"turn: `{turn_id[:64]}`")
    return turn


class ConversationController(AdminController):
    path = "/admin/v1/turns/{turn_id:str}/conversation"

    @view("/", "getConversation", "The turns of a turn's conversation, in order.")
    async def conversation(
        self, request: AdminRequest, turn_id: FromPath[str], services: Deps
    ) -> list[structs.Turn]:
        """Of the key's 300 turns before and after it, as far as they are among the workspace's
        5,000 there. Each prompt has all of the one before."""
        ledger = services.queries.ledger
        turn, _ = await _turn(services, turn_id, request.user.workspace)
        beside = await queries_turns.around(ledger, turn, _MAX_BESIDE)

        def places() -> list[int]:
            prompts = [unpack(packed) for _, packed in beside]
            return conversation(prompts, [prompt for prompt, _ in beside].index(turn.id))

        ids = [beside[place][0] for place in await asyncio.to_thread(places)]
        return await queries_turns.with_ids(ledger, ids)


RequestId = Annotated[str | None, QueryParameter(name="request_id", min_length=1, max_length=64)]


class RefusalsController(AdminController):
    path = "/admin/v1/refusals"

    @view("/", "listRefusals", "The newest error answers of this gateway since its start.")
    async def refusals(
        self,
        request: AdminRequest,
        workspace: WorkspaceName = None,
        request_id: RequestId = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 100,
    ) -> list[structs.Refusal]:
        """Requests that were refused before their turn began are in no ledger, only here."""
        kept: Refusals = request.app.state.refusals
        confined = request.user.confine(workspace)
        return kept.newest(confined, request_id, limit)

    @view("/limits", "listLimited", "What limits refused on this gateway since its start, by key.")
    async def limited(
        self, request: AdminRequest, workspace: WorkspaceName = None
    ) -> list[structs.Limited]:
        kept: Refusals = request.app.state.refusals
        return kept.limited(request.user.confine(workspace))


class RefusalCountsController(AdminController):
    path = "/admin/v1/refusals/counts"
    dependencies = ASKED_SPAN

    @view("/", "countRefusals", "How many requests were refused, by minute, key and reason.")
    async def counts(
        self,
        request: AdminRequest,
        services: Deps,
        span: NamedDependency[Span],
        workspace: WorkspaceName = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 100,
    ) -> structs.RefusalCounts:
        """Of all gateways: requests that were answered with an error before they were turns. The
        newest minutes stand first, and the sum is of all that overlap the range. What another
        gateway refused is here after some seconds."""
        of = range_of(services, span, request.user.confine(workspace))
        with suppress(GatewayError):  # what is counted here is put down later
            await services.refusals.flush()
        since_ms = of.since_ms // MINUTE_MS * MINUTE_MS
        return await services.refused.read(since_ms, of.until_ms, of.workspace, limit)
