"""Closed turns as rows, inserted and added to the sums in one transaction."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from gateway.base.errors import LedgerRefused, SampleData
from gateway.base.record import TurnRecord
from gateway.ledger import watermark
from gateway.ledger.schema import TurnRow
from gateway.ledger.sums.rollups import add_turns

_INSERTS = {
    kind.dialect.name: kind.insert(TurnRow).on_conflict_do_nothing().returning(TurnRow.id)
    for kind in (postgresql, sqlite)
}


def insert_closed(connection: Connection, records: Sequence[TurnRecord]) -> None:
    """Insert closed turns that are not there yet, and add them to the sums.

    Raise LedgerRefused for a value that the database can't hold, and SampleData if it holds sample
    data.
    """
    rows = {record.id: row_of(record) for record in reversed(records)}
    ordered = [rows[turn_id] for turn_id in sorted(rows)]
    try:
        inserted = _insert(connection, ordered)
    except (IntegrityError, OverflowError, ValueError) as error:
        raise LedgerRefused from error
    # The check comes after the insert, which waits for a command that fills the database with
    # samples.
    if watermark.has_sample_mark(connection):
        raise SampleData
    add_turns(connection, inserted)


def _insert(connection: Connection, rows: list[dict[str, Any]]) -> Sequence[str]:
    """Insert the rows that are not there yet, and return their ids.

    It is the first statement of its transaction. A batch that was inserted before is rare. So for
    SQLite the rows go in by one prepared statement, which tells only their number. Where some were
    there already the transaction begins again, with the statement that tells which were not.
    """
    if connection.dialect.name == "sqlite":
        statement = _sqlite_insert()
        done = connection.exec_driver_sql(statement.text, statement.values_of(rows))
        if done.rowcount == len(rows):
            return [row["id"] for row in rows]
        connection.rollback()
    return connection.execute(_INSERTS[connection.dialect.name], rows).scalars().all()


class _RowInsert(NamedTuple):
    """An insert of one row, and what makes a row's values those of the driver."""

    text: str
    names: list[str]
    processors: Sequence[tuple[str, Callable[[Any], Any]]]

    def values_of(self, rows: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
        ordered = itemgetter(*self.names)
        return [
            ordered({**row, **{name: process(row[name]) for name, process in self.processors}})
            for row in rows
        ]


@cache
def _sqlite_insert() -> _RowInsert:
    """SQLAlchemy would make the text of each batch anew, and SQLite parse it."""
    dialect, columns = sqlite.dialect(), TurnRow.__table__.columns
    compiled = sqlite.insert(TurnRow).on_conflict_do_nothing().compile(dialect=dialect)
    found = {
        column.name: column.type.dialect_impl(dialect).bind_processor(dialect) for column in columns
    }
    processors = [(name, process) for name, process in found.items() if process is not None]
    return _RowInsert(str(compiled), list(compiled.positiontup or ()), processors)


_RENAMED = {
    "workspace_id": "workspace",
    "cost_nano": "cost",
    "cost_without_cache_nano": "cost_without_cache",
}
_FIELDS = [
    (column.name, attrgetter(_RENAMED.get(column.name, column.name)))
    for column in TurnRow.__table__.columns
    if column.name != "opened_ms"
]


def row_of(record: TurnRecord) -> dict[str, Any]:
    """The columns of a turn: the fields of its record, some under another name."""
    row: dict[str, Any] = {name: field(record) for name, field in _FIELDS}
    row["opened_ms"] = int(record.opened_at.timestamp() * 1000)
    return row
