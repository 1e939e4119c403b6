"""Three numbers of a database: a counter of changes, a mark for sample data, and a stamp.

By the counter gateways notice that keys or workspaces have changed. The stamp tells one database
from another.
"""

from datetime import datetime

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.schema import WatermarkRow

_ACCESS = "access"
_SAMPLE = "sample"
_STAMP = "stamp"
# Every batch of turns asks these, so they are made once.
_MARKS = select(WatermarkRow.value).where(WatermarkRow.name == _SAMPLE)
_STAMPS = select(WatermarkRow.value).where(WatermarkRow.name == _STAMP)


async def advance(connection: AsyncConnection) -> None:
    """Count one change, as the first statement of its transaction.

    The statement takes the lock. So changes are made one after another, and on SQLite no change has
    read stale rows.
    """
    statement = update(WatermarkRow).where(WatermarkRow.name == _ACCESS)
    await connection.execute(statement.values(value=WatermarkRow.value + 1))


async def read(connection: AsyncConnection) -> int:
    query = select(WatermarkRow.value).where(WatermarkRow.name == _ACCESS)
    return int((await connection.execute(query)).scalar_one())


def stamp(connection: Connection, made: int) -> int:
    """The database's stamp. If it has none yet, `made` is stored."""
    if (found := connection.execute(_STAMPS).scalar_one_or_none()) is not None:
        return int(found)
    kind = postgresql if connection.dialect.name == "postgresql" else sqlite
    row = kind.insert(WatermarkRow).values({"name": _STAMP, "value": made})
    connection.execute(row.on_conflict_do_nothing())
    return int(connection.execute(_STAMPS).scalar_one())


async def is_sample(connection: AsyncConnection) -> bool:
    return await connection.run_sync(has_sample_mark)


def has_sample_mark(connection: Connection) -> bool:
    return connection.execute(_MARKS).first() is not None


async def mark_sample(connection: AsyncConnection, now: datetime) -> None:
    """Mark the database. The mark is permanent."""
    row = {"name": _SAMPLE, "value": int(now.timestamp() * 1000)}
    await connection.execute(insert(WatermarkRow).values(row))
