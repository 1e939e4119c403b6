"""Which turns a transaction has inserted, as a condition of statements that are made once.

SQLite numbers the rows of one transaction one behind the other. A range of numbers is two
parameters. A list of ids is made anew for each batch and parsed, and each id is searched for.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.schema import TurnRow

_ROW: ColumnElement[int] = literal_column(f"{TurnRow.__tablename__}.rowid")
_LAST = select(func.max(_ROW)).select_from(TurnRow)


def is_postgres(connection: AsyncConnection | Connection) -> bool:
    return connection.dialect.name == "postgresql"


def are_inserted(*, on_postgres: bool) -> ColumnElement[bool]:
    """Whether a turn is one of those that `inserted` was told."""
    if on_postgres:
        return TurnRow.id.in_(bindparam("turn_ids", expanding=True))
    return _ROW.between(bindparam("first_row"), bindparam("last_row"))


def inserted(connection: Connection, turn_ids: Sequence[str]) -> dict[str, Any]:
    """The parameters of `are_inserted`, for the turns that this transaction inserted last."""
    if is_postgres(connection):
        return {"turn_ids": turn_ids}
    last = connection.execute(_LAST).scalar_one()
    return {"first_row": last - len(turn_ids) + 1, "last_row": last}
