"""Removes all texts of one workspace from the database. The records of what it was billed for stay.

SQLite writes zeros over deleted rows, and its log is emptied afterwards. PostgreSQL's own vacuum
removes deleted rows there.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, func, select, text

from gateway.ledger.database import Ledger
from gateway.ledger.schema import (
    BatchItemRow,
    BatchRow,
    CachedContentRow,
    KeptResponseRow,
    TurnContentRow,
)

_SECONDS = 60.0
_ROWS = 50
"""The most rows of one delete. They are few, since a row may have megabytes that are zeroed."""
_ENDED = "ended"
_PURGED: tuple[tuple[str, type[Any], str], ...] = (
    ("turn_contents", TurnContentRow, "turn_id"),
    ("responses", KeptResponseRow, "turn_id"),
    ("cached_contents", CachedContentRow, "id"),
)
"""The table and the key of each kind of texts, by the name of the kind."""


async def purge_texts(ledger: Ledger, workspace: str) -> dict[str, int]:
    """Delete prompts and answers, kept responses and conversations, cached contents, and ended
    batches with their rows. Return the number of deleted rows by kind."""
    purged: dict[str, int] = {}
    for kind, table, key in _PURGED:
        column = getattr(table, key)
        some = select(column).where(table.workspace_id == workspace).limit(_ROWS)
        purged[kind] = await _delete(ledger, table, column, some)
    ended = BatchRow.workspace_id == workspace, BatchRow.status == _ENDED
    query = select(BatchRow.id).where(*ended)
    batch_ids = [row.id for row in await ledger.rows(query)]
    purged["batch_rows"] = 0
    for batch_id in batch_ids:
        num_rows = await _delete_rows(ledger, batch_id)
        purged["batch_rows"] += num_rows
    purged["batches"] = len(batch_ids)
    if not ledger.is_postgres:
        async with ledger.transaction() as connection:
            await connection.commit()  # not within a transaction
            await connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    return purged


async def running_batches(ledger: Ledger, workspace: str) -> Sequence[str]:
    """The ids of batches that have not ended."""
    query = select(BatchRow.id).where(BatchRow.workspace_id == workspace, BatchRow.status != _ENDED)
    return [row.id for row in await ledger.rows(query)]


async def _delete(ledger: Ledger, table: type[Any], column: Any, some: Any) -> int:
    """Delete rows, some at a time, since SQLite has one writer. Return their number."""
    total = 0
    while True:
        async with ledger.transaction(_SECONDS) as connection:
            await _zeroing(ledger, connection)
            deletion = await connection.execute(delete(table).where(column.in_(some)))
        total += deletion.rowcount
        if deletion.rowcount < _ROWS:
            return total


async def _delete_rows(ledger: Ledger, batch_id: str) -> int:
    """Delete a batch's rows, and then the batch. Return the number of rows."""
    total = 0
    of_batch = BatchItemRow.batch_id == batch_id
    while True:
        async with ledger.transaction(_SECONDS) as connection:
            await _zeroing(ledger, connection)
            query = select(func.min(BatchItemRow.position)).where(of_batch)
            first: int | None = (await connection.execute(query)).scalar_one()
            if first is None:
                await connection.execute(delete(BatchRow).where(BatchRow.id == batch_id))
                return total
            some = of_batch, BatchItemRow.position < first + _ROWS
            deletion = await connection.execute(delete(BatchItemRow).where(*some))
        total += deletion.rowcount


async def _zeroing(ledger: Ledger, connection: Any) -> None:
    if not ledger.is_postgres:
        await connection.execute(text("PRAGMA secure_delete = ON"))
