"""Looks for damage in the ledger: in the file's structure, and between turns and their sums."""

from typing import Any

from sqlalchemy import func, select, text

from gateway.ledger.database import Ledger
from gateway.ledger.schema import TurnRollupRow
from gateway.ledger.sums.horizon import horizon_ms
from gateway.ledger.sums.rollups import DAY_SECONDS, MEASURES, measures, start_of

_DAY_MS = DAY_SECONDS * 1000


async def problems(ledger: Ledger) -> list[str]:
    """One line each; none where all is well. Raise LedgerDamaged where it can't be read."""
    found: list[str] = []
    async with ledger.snapshot() as connection:
        if not ledger.is_postgres:
            told = (await connection.execute(text("PRAGMA integrity_check(20)"))).scalars().all()
            found += [f"structure: {each}" for each in told if each != "ok"]
        turns = await _by_day(connection, start_of(DAY_SECONDS), measures(), None)
        kept = {name: func.sum(getattr(TurnRollupRow, name)) for name in MEASURES}
        sums = await _by_day(
            connection,
            TurnRollupRow.start_ms,
            kept,
            TurnRollupRow.width_seconds == DAY_SECONDS,
        )
        whole = -(-await horizon_ms(connection) // _DAY_MS) * _DAY_MS
    for day in sorted(turns.keys() | sums.keys()):
        if day >= whole and turns.get(day) != sums.get(day):
            found.append(f"day {day // _DAY_MS} since 1970: its turns and its sums do not agree")
    return found


async def _by_day(
    connection: Any, start: Any, columns: dict[str, Any], where: Any
) -> dict[int, tuple[int, ...]]:
    query = select(start.label("day"), *columns.values()).group_by(text("1"))
    if where is not None:
        query = query.where(where)
    return {
        int(row[0]): tuple(int(each or 0) for each in row[1:])
        for row in (await connection.execute(query)).all()
    }
