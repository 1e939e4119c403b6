"""Purges that engines still have to do, for all gateways of one database.
`routing/pending_purges.py` has the rule."""

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite

from gateway.ledger.database import Ledger
from gateway.ledger.schema import PendingPurgeRow
from gateway.structs.fleet import PendingPurge


class PendingPurgesTable:
    """The table of pending purges. Every call raises the errors of `Ledger.transaction`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def all(self) -> list[PendingPurge]:
        table = PendingPurgeRow
        query = select(table.__table__).order_by(table.asked_ms, table.engine, table.scope)
        return [
            PendingPurge(
                engine=row.engine,
                scope=row.scope or None,
                workspace=row.workspace_id or None,
                asked_ms=row.asked_ms,
            )
            for row in await self._ledger.rows(query)
        ]

    async def add(self, purge: PendingPurge) -> None:
        """Add a purge. If the engine has a purge of the scope already, it is asked for anew."""
        insert_into = postgresql.insert if self._ledger.is_postgres else sqlite.insert
        row = {
            "engine": purge.engine,
            "scope": purge.scope or "",
            "workspace_id": purge.workspace or "",
            "asked_ms": purge.asked_ms,
        }
        statement = insert_into(PendingPurgeRow).on_conflict_do_update(
            index_elements=["engine", "scope"], set_={"asked_ms": purge.asked_ms}
        )
        await self._ledger.run(statement, [row])

    async def remove(self, purge: PendingPurge) -> None:
        """Remove a purge, unless it was asked for anew meanwhile."""
        statement = delete(PendingPurgeRow).where(
            PendingPurgeRow.engine == purge.engine,
            PendingPurgeRow.scope == (purge.scope or ""),
            PendingPurgeRow.asked_ms == purge.asked_ms,
        )
        await self._ledger.run(statement)
