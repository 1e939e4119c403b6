"""Totals, series and reasons of turns for the admin API. Each number has one definition."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.database import Ledger
from gateway.ledger.reads.ranges import Range, reason_counts, sums, widen_to_days
from gateway.ledger.schema import TurnRow

_MAX_POINTS = 60
_BUCKETS_SECONDS = (5, 10, 30, 60, 300, 900, 3600, 10800, 86400)


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over turns. `saved_nano` = without cache − actual; `unpriced` turns are in neither.

    `automatic_input_tokens` are those of `input_tokens` that were reused from memory all the same.
    `prefill_tokens` were computed in `prefill_us` microseconds, by turns whose prefill was timed.
    """

    requests: int = 0
    requests_with_read: int = 0
    errors: int = 0
    unpriced: int = 0
    input_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_5m_tokens: int = 0
    cache_write_1h_tokens: int = 0
    automatic_tokens: int = 0
    automatic_input_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    cost_nano: int = 0
    thinking_tokens: int = 0
    cost_without_cache_nano: int = 0
    prefill_tokens: int = 0
    prefill_us: int = 0

    @property
    def saved_nano(self) -> int:
        """The cost of the same tokens without a cache, less their cost."""
        return self.cost_without_cache_nano - self.cost_nano

    @property
    def prompt_tokens(self) -> int:
        return (
            self.input_tokens
            + self.cache_read_tokens
            + self.cache_write_5m_tokens
            + self.cache_write_1h_tokens
        )


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """One interval, from `start_ms` on. `is_partial`: the interval is not over."""

    start_ms: int
    is_partial: bool
    totals: Totals
    saved_nano: int


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
