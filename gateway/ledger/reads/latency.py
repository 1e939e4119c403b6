"""Times to first token: percentiles by prompt length, with and without a cache read."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, select, text, union_all

from gateway.admin.structs.usage import Latency, LatencyCell, LatencyPoint, Percentiles
from gateway.ledger.database import Ledger
from gateway.ledger.reads.sums import Part, Range, bucket_seconds, parts_of, widen_to_days
from gateway.ledger.rollups import (
    DAY_SECONDS,
    PROMPT_EDGES,
    TTFT_EDGES_SECONDS,
    has_read,
    horizon_ms,
    prompt_bucket,
    ttft_bin,
)
from gateway.ledger.schema import LatencyRollupRow, TurnRow

# Longer ranges have daily intervals, since the sums are kept by day.
_MAX_RAW_SECONDS = 48 * 3600


async def latency(ledger: Ledger, of: Range) -> Latency:
    async with ledger.snapshot() as connection:
        of = await widen_to_days(connection, of)
        # Before the horizon there are no turns, so even a short range is read from the sums.
        has_turns = of.since_ms >= await horizon_ms(connection)
        is_short = has_turns and of.seconds <= _MAX_RAW_SECONDS
        step = (max(bucket_seconds(int(of.seconds)), 60) if is_short else DAY_SECONDS) * 1000
        parts = parts_of(of.since_ms, of.until_ms, [] if is_short else [DAY_SECONDS])
        selects = [_select(of, part, step) for part in parts]
        rows = (await connection.execute(union_all(*selects))).all() if selects else []
    by_cell: dict[tuple[int, int], Counter[int]] = {}
    by_start: dict[tuple[int, int], Counter[int]] = {}
    by_hit: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    for start, bucket, hit, number, requests in rows:
        by_cell.setdefault((bucket, hit), Counter())[number] += int(requests)
        by_start.setdefault((start, hit), Counter())[number] += int(requests)
        by_hit[hit][number] += int(requests)
    return Latency(
        hits=percentiles(by_hit[1]),
        misses=percentiles(by_hit[0]),
        cells=[_cell(*key, counts) for key, counts in sorted(by_cell.items())],
        bucket_seconds=step // 1000,
        series=[
            LatencyPoint(
                start_ms=start,
                hits=percentiles(by_start.get((start, 1), {})),
                misses=percentiles(by_start.get((start, 0), {})),
            )
            for start in sorted({start for start, _ in by_start})
        ],
    )


def percentiles(bins: Mapping[int, int]) -> Percentiles:
    found = {p: percentile(bins, p / 100) for p in (50, 95, 99)}
    return Percentiles(requests=sum(bins.values()), p50=found[50], p95=found[95], p99=found[99])


def percentile(bins: Mapping[int, int], share: float) -> float | None:
    """The middle of the percentile's bin, on the logarithmic scale. None without turns.

    In the last bin it is the last edge, a lower bound.
    """
    left = share * sum(bins.values())
    for number in sorted(bins):
        left -= bins[number]
        if bins[number] and left <= 0:
            if number == len(TTFT_EDGES_SECONDS):
                return TTFT_EDGES_SECONDS[-1]
            return float(TTFT_EDGES_SECONDS[number] / 2**0.25)
    return None


def _select(of: Range, part: Part, step: int) -> Any:
    keys: list[Any]
    if part.width_seconds is None:
        keys = [TurnRow.opened_ms // step * step, prompt_bucket(), has_read(), ttft_bin()]
        where = (TurnRow.opened_ms >= part.since_ms) & (TurnRow.opened_ms < part.until_ms)
        query = select(*keys, func.count()).where(
            TurnRow.first_token_seconds.is_not(None), where, *of.filters(TurnRow)
        )
    else:
        table = LatencyRollupRow
        keys = [table.start_ms, table.prompt_bucket, table.has_read, table.bin]
        where = (table.start_ms >= part.since_ms) & (table.start_ms < part.until_ms)
        query = select(*keys, func.sum(table.requests)).where(where, *of.filters(table))
    return query.group_by(*(text(str(number)) for number in range(1, 5)))


def _cell(bucket: int, hit: int, counts: Mapping[int, int]) -> LatencyCell:
    edges: tuple[int | None, ...] = (0, *PROMPT_EDGES, None)
    return LatencyCell(
        above_tokens=edges[bucket] or 0,
        up_to_tokens=edges[bucket + 1],
        is_hit=bool(hit),
        seconds=percentiles(counts),
    )
