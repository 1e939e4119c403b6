"""Ends rows of batches. A row's result and its turn are written together, in one transaction.

The first try to be written ends the row. So a row is charged once, however many tries gateways
made.
"""

from collections.abc import Sequence
from copy import copy

import sqlalchemy as sa

from gateway.base.record import RowTry, TurnRecord
from gateway.ledger.batches import PENDING
from gateway.ledger.database import Ledger
from gateway.ledger.rollups import insert_closed
from gateway.ledger.schema import BatchItemRow, TurnRow


async def end_rows(ledger: Ledger, records: Sequence[TurnRecord]) -> set[str]:
    """End the rows of these turns. Return the ids of those turns that the ledger has then.

    A turn whose id is missing came second: the ledger has another gateway's turn for its row. A row
    may have ended without a turn, because it was canceled, expired or deleted. Then the turn is
    inserted as not delivered. A second call changes nothing. Raise the errors of
    `Ledger.insert_turns`.
    """
    async with ledger.transaction() as connection:
        turn_ids = await connection.run_sync(_end_rows, records)
    ledger.identity.check_file()
    return turn_ids


def _end_rows(connection: sa.Connection, records: Sequence[TurnRecord]) -> set[str]:
    inserted: list[TurnRecord] = []
    # All gateways use one order of rows, so that no two wait for each other.
    for record in sorted(records, key=lambda record: record.id):
        assert record.row is not None
        if _end_row(connection, record.row):
            inserted.append(record)
        elif _owner_of(connection, record.id) is None:
            undelivered = copy(record)
            undelivered.withhold()
            inserted.append(undelivered)
    if inserted:
        insert_closed(connection, inserted)
    return {record.id for record in records if _owner_of(connection, record.id) == record.instance}


def _end_row(connection: sa.Connection, attempt: RowTry) -> bool:
    """End a row; return whether it was pending. Where another gateway is ending it, wait for
    that."""
    place = BatchItemRow.batch_id == attempt.batch, BatchItemRow.position == attempt.position
    statement = sa.update(BatchItemRow).where(*place, BatchItemRow.status == PENDING)
    result = connection.execute(statement.values(status=attempt.status, result=attempt.result))
    return result.rowcount == 1


def _owner_of(connection: sa.Connection, turn_id: str) -> str | None:
    """The gateway whose turn the ledger has under this id."""
    query = sa.select(TurnRow.instance).where(TurnRow.id == turn_id)
    return connection.execute(query).scalar_one_or_none()
