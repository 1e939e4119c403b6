"""Ranges of time with filters.

Whole days and hours are read from the sums, the rest from the turns.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, func, literal, select, text, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.admin.structs.usage import Bucket, Totals
from gateway.ledger.database import Ledger
from gateway.ledger.rollups import (
    DAY_SECONDS,
    HOUR_SECONDS,
    MEASURES,
    dimensions,
    horizon_ms,
    measures,
)
from gateway.ledger.schema import ReasonRollupRow, TurnRollupRow, TurnRow

_HOUR_MS = HOUR_SECONDS * 1000
_DAY_MS = DAY_SECONDS * 1000


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
        wanted = {"workspace_id": self.workspace, "engine": self.engine, "model": self.model}
        return [
            getattr(table, name) == value for name, value in wanted.items() if value is not None
        ]


class Part(NamedTuple):
    """`width_seconds` of the sums to read, or None for the turns themselves."""

    width_seconds: int | None
    since_ms: int
    until_ms: int


def parts_of(since_ms: int, until_ms: int, widths: Sequence[int]) -> list[Part]:
    """Split a range so that the widest fitting intervals cover its middle.

    `widths` are seconds, the widest first. Parts that no interval covers are read from the turns.
    """
    if since_ms >= until_ms:
        return []
    if not widths:
        return [Part(None, since_ms, until_ms)]
    width, *narrower = widths
    step = width * 1000
    first, last = -(-since_ms // step) * step, until_ms // step * step
    if first >= last:
        return parts_of(since_ms, until_ms, narrower)
    return [
        *parts_of(since_ms, first, narrower),
        Part(width, first, last),
        *parts_of(last, until_ms, narrower),
    ]


def widths_for(step_seconds: int | None) -> list[int]:
    """The widths of the sums that can make intervals of that length.

    None asks for one number over all.
    """
    widths = (DAY_SECONDS, HOUR_SECONDS)
    return [width for width in widths if step_seconds is None or step_seconds % width == 0]


async def widen_to_days(connection: AsyncConnection, wanted: Range) -> Range:
    """Widen a range to whole days where its turns may have been deleted."""
    horizon = await horizon_ms(connection)
    since, until = wanted.since_ms, wanted.until_ms
    if since < horizon:
        since = since // _DAY_MS * _DAY_MS
    if until < horizon:
        until = -(-until // _DAY_MS) * _DAY_MS
    return replace(wanted, since_ms=since, until_ms=until)


def sums(
    of: Range, by: Sequence[str] = (), step_seconds: int | None = None
) -> Select[Any] | Any | None:
    """Every measure, for each value of the dimensions `by` and each interval (`start_ms`).

    One row may come in several parts, which the caller adds up. None if the range is empty.
    """
    selects = [
        _of_turns(of, part, by, step_seconds)
        if part.width_seconds is None
        else _of_rollups(of, part, by, step_seconds)
        for part in parts_of(of.since_ms, of.until_ms, widths_for(step_seconds))
    ]
    return union_all(*selects) if selects else None


def rows_of(of: Range, part: Part) -> Select[Any]:
    """The rows that a read of the part looks at, each as the number 1."""
    if part.width_seconds is None:
        table: Any = TurnRow
        where = [table.opened_ms >= part.since_ms, table.opened_ms < part.until_ms]
    else:
        table = TurnRollupRow
        where = [
            table.width_seconds == part.width_seconds,
            table.start_ms >= part.since_ms,
            table.start_ms < part.until_ms,
        ]
    return select(literal(1)).select_from(table).where(*where, *of.filters(table))


def _of_turns(of: Range, part: Part, by: Sequence[str], step_seconds: int | None) -> Select[Any]:
    found = dimensions()
    keys = [found[name].label(name) for name in by]
    where = [TurnRow.opened_ms >= part.since_ms, TurnRow.opened_ms < part.until_ms]
    return _grouped(keys, _values_of_turns(), TurnRow.opened_ms, step_seconds).where(
        *where, *of.filters(TurnRow)
    )


def _of_rollups(of: Range, part: Part, by: Sequence[str], step_seconds: int | None) -> Select[Any]:
    table = TurnRollupRow
    keys = [getattr(table, name).label(name) for name in by]
    where = [
        table.width_seconds == part.width_seconds,
        table.start_ms >= part.since_ms,
        table.start_ms < part.until_ms,
    ]
    query = _grouped(keys, _values_of_rollups(), table.start_ms, step_seconds)
    return query.where(*where, *of.filters(table))


# Made once: to make them takes longer than many a query.
@cache
def _values_of_turns() -> tuple[Any, ...]:
    return tuple(column.label(name) for name, column in measures().items())


@cache
def _values_of_rollups() -> tuple[Any, ...]:
    columns = ((name, getattr(TurnRollupRow, name)) for name in MEASURES)
    return tuple(func.coalesce(func.sum(column), 0).label(name) for name, column in columns)


def _grouped(
    keys: list[Any], values: Sequence[Any], moment: Any, step_seconds: int | None
) -> Select[Any]:
    if step_seconds is not None:
        step = step_seconds * 1000
        keys = [(moment // step * step).label("start_ms"), *keys]
    query = select(*keys, *values)
    return query.group_by(*(text(str(n + 1)) for n in range(len(keys)))) if keys else query


def reason_counts(of: Range) -> Iterator[Any]:
    """Selects of (kind, value, requests). The caller adds up rows that come in several parts."""
    for part in parts_of(of.since_ms, of.until_ms, widths_for(None)):
        if part.width_seconds is not None:
            table = ReasonRollupRow
            yield (
                select(table.kind, table.value, func.sum(table.requests).label("requests"))
                .where(
                    table.width_seconds == part.width_seconds,
                    table.start_ms >= part.since_ms,
                    table.start_ms < part.until_ms,
                    *of.filters(table),
                )
                .group_by(table.kind, table.value)
            )
            continue
        where = (TurnRow.opened_ms >= part.since_ms) & (TurnRow.opened_ms < part.until_ms)
        for kind, column in (("miss", TurnRow.miss_reason), ("outcome", TurnRow.outcome)):
            yield (
                select(literal(kind).label("kind"), column.label("value"), func.count())
                .where(column.is_not(None), where, *of.filters(TurnRow))
                .group_by(column)
            )


_MAX_POINTS = 60
_BUCKETS_SECONDS = (5, 10, 30, 60, 300, 900, 3600, 10800, 86400)


@dataclass(frozen=True, slots=True)
class Series:
    bucket_seconds: int
    buckets: list[Bucket]


@dataclass(frozen=True, slots=True)
class Reasons:
    """How many turns had each miss reason and each outcome."""

    misses: dict[str, int]
    outcomes: dict[str, int]


class Queries:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def totals(self, of: Range) -> Totals:
        async with self.ledger.snapshot() as connection:
            found = await totals_by(connection, await widen_to_days(connection, of), ())
        return found.get((), Totals())

    async def totals_by(
        self, of: Range, by: Sequence[str], step_seconds: int | None = None
    ) -> dict[tuple[Any, ...], Totals]:
        """The totals for each combination of values of the dimensions `by` (`rollups.dimensions`).

        With a step also for each interval; then its start is the key's first value.
        """
        async with self.ledger.snapshot() as connection:
            return await totals_by(
                connection, await widen_to_days(connection, of), by, step_seconds
            )

    async def series(self, of: Range, width_seconds: int | None = None) -> Series:
        """Equal intervals, aligned to the epoch.

        Intervals without turns are included, with zeros.
        """
        async with self.ledger.snapshot() as connection:
            of = await widen_to_days(connection, of)
            width = width_seconds or bucket_seconds(int(of.seconds))
            found = await totals_by(connection, of, (), width)
        step = width * 1000
        buckets = [
            Bucket(
                start_ms=start,
                is_partial=start < of.since_ms or start + step > of.until_ms,
                totals=(totals := found.get((start,), Totals())),
                saved_nano=totals.saved_nano,
            )
            for start in range(of.since_ms // step * step, of.until_ms, step)
        ]
        return Series(width, buckets)

    async def reasons(self, of: Range) -> Reasons:
        counts: dict[str, Counter[str]] = {"miss": Counter(), "outcome": Counter()}
        async with self.ledger.snapshot() as connection:
            of = await widen_to_days(connection, of)
            for query in reason_counts(of):
                for kind, value, requests in await connection.execute(query):
                    counts[kind][value] += int(requests)
        return Reasons(dict(counts["miss"]), dict(counts["outcome"]))

    async def fingerprint(self, turn_id: str, workspace: str | None = None) -> bytes | None:
        """A turn's packed fingerprint; only a turn of `workspace` if one is given."""
        query = select(TurnRow.fingerprint).where(TurnRow.id == turn_id)
        if workspace is not None:
            query = query.where(TurnRow.workspace_id == workspace)
        async with self.ledger.snapshot() as connection:
            found: bytes | None = (await connection.execute(query)).scalar_one_or_none()
            return found


def bucket_seconds(seconds: int) -> int:
    """The narrowest round width that gives at most about sixty points."""
    for width in _BUCKETS_SECONDS:
        if seconds <= width * _MAX_POINTS:
            return width
    return _BUCKETS_SECONDS[-1]


async def totals_by(
    connection: AsyncConnection, of: Range, by: Sequence[str], step_seconds: int | None = None
) -> dict[tuple[Any, ...], Totals]:
    """Keys are the interval's start, where there are intervals, and the values of `by`."""
    names = [*(["start_ms"] if step_seconds else []), *by]
    query = sums(of, by, step_seconds)
    added: dict[tuple[Any, ...], Counter[str]] = {}
    for row in [] if query is None else (await connection.execute(query)).mappings():
        own = added.setdefault(tuple(row[name] for name in names), Counter())
        own.update({name: int(row[name]) for name in Totals.__struct_fields__})
    return {key: Totals(**counted) for key, counted in added.items() if counted["requests"]}
