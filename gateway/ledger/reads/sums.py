"""Ranges of time with filters: totals, series, what caching saved, times to first token.

Whole days, hours and minutes are read from the sums, the rest of a range from the turns. Own prices
and published ones are never mixed: the cost at a hosted model stands beside the cost here.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, func, literal, select, text, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.base.errors import InvalidRequest
from gateway.base.rounding import round_up
from gateway.ledger import rollups
from gateway.ledger.database import Ledger
from gateway.ledger.schema import (
    EpochReportRow,
    LatencyRollupRow,
    ReasonRollupRow,
    TurnRollupRow,
    TurnRow,
)
from gateway.prices.price import PriceSheets, cost_at
from gateway.structs import usage as structs

_FINE_TURNS = 10_000
"""A range with more turns is shown by no intervals shorter than those of the sums."""
_DAY_MS = rollups.DAY_SECONDS * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Turns that began in [since_ms, until_ms) and pass the filters. None filters nothing."""

    since_ms: int
    until_ms: int
    workspace: str | None = None
    engine: str | None = None
    model: str | None = None

    @property
    def seconds(self) -> float:
        return (self.until_ms - self.since_ms) / 1000

    def before(self) -> "Range":
        """The period of the same length that ends where this one begins."""
        length = self.until_ms - self.since_ms
        return replace(self, since_ms=self.since_ms - length, until_ms=self.since_ms)

    def filters(self, table: Any) -> list[ColumnElement[bool]]:
        values = {"workspace_id": self.workspace, "engine": self.engine, "model": self.model}
        return [
            getattr(table, name) == value for name, value in values.items() if value is not None
        ]


class Part(NamedTuple):
    """A part of a range, and where it is read."""

    # Of the sums' intervals; None reads the turns themselves.
    width_seconds: int | None
    since_ms: int
    until_ms: int


def parts_of(since_ms: int, until_ms: int, widths: Sequence[int]) -> list[Part]:
    """Split a range so that the widest fitting intervals cover its middle. `widths` are seconds,
    the widest first. Parts that no interval covers are read from the turns."""
    if since_ms >= until_ms:
        return []
    if not widths:
        return [Part(None, since_ms, until_ms)]
    width, *narrower = widths
    step = width * 1000
    start = round_up(since_ms, step)
    end = until_ms // step * step
    if start >= end:
        return parts_of(since_ms, until_ms, narrower)
    return [
        *parts_of(since_ms, start, narrower),
        Part(width, start, end),
        *parts_of(end, until_ms, narrower),
    ]


def is_by_engine(of: Range, by: Sequence[str] = ()) -> bool:
    """Whether the range needs the sums by engine.

    Raise InvalidRequest for engines and keys together: no sums are by both.
    """
    if of.engine is None and "engine" not in by:
        return False
    if "key_id" in by:
        raise InvalidRequest("engine: sums by key are of all engines; leave out one of the two")
    return True


def widths_for(
    of: Range,
    by: Sequence[str],
    step_seconds: int | None,
    table: rollups.IntervalTable = TurnRollupRow,
) -> list[int]:
    """The widths of the sums that can make intervals of `step_seconds`, in seconds.

    Without a step one interval covers the range, so every width can. The sums by engine that are
    shorter than an hour are of all workspaces together.
    """
    by_engine = is_by_engine(of, by)
    by_both = by_engine and (of.workspace is not None or "workspace_id" in by)
    all_widths = rollups.WIDTHS_SECONDS[table][by_engine]
    widths = [width for width in all_widths if not (step_seconds or width) % width]
    return [width for width in widths if width >= rollups.HOUR_SECONDS or not by_both]


async def widen_to_days(connection: AsyncConnection, of: Range) -> Range:
    """Widen a range to whole days where its turns may have been deleted."""
    horizon = await rollups.horizon_ms(connection)
    since = of.since_ms
    until = of.until_ms
    if since < horizon:
        since = since // _DAY_MS * _DAY_MS
    if until < horizon:
        until = round_up(until, _DAY_MS)
    return replace(of, since_ms=since, until_ms=until)


async def _parts(connection: AsyncConnection, of: Range, widths: Sequence[int]) -> list[Part]:
    """The parts of a range.

    The sums of an interval that is not over have all its turns so far. So a range that ends behind
    the last turn is read to the end of its day.
    """
    last_ms = (await connection.execute(select(func.max(TurnRow.opened_ms)))).scalar_one_or_none()
    until = of.until_ms
    if until > (last_ms or 0):
        until = round_up(until, _DAY_MS)
    return parts_of(of.since_ms, until, widths)


