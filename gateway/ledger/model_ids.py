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
    """Every call raises the errors of `Ledger.transaction`."""

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
        """Add these ids. One that is there keeps its model."""
        rows = [_row(entry) for entry in owned]
        if rows:
            insert_into = postgresql.insert if self._ledger.is_postgres else sqlite.insert
            await self._ledger.run(insert_into(ModelIdRow).on_conflict_do_nothing(), rows)

    async def learn(self, before: OwnedId, after: OwnedId) -> None:
        """Take `after` in the place of `before`, unless the id has changed meanwhile."""
        known = _row(before)
        statement = update(ModelIdRow).where(
            ModelIdRow.id == before.id,
            ModelIdRow.engine_model == known["engine_model"],
            ModelIdRow.identity == known["identity"],
        )
        await self._ledger.run(statement.values(_row(after)))

    async def replace(self, ids: Iterable[str], owned: Iterable[OwnedId]) -> None:
        """Forget these ids, and add those, in one transaction."""
        rows = [_row(entry) for entry in owned]
        gone = {*ids, *(str(row["id"]) for row in rows)}
        insert_into = postgresql.insert if self._ledger.is_postgres else sqlite.insert
        async with self._ledger.transaction() as connection:
            await connection.execute(delete(ModelIdRow).where(ModelIdRow.id.in_(gone)))
            # Another gateway may add one of them between the two.
            for row in rows:
                statement = insert_into(ModelIdRow).values(row)
                changed = {name: value for name, value in row.items() if name != "id"}
                await connection.execute(
                    statement.on_conflict_do_update(index_elements=["id"], set_=changed)
                )


def _row(entry: OwnedId) -> dict[str, object]:
    return {
        "id": entry.id,
        "engine_model": entry.engine_model,
        "identity": _encode(entry.identity).decode(),
        "since": entry.since,
    }
