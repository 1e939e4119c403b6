"""How many of a gateway's turns of one day the ledger has, and how many of them are damaged."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, RowMapping, select, tuple_

from gateway.ledger.checksums import BILLED, is_damaged
from gateway.ledger.database import Ledger
from gateway.ledger.schema import HorizonRow, TurnRow

_PAGE = 2000
_PAUSE_SECONDS = 0.05
_COLUMNS = [getattr(TurnRow, name) for name in (*BILLED, "checksum")]


class StoredTurns(NamedTuple):
    """Numbers of turns. A damaged one is not what was inserted."""

    turns: int
    damaged: int


async def stored_turns(
    ledger: Ledger, instances: Sequence[str], since_ms: int, until_ms: int
) -> StoredTurns | None:
    """Count and check the turns of these gateways that began in a range.

    None where retention may have deleted turns of the range. Turns are read by pages, with pauses
    between them.
    """
    count = 0
    damaged = 0
    row = TurnRow
    after: ColumnElement[bool] = row.opened_ms >= since_ms
    while True:
        query = (
            select(*_COLUMNS)
            .where(row.instance.in_(instances), after, row.opened_ms < until_ms)
            .order_by(row.opened_ms, row.id)
            .limit(_PAGE)
        )
        async with ledger.transaction() as connection:
            horizon = (await connection.execute(select(HorizonRow.turns_ms))).scalar_one_or_none()
            if (horizon or 0) > since_ms:
                return None
            page = (await connection.execute(query)).mappings().all()
        count += len(page)
        damaged += await asyncio.to_thread(_num_damaged, page)
        if len(page) < _PAGE:
            return StoredTurns(count, damaged)
        after = tuple_(row.opened_ms, row.id) > tuple_(page[-1]["opened_ms"], page[-1]["id"])
        await asyncio.sleep(_PAUSE_SECONDS)


def _num_damaged(page: Sequence[RowMapping]) -> int:
    rows = [{name: row[name] for name in (*BILLED, "checksum")} for row in page]
    return sum(map(is_damaged, rows))
