"""Which model each id belongs to, for all gateways of one database. `routing/model_ids.py` has the
rule."""

from collections.abc import Iterable

import msgspec
from sqlalchemy import delete, select, update
from sqlalchemy.dialects import postgresql, sqlite

from engine.protocol.reports import ModelIdentity
from gateway.ledger.database import Ledger
from gateway.ledger.schema import ModelIdRow
from gateway.structs.fleet import OwnedId

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ModelIdentity).decode


class ModelIdsTable:
    """The table of model ids. Every call raises the errors of `Ledger.transaction`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def all(self) -> dict[str, OwnedId]:
        rows = await self._ledger.rows(select(ModelIdRow.__table__).order_by(ModelIdRow.id))
        return {
            row.id: OwnedId(
                id=row.id,
                engine_model=row.engine_model,
                identity=_decode(row.identity),
                since=row.since,
            )
            for row in rows
        }

    async def add(self, owned: Iterable[OwnedId]) -> None:
        """Add these ids. An id that is there already keeps its model."""
        rows = [_row(entry) for entry in owned]
        if rows:
            insert_into = postgresql.insert if self._ledger.is_postgres else sqlite.insert
            await self._ledger.run(insert_into(ModelIdRow).on_conflict_do_nothing(), rows)

    async def learn(self, before: OwnedId, after: OwnedId) -> None:
        """Replace `before` by `after`, unless the row has changed meanwhile."""
        expected = _row(before)
        statement = update(ModelIdRow).where(
            ModelIdRow.id == before.id,
            ModelIdRow.engine_model == expected["engine_model"],
            ModelIdRow.identity == expected["identity"],
        )
        await self._ledger.run(statement.values(_row(after)))

    async def replace(self, ids: Iterable[str], owned: Iterable[OwnedId]) -> None:
        """Delete `ids` and put `owned` in their place, in one transaction."""
        rows = [_row(entry) for entry in owned]
        replaced = {*ids, *(str(row["id"]) for row in rows)}
        insert_into = postgresql.insert if self._ledger.is_postgres else sqlite.insert
        async with self._ledger.transaction() as connection:
            await connection.execute(delete(ModelIdRow).where(ModelIdRow.id.in_(replaced)))
            # Another gateway may add one of these ids between the two statements.
            for row in rows:
                statement = insert_into(ModelIdRow).values(row)
                columns = {name: value for name, value in row.items() if name != "id"}
                await connection.execute(
                    statement.on_conflict_do_update(index_elements=["id"], set_=columns)
                )


def _row(entry: OwnedId) -> dict[str, object]:
    return {
        "id": entry.id,
        "engine_model": entry.engine_model,
        "identity": _encode(entry.identity).decode(),
        "since": entry.since,
    }
