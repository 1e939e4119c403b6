"""A range's turns for advice: with their fingerprints page by page, and those that wrote."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from sqlalchemy import select, tuple_

from gateway.ledger.database import Ledger
from gateway.ledger.reads.ranges import Range
from gateway.ledger.schema import TurnRow

PAGE_TURNS = 4000
_SEARCHED_TURNS = 1000
_COLUMNS = (
    TurnRow.id,
    TurnRow.opened_ms,
    TurnRow.workspace_id,
    TurnRow.key_id,
    TurnRow.model,
    TurnRow.dialect,
    TurnRow.price,
    TurnRow.input_tokens,
    TurnRow.cache_read_tokens,
    TurnRow.cache_write_5m_tokens,
    TurnRow.cache_write_1h_tokens,
    TurnRow.output_tokens,
    TurnRow.computed_tokens,
    TurnRow.first_token_seconds,
    TurnRow.queue_seconds,
    TurnRow.prefill_seconds,
    TurnRow.decode_seconds,
    TurnRow.fingerprint,
)


async def observed(
    ledger: Ledger, of: Range, key: str | None, limit: int
) -> AsyncIterator[Sequence[Any]]:
    """Pages of at most `limit` turns in all whose answer began."""
    after: tuple[int, str] | None = None
    while limit > 0:
        query = (
            select(*_COLUMNS)
            .where(TurnRow.opened_ms >= of.since_ms, TurnRow.opened_ms < of.until_ms)
            .where(*of.filters(TurnRow))
            .where(TurnRow.fingerprint.is_not(None), TurnRow.first_token_seconds.is_not(None))
            .order_by(TurnRow.opened_ms.desc(), TurnRow.id.desc())
            .limit(min(limit, PAGE_TURNS))
        )
        if key is not None:
            query = query.where(TurnRow.key_id == key)
        if after is not None:
            query = query.where(
                TurnRow.opened_ms <= after[0],
                tuple_(TurnRow.opened_ms, TurnRow.id) < after,
            )
        async with ledger.snapshot() as connection:
            rows = (await connection.execute(query)).all()
        if rows:
            yield rows
        if len(rows) < min(limit, PAGE_TURNS):
            return
        limit -= len(rows)
        after = rows[-1].opened_ms, rows[-1].id


async def newest_writers(ledger: Ledger, of: Range, workspace: str, limit: int) -> list[str]:
    """The ids of a workspace's newest turns that wrote, among its newest 1,000 of the range."""
    written = TurnRow.cache_write_5m_tokens + TurnRow.cache_write_1h_tokens
    newest = (
        select(TurnRow.id, TurnRow.opened_ms, written.label("written"))
        .where(TurnRow.workspace_id == workspace)
        .where(TurnRow.opened_ms >= of.since_ms, TurnRow.opened_ms < of.until_ms)
        .order_by(TurnRow.opened_ms.desc(), TurnRow.id.desc())
        .limit(_SEARCHED_TURNS)
        .subquery()
    )
    query = (
        select(newest.c.id)
        .where(newest.c.written > 0)
        .order_by(newest.c.opened_ms.desc(), newest.c.id.desc())
        .limit(limit)
    )
    async with ledger.snapshot() as connection:
        return list((await connection.execute(query)).scalars())