def within(
    of: Range, part: Part, table: rollups.IntervalTable, by: Sequence[str] = ()
) -> list[ColumnElement[bool]]:
    """The conditions of a part's rows: of the sums in `table`, or of turns without a width."""
    if part.width_seconds is None:
        moment = TurnRow.opened_ms
        where = of.filters(TurnRow)
    else:
        moment = table.start_ms
        where = of.filters(table)
        where.append(table.by_engine == int(is_by_engine(of, by)))
        where.append(table.width_seconds == part.width_seconds)
    return [moment >= part.since_ms, moment < part.until_ms, *where]


def rows_of(of: Range, part: Part) -> Select[Any]:
    """The rows that a read of the part looks at, each as the number 1."""
    table = TurnRow if part.width_seconds is None else TurnRollupRow
    return select(literal(1)).select_from(table).where(*within(of, part, TurnRollupRow))


def _sums_of(of: Range, part: Part, by: Sequence[str], step_seconds: int | None) -> Select[Any]:
    table: Any = TurnRollupRow
    if part.width_seconds is None:
        dimensions = rollups.dimensions()
        values = rollups.measures()
        moment = TurnRow.opened_ms.expression
    else:
        dimensions = {name: getattr(table, name) for name in by}
        sums = ((name, func.sum(getattr(table, name))) for name in rollups.MEASURES)
        values = {name: func.coalesce(total, 0) for name, total in sums}
        moment = table.start_ms.expression
    keys = [dimensions[name].label(name) for name in by]
    if step_seconds is not None:
        step = step_seconds * 1000
        keys = [(moment // step * step).label("start_ms"), *keys]
    columns = [column.label(name) for name, column in values.items()]
    query = select(*keys, *columns).where(*within(of, part, table, by))
    return query.group_by(*(text(str(n + 1)) for n in range(len(keys)))) if keys else query


_MAX_POINTS = 60
_BUCKETS_SECONDS = (5, 10, 30, 60, 300, 900, 3600, 10800, 86400)


class Series(NamedTuple):
    bucket_seconds: int
    buckets: list[structs.Bucket]


class Reasons(NamedTuple):
    """How many turns, or markers, had each reason or outcome."""

    # Turns by the miss reason: those that read nothing, those that read a part, and those of old
    # sums, of which it is not known.
    misses: dict[str, int]
    parts: dict[str, int]
    mixed: dict[str, int]
    # Turns by their outcome.
    outcomes: dict[str, int]
    # Markers by the reason.
    marks: dict[str, int]


class Queries:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def totals(self, of: Range) -> structs.Totals:
        return (await self.totals_by(of, ())).get((), structs.Totals())

    async def totals_by(
        self, of: Range, by: Sequence[str], step_seconds: int | None = None
    ) -> dict[tuple[Any, ...], structs.Totals]:
        """The totals for each combination of values of the dimensions `by` (`rollups.dimensions`).

        With a step they are also by interval: an interval's start is then the key's first value.
        """
        async with self.ledger.snapshot() as connection:
            return await totals_by(
                connection, await widen_to_days(connection, of), by, step_seconds
            )

    async def names(self, of: Range) -> Sequence[Any]:
        """Workspace, engine and model of each combination that had turns on the range's days."""
        table = TurnRollupRow
        days = Part(rollups.DAY_SECONDS, of.since_ms // _DAY_MS * _DAY_MS, of.until_ms)
        columns = table.workspace_id, table.engine, table.model
        query = select(*columns).where(*within(of, days, table, ["engine"]))
        return await self.ledger.rows(query.distinct())

    async def series(self, of: Range, width_seconds: int | None = None) -> Series:
        """Equal intervals, aligned to the epoch. Intervals without turns have zeros."""
        async with self.ledger.snapshot() as connection:
            of = await widen_to_days(connection, of)
            width = width_seconds or bucket_seconds(int(of.seconds))
            shortest = widths_for(of, (), None)[-1]
            if width_seconds is None and width < shortest and await _has_many(connection, of):
                width = shortest
            sums = await totals_by(connection, of, (), width)
        step = width * 1000
        buckets = list[structs.Bucket]()
        for start in range(of.since_ms // step * step, of.until_ms, step):
            totals = sums.get((start,), structs.Totals())
            bucket = structs.Bucket(
                start_ms=start,
                is_partial=start < of.since_ms or start + step > of.until_ms,
                totals=totals,
                saved_nano=totals.saved_nano,
            )
            buckets.append(bucket)
        return Series(width, buckets)

    async def reasons(self, of: Range) -> Reasons:
        kinds = (*rollups.reasons(), rollups.MIXED)
        counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        table = ReasonRollupRow
        async with self.ledger.snapshot() as connection:
            of = await widen_to_days(connection, of)
            for part in await _parts(connection, of, widths_for(of, (), None, table)):
                where = within(of, part, table)
                queries: list[Any] = [
                    select(literal(kind), column, func.count())
                    .where(column.is_not(None), *where)
                    .group_by(column)
                    for kind, column in rollups.reasons().items()
                ]
                if part.width_seconds is not None:
                    sums = select(table.kind, table.value, func.sum(table.requests))
                    queries = [sums.where(*where).group_by(table.kind, table.value)]
                for query in queries:
                    for kind, value, requests in await connection.execute(query):
                        counts[kind][value] += int(requests)
        marks = Counter[str]()
        for kind in rollups.MARK_KINDS:
            marks.update(counts[kind])
        return Reasons(
            misses=dict(counts["miss"]),
            parts=dict(counts["part"]),
            mixed=dict(counts[rollups.MIXED]),
            outcomes=dict(counts["outcome"]),
            marks=dict(marks),
        )

    async def fingerprint(self, turn_id: str, workspace: str | None = None) -> bytes | None:
        """A turn's packed fingerprint. With a `workspace` only its turns are looked at."""
        query = select(TurnRow.fingerprint).where(TurnRow.id == turn_id)
        if workspace is not None:
            query = query.where(TurnRow.workspace_id == workspace)
        return next((row.fingerprint for row in await self.ledger.rows(query)), None)


def bucket_seconds(seconds: int) -> int:
    """The narrowest round width that gives at most about sixty points."""
    for width in _BUCKETS_SECONDS:
        if seconds <= width * _MAX_POINTS:
            return width
    return _BUCKETS_SECONDS[-1]


async def _has_many(connection: AsyncConnection, of: Range) -> bool:
    """Whether a range has too many turns to read each of them."""
    all_totals = await totals_by(connection, of, ())
    return any(totals.requests > _FINE_TURNS for totals in all_totals.values())


async def totals_by(
    connection: AsyncConnection, of: Range, by: Sequence[str], step_seconds: int | None = None
) -> dict[tuple[Any, ...], structs.Totals]:
    """Keys are the interval's start, where there are intervals, and the values of `by`."""
    names = [*(["start_ms"] if step_seconds else []), *by]
    parts = await _parts(connection, of, widths_for(of, by, step_seconds))
    query = union_all(*(_sums_of(of, part, by, step_seconds) for part in parts))
    sums: dict[tuple[Any, ...], Counter[str]] = {}
    for row in (await connection.execute(query)).mappings() if parts else ():
        group = sums.setdefault(tuple(row[name] for name in names), Counter())
        group.update({name: int(row[name]) for name in structs.Totals.__struct_fields__})
    return {key: structs.Totals(**counted) for key, counted in sums.items() if counted["requests"]}


class Priced(NamedTuple):
    """Sums of turns that share a price and a band of prompt lengths."""

    price: str
    prompt_above: int
    totals: structs.Totals


def waterfall(groups: Iterable[Priced], sheets: PriceSheets) -> structs.Waterfall:
    """From what the turns would have cost without caching to what they cost."""
    premium = 0
    discount = 0
    actual = 0
    counterfactual = 0
    undelivered = 0
    unexplained = 0
    for group in groups:
        if group.price == structs.NOT_DELIVERED:
            undelivered += group.totals.requests
            continue
        price = sheets.with_id(group.price)
        totals = group.totals
        if price is None:
            unexplained += totals.requests
            continue
        rates = price.rates_above(group.prompt_above)
        for ttl, tokens in totals.writes.items():
            premium += tokens * (rates.write(ttl) - rates.input)
        discount += totals.cache_read_tokens * (rates.input - rates.read)
        actual += totals.cost_nano
        counterfactual += totals.cost_without_cache_nano
    return structs.Waterfall(
        counterfactual_nano=counterfactual,
        write_premium_nano=premium,
        read_discount_nano=discount,
        actual_nano=actual,
        saved_nano=counterfactual - actual,
        undelivered=undelivered,
        unexplained=unexplained,
    )


def comparisons(
    groups: Collection[Priced], hosted: PriceSheets, on: date
) -> list[structs.HostedCost]:
    """The cost of all turns at each hosted model's price of that day, the cheapest first. Turns
    that were not delivered cost nothing there either."""
    hosted_costs = []
    as_of = hosted.as_of.isoformat() if hosted.as_of else None
    for price in hosted.current(on):
        costs = [
            cost_at(price.rates_above(above), totals, totals.output_tokens)
            for name, above, totals in groups
            if name != structs.NOT_DELIVERED
        ]
        hosted_costs.append(
            structs.HostedCost(
                model=price.model,
                price=price.id,
                source=hosted.source,
                as_of=as_of,
                nano=sum(cost.actual for cost in costs),
                nano_without_cache=sum(cost.without_cache for cost in costs),
            )
        )
    return sorted(hosted_costs, key=lambda cost: (cost.nano, cost.model))


# Longer ranges have daily intervals.
_MAX_HOURLY_SECONDS = 48 * 3600
# Longer ranges with many turns have hourly intervals.
_MAX_SHORT_SECONDS = 2 * 3600


async def latency(ledger: Ledger, of: Range) -> structs.Latency:
    async with ledger.snapshot() as connection:
        of = await widen_to_days(connection, of)
        step = rollups.DAY_SECONDS
        widths = widths_for(of, (), None, LatencyRollupRow)
        # Before the horizon there are no turns, so even a short range is read from the sums.
        has_turns = of.since_ms >= await rollups.horizon_ms(connection)
        if has_turns and of.seconds <= _MAX_HOURLY_SECONDS:
            step = max(bucket_seconds(int(of.seconds)), 60)
            widths = []
            if of.engine is None and await _has_many(connection, of):
                is_short = of.seconds <= _MAX_SHORT_SECONDS
                step = rollups.FIVE_MINUTES_SECONDS if is_short else rollups.HOUR_SECONDS
                widths = widths_for(of, (), step, LatencyRollupRow)
        parts = await _parts(connection, of, widths)
        selects = [_select(of, part, step * 1000) for part in parts]
        rows = (await connection.execute(union_all(*selects))).all() if selects else []
        mixed = await _mixed(connection, of)
    by_cell: dict[tuple[str, int, int], Counter[int]] = {}
    by_start: dict[tuple[int, int], Counter[int]] = {}
    by_hit: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    for start, model, bucket, hit, number, requests in rows:
        by_cell.setdefault((model, bucket, hit), Counter())[number] += int(requests)
        by_start.setdefault((start, hit), Counter())[number] += int(requests)
        by_hit[hit][number] += int(requests)
    edges: tuple[int | None, ...] = (0, *rollups.PROMPT_EDGES, None)
    return structs.Latency(
        hits=percentiles(by_hit[1]),
        misses=percentiles(by_hit[0]),
        cells=[
            structs.LatencyCell(
                model=model,
                above_tokens=edges[bucket] or 0,
                up_to_tokens=edges[bucket + 1],
                is_hit=bool(hit),
                seconds=percentiles(counts),
            )
            for (model, bucket, hit), counts in sorted(by_cell.items())
        ],
        bucket_seconds=step,
        series=[
            structs.LatencyPoint(
                start_ms=start,
                hits=percentiles(by_start.get((start, 1), {})),
                misses=percentiles(by_start.get((start, 0), {})),
            )
            for start in sorted({start for start, _ in by_start})
        ],
        mixed=mixed,
    )


async def _mixed(connection: AsyncConnection, of: Range) -> list[str]:
    """The models whose turns in the range were answered by engines of several kinds. An engine that
    reported no kind counts as a kind of its own."""
    table = EpochReportRow
    columns = table.engine, table.kind, table.first_ms, table.last_ms
    kinds: dict[str, set[str]] = {}
    for engine, kind, first_ms, last_ms in await connection.execute(select(*columns)):
        if kind and first_ms < of.until_ms and last_ms >= of.since_ms:
            kinds.setdefault(engine, set()).add(kind)
    by_model: dict[str, set[str]] = {}
    for engine, model in await totals_by(connection, of, ("engine", "model")):
        if engine:
            by_model.setdefault(model, set()).update(kinds.get(engine, {engine}))
    return sorted(model for model, names in by_model.items() if len(names) > 1)


def percentiles(bins: Mapping[int, int]) -> structs.Percentiles:
    percentiles = {p: percentile(bins, p / 100) for p in (50, 95, 99)}
    return structs.Percentiles(
        requests=sum(bins.values()), p50=percentiles[50], p95=percentiles[95], p99=percentiles[99]
    )


def percentile(bins: Mapping[int, int], share: float) -> float | None:
    """The middle of the percentile's bin, in seconds. None without turns."""
    rank = share * sum(bins.values())
    count = 0
    for number in sorted(bins):
        count += bins[number]
        if bins[number] and count >= rank:
            return rollups.seconds_of(number)
    return None


def _select(of: Range, part: Part, step: int) -> Any:
    table = LatencyRollupRow
    bins: tuple[Any, ...]
    if part.width_seconds is None:
        moment = TurnRow.opened_ms // step * step
        bins = rollups.prompt_bucket(), rollups.has_read(), rollups.ttft_bin()
        query = select(moment, TurnRow.model, *bins, func.count())
        query = query.where(TurnRow.first_token_seconds.is_not(None))
    else:
        bins = table.prompt_bucket, table.has_read, table.bin
        query = select(table.start_ms // step * step, table.model, *bins, func.sum(table.requests))
    query = query.where(*within(of, part, table))
    return query.group_by(*(text(str(number)) for number in range(1, 6)))
