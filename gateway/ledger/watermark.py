"""The counter by which gateways notice that keys or workspaces have changed, and the mark of a
database that holds sample data."""

from datetime import datetime

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.schema import WatermarkRow

_ACCESS = "access"
_SAMPLE = "sample"


async def advance(connection: AsyncConnection) -> None:
    """Count one change, as the first statement of its transaction.

    First, because it takes the lock: changes are then made one after another, and on SQLite none
    has read something that another one overtook.
    """
    statement = update(WatermarkRow).where(WatermarkRow.name == _ACCESS)
    await connection.execute(statement.values(value=WatermarkRow.value + 1))


async def read(connection: AsyncConnection) -> int:
    query = select(WatermarkRow.value).where(WatermarkRow.name == _ACCESS)
    return int((await connection.execute(query)).scalar_one())


async def is_sample(connection: AsyncConnection) -> bool:
    query = select(WatermarkRow.value).where(WatermarkRow.name == _SAMPLE)
    return (await connection.execute(query)).first() is not None


async def mark_sample(connection: AsyncConnection, now: datetime) -> None:
    """For good: nothing takes it away."""
    row = {"name": _SAMPLE, "value": int(now.timestamp() * 1000)}
    await connection.execute(insert(WatermarkRow).values(row))
