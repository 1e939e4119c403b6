"""A bounded sample of a range's turns, and the cost of restarts, without reading all turns.

The range is cut into equal parts, and the newest turns of each are taken. The index finds them, so
a month of a million turns costs no more than an hour of a hundred.
"""

from itertools import pairwise
from typing import Any

import msgspec
from sqlalchemy import func, select, union_all

from gateway.ledger.database import Ledger
from gateway.ledger.reads.ranges import Range
from gateway.ledger.schema import TurnRow

NUM_PARTS = 40


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One turn whose answer began.

    `overhead_seconds` is the time that gateway and network added to the engine's queue and prefill.
    None if the engine sent no times.
    """

    id: str
    opened_ms: int
    engine: str | None
    prompt_tokens: int
    cache_read_tokens: int
    first_token_seconds: float
    overhead_seconds: float | None
    available_tokens: int | None
    captured_tokens: int | None
    delivered_tokens: int


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that turns missed because their engine had restarted."""

    requests: int
    written_tokens: int


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """One restart of an engine: two processes answered turns of the range.

    `last_ms` is the last turn of the old process, `first_ms` the first turn of the new one.

    `lost` counts until the next restart.
    """

    engine: str
    epoch: str
    last_ms: int
    first_ms: int
    lost: Lost


async def samples(ledger: Ledger, of: Range, limit: int) -> list[Sample]:
    """At most `limit` turns of the range, in order of time.

    They are the newest of each of 40 parts.
    """
    span = of.until_ms - of.since_ms
    edges = [of.since_ms + span * number // NUM_PARTS for number in range(NUM_PARTS + 1)]
    columns = [
        TurnRow.id,
        TurnRow.opened_ms,
        TurnRow.engine,
        TurnRow.input_tokens,
        TurnRow.cache_read_tokens,
        TurnRow.cache_write_5m_tokens,
        TurnRow.cache_write_1h_tokens,
        TurnRow.automatic_tokens,
        TurnRow.first_token_seconds,
        TurnRow.queue_seconds,
        TurnRow.prefill_seconds,
        TurnRow.available_tokens,
        TurnRow.captured_tokens,
    ]
    parts = []
    for start, end in pairwise(edges):
        if start == end:
            continue
        part = (
            select(*columns)
            .where(TurnRow.opened_ms >= start, TurnRow.opened_ms < end)
            .where(TurnRow.first_token_seconds.is_not(None), *of.filters(TurnRow))
            .order_by(TurnRow.opened_ms.desc(), TurnRow.id.desc())
            .limit(max(limit // NUM_PARTS, 1))
            .subquery()
        )
        parts.append(select(part))
    async with ledger.snapshot() as connection:
        rows = (await connection.execute(union_all(*parts))).mappings().all()
    return sorted((_sample(row) for row in rows), key=lambda each: (each.opened_ms, each.id))


def _sample(row: Any) -> Sample:
    queue, prefill = row["queue_seconds"], row["prefill_seconds"]
    timed = queue is not None and prefill is not None
    written = row["cache_write_5m_tokens"] + row["cache_write_1h_tokens"]
    return Sample(
        id=row["id"],
        opened_ms=row["opened_ms"],
        engine=row["engine"],
        prompt_tokens=row["input_tokens"] + row["cache_read_tokens"] + written,
        cache_read_tokens=row["cache_read_tokens"],
        first_token_seconds=row["first_token_seconds"],
        overhead_seconds=max(row["first_token_seconds"] - queue - prefill, 0.0) if timed else None,
        available_tokens=row["available_tokens"],
        captured_tokens=row["captured_tokens"],
        delivered_tokens=row["cache_read_tokens"] + row["automatic_tokens"],
    )


async def epochs(ledger: Ledger, of: Range, engines: list[str], limit: int = 50) -> list[Epoch]:
    """The restarts of these engines in the range, the newest first, at most `limit` each.

    They are found by halving, since two turns of one epoch have no other epoch between them.
    """
    found = []
    async with ledger.snapshot() as connection:
        for engine in engines:
            changes: list[tuple[Any, Any]] = []
            await _changes(connection, of, engine, changes, limit)
            starts = [after.opened_ms for _, after in changes]
            for number, (before, after) in enumerate(changes):
                end = [*starts, of.until_ms][number + 1]
                lost = await _lost(connection, engine, after.opened_ms, end)
                found.append(
                    Epoch(
                        engine=engine,
                        epoch=after.epoch,
                        last_ms=before.opened_ms,
                        first_ms=after.opened_ms,
                        lost=lost,
                    )
                )
    return sorted(found, key=lambda each: (-each.first_ms, each.engine))


async def _changes(
    connection: Any, of: Range, engine: str, changes: list[tuple[Any, Any]], limit: int
) -> None:
    first = await _turn(connection, engine, of.since_ms, of.until_ms, is_last=False)
    last = await _turn(connection, engine, of.since_ms, of.until_ms, is_last=True)
    spans = [(first, last)] if first is not None else []
    while spans and len(changes) < limit:
        early, late = spans.pop()
        if early.epoch == late.epoch:
            continue
        middle = (early.opened_ms + late.opened_ms) // 2 + 1
        left = await _turn(connection, engine, early.opened_ms, middle, is_last=True)
        right = await _turn(connection, engine, middle, late.opened_ms + 1, is_last=False)
        if left is None or right is None:
            changes.append((early, late))
            continue
        if left.epoch != right.epoch:
            # There is no turn between these two.
            changes.append((left, right))
        spans += [(early, left), (right, late)]
    changes.sort(key=lambda change: change[1].opened_ms)


async def _turn(
    connection: Any, engine: str, since_ms: int, until_ms: int, *, is_last: bool
) -> Any:
    order = TurnRow.opened_ms.desc() if is_last else TurnRow.opened_ms
    query = (
        select(TurnRow.opened_ms, TurnRow.epoch)
        .where(TurnRow.opened_ms >= since_ms, TurnRow.opened_ms < until_ms)
        .where(TurnRow.engine == engine, TurnRow.epoch.is_not(None))
        .order_by(order)
        .limit(1)
    )
    return (await connection.execute(query)).first()


async def _lost(connection: Any, engine: str, since_ms: int, until_ms: int) -> Lost:
    written = TurnRow.cache_write_5m_tokens + TurnRow.cache_write_1h_tokens
    query = select(func.count(), func.coalesce(func.sum(written), 0)).where(
        TurnRow.miss_reason == "engine_restart",
        TurnRow.opened_ms >= since_ms,
        TurnRow.opened_ms < until_ms,
        TurnRow.engine == engine,
    )
    requests, tokens = (await connection.execute(query)).one()
    return Lost(requests=requests, written_tokens=int(tokens))
