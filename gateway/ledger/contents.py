"""Stored texts in the ledger's database: prompts and answers of turns, and responses that clients
go on with. All of it is encrypted (`sealed.py`).

A workspace says for how many days its texts are stored. Its present setting counts, not the setting
when the turn came. Without days nothing is stored.
"""

import asyncio
from collections.abc import Callable, Collection

from pydantic import SecretStr
from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway.base.errors import NotFound
from gateway.ledger.database import Ledger
from gateway.ledger.schema import KeptResponseRow, TurnContentRow, WorkspaceRow
from gateway.ledger.sealed import Cipher

DAY_MS = 86_400_000
_CONTENTS_AT_ONCE = 200


class Contents:
    """One table's bodies, by the ids of turns. A workspace that sets no days has `days`."""

    def __init__(
        self,
        ledger: Ledger,
        master: SecretStr,
        table: type[TurnContentRow | KeptResponseRow] = TurnContentRow,
        days: int | None = None,
    ) -> None:
        self._ledger = ledger
        self._master = master
        self._table = table
        self._days = days

    def sealed(self, workspace: str, turn_id: str, plain: bytes) -> bytes:
        return self._cipher(workspace).sealed(turn_id, plain)

    def opened(self, workspace: str, turn_id: str, body: bytes) -> bytes:
        """Raise NotFound for a body of another turn or another master secret."""
        return self._cipher(workspace).opened(turn_id, body)

    async def put(self, workspace: str, turn_id: str, at_ms: int, body: bytes) -> None:
        """Store a sealed body. A turn has one body: a second one changes nothing."""
        insert_into = postgresql.insert if self._ledger.is_postgres else sqlite.insert
        row = {
            self._table.turn_id: turn_id,
            self._table.workspace_id: workspace,
            self._table.at_ms: at_ms,
            self._table.body: body,
        }
        await self._ledger.run(insert_into(self._table).values(row).on_conflict_do_nothing())

    async def get(self, workspace: str, turn_id: str, now_ms: int) -> tuple[bytes, int]:
        """The sealed body, and when it expires, in Unix ms. Raise NotFound where there is none."""
        bodies = await self.find(workspace, [turn_id], now_ms)
        if not bodies:
            raise NotFound(f"content: nothing is kept of `{turn_id[:64]}`")
        return bodies[turn_id]

    async def find(
        self, workspace: str, ids: Collection[str], now_ms: int
    ) -> dict[str, tuple[bytes, int]]:
        """As `get`, for each of the ids that has a body."""
        table = self._table
        days = func.coalesce(WorkspaceRow.keep_days, self._days)
        until_ms = table.at_ms + days * DAY_MS
        query = (
            select(table.turn_id, table.body, until_ms.label("until_ms"))
            .join(WorkspaceRow, WorkspaceRow.id == table.workspace_id)
            # PostgreSQL refuses NUL in a text, and no id contains it.
            .where(table.turn_id.in_([turn_id for turn_id in ids if "\0" not in turn_id]))
            .where(table.workspace_id == workspace, until_ms > now_ms)
        )
        rows = await self._ledger.rows(query)
        return {row[0]: (row.body, int(row.until_ms)) for row in rows}

    async def num_bytes(self, workspace: str) -> int:
        """The bytes of a workspace's bodies."""
        table = self._table
        total = func.coalesce(func.sum(func.length(table.body)), 0)
        [row] = await self._ledger.rows(select(total).where(table.workspace_id == workspace))
        return int(row[0])

    async def change(
        self, workspace: str, turn_id: str, now_ms: int | None, make: Callable[[bytes], bytes]
    ) -> None:
        """Replace a sealed body by what `make` returns for it. Without a body nothing happens.

        Its days begin anew at `now_ms`; with None they go on.
        """
        table = self._table
        at_ms = table.at_ms if now_ms is None else now_ms
        of_turn = table.turn_id == turn_id, table.workspace_id == workspace
        async with self._ledger.transaction() as connection:
            # The first statement takes the lock, so that no two changes read the same body.
            await connection.execute(update(table).where(*of_turn).values(at_ms=at_ms))
            body = (
                await connection.execute(select(table.body).where(*of_turn))
            ).scalar_one_or_none()
            if body is not None:
                new_body = await asyncio.to_thread(make, body)
                await connection.execute(update(table).where(*of_turn).values(body=new_body))

    async def remove(self, ids: Collection[str]) -> None:
        await self._ledger.run(delete(self._table).where(self._table.turn_id.in_(ids)))

    async def forget(self, now_ms: int) -> None:
        """Delete all expired bodies. Each workspace's oldest is looked up in the index."""
        oldest_ms = (
            select(func.min(self._table.at_ms))
            .where(self._table.workspace_id == WorkspaceRow.id)
            .scalar_subquery()
        )
        query = select(WorkspaceRow.id, WorkspaceRow.keep_days, oldest_ms.label("oldest_ms"))
        for row in await self._ledger.rows(query):
            days = self._days if row.keep_days is None else row.keep_days
            # Without days all bodies have expired.
            last_ms = now_ms if days is None else now_ms - days * DAY_MS
            if row.oldest_ms is not None and row.oldest_ms <= last_ms:
                await self._delete(row.id, last_ms)

    async def _delete(self, workspace: str, last_ms: int) -> None:
        """Some at a time: SQLite has one writer."""
        table = self._table
        of_workspace = table.workspace_id == workspace, table.at_ms <= last_ms
        oldest = select(table.turn_id).where(*of_workspace).limit(_CONTENTS_AT_ONCE)
        while True:
            async with self._ledger.transaction() as connection:
                removal = delete(table).where(table.turn_id.in_(oldest))
                if (await connection.execute(removal)).rowcount < _CONTENTS_AT_ONCE:
                    return

    def _cipher(self, workspace: str) -> Cipher:
        return Cipher(self._master, f"holdfast kept contents: {workspace}")
