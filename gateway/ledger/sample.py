"""Sample data: marks an empty database as one of sample data, and fills it.

The mark is there before the first made-up turn and is never taken away: a database holds sample
data or real turns, never both. `Ledger.insert_turns` looks at it in each of its transactions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

from sqlalchemy import insert, select, text

from gateway.base.errors import InvalidRequest
from gateway.base.record import TurnRecord
from gateway.ledger import watermark
from gateway.ledger.database import Ledger
from gateway.ledger.schema import ApiKeyRow, TurnRollupRow, TurnRow, WorkspaceRow
from gateway.ledger.turn_rows import row_of
from gateway.ledger.upkeep import rebuild
from gateway.ledger.workspaces import DEFAULT_WORKSPACE

_BATCH = 1000

Row = Mapping[str, Any]


async def claim(
    ledger: Ledger, now: datetime, workspaces: Sequence[Row], keys: Sequence[Row]
) -> None:
    """Mark an empty database as one of sample data, and make its workspaces and keys.

    Rows are columns by name. Raise InvalidRequest where the database is not empty.
    """
    async with ledger.transaction() as connection:
        await watermark.advance(connection)
        if ledger.is_postgres:
            # No other transaction inserts a turn until this one commits. Then it sees the mark.
            await connection.execute(text("LOCK TABLE turns IN SHARE ROW EXCLUSIVE MODE"))
        if await watermark.is_sample(connection):
            raise InvalidRequest("the database holds sample data already")
        others = select(WorkspaceRow.id).where(WorkspaceRow.id != DEFAULT_WORKSPACE)
        for query in (select(TurnRow.id), select(TurnRollupRow.start_ms), others):
            if (await connection.execute(query.limit(1))).first() is not None:
                raise InvalidRequest(
                    "the database is not empty: sample data is never mixed with real data"
                )
        await watermark.mark_sample(connection, now)
        await connection.execute(insert(WorkspaceRow), workspaces)
        await connection.execute(insert(ApiKeyRow), keys)


async def fill(ledger: Ledger, records: Iterable[TurnRecord]) -> int:
    """Insert made-up turns into a claimed database and sum them up. Return their number."""
    total = 0
    for rows in _batches(map(row_of, records)):
        async with ledger.transaction() as connection:
            if not await watermark.is_sample(connection):
                raise InvalidRequest("the database is not marked as one of sample data")
            await connection.execute(insert(TurnRow), rows)
        total += len(rows)
    await rebuild(ledger)
    await ledger.analyze()
    return total


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while batch := list(islice(rows, _BATCH)):
        yield batch
