"""Prompts and answers of workspaces that keep them, encrypted, for as many days as each says.

A workspace's key is derived from the master secret. A body is bound to its turn: in another one's
place it can't be read. What counts is how many days the workspace says now, not what it said when
the turn came; one that says none has nothing.
"""

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import SecretStr
from sqlalchemy import delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from gateway.base.errors import NotFound
from gateway.ledger.database import Ledger
from gateway.ledger.schema import TurnContentRow, WorkspaceRow

DAY_MS = 86_400_000
_NONCE_BYTES = 12
_AT_ONCE = 200


class Contents:
    def __init__(self, ledger: Ledger, master: SecretStr) -> None:
        self._ledger = ledger
        self._master = master

    def sealed(self, workspace: str, turn_id: str, plain: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher(workspace).encrypt(nonce, plain, turn_id.encode())

    def opened(self, workspace: str, turn_id: str, body: bytes) -> bytes:
        """Raise NotFound for a body of another turn or another master secret."""
        nonce, rest = body[:_NONCE_BYTES], body[_NONCE_BYTES:]
        try:
            return self._cipher(workspace).decrypt(nonce, rest, turn_id.encode())
        except InvalidTag:
            raise NotFound("content: it was kept with another master secret") from None

    async def put(self, workspace: str, turn_id: str, at_ms: int, body: bytes) -> None:
        """Keep a sealed body. A turn has one: a second one changes nothing."""
        made = postgresql.insert if self._ledger.is_postgres else sqlite.insert
        row = {"turn_id": turn_id, "workspace_id": workspace, "at_ms": at_ms, "body": body}
        await self._ledger.run(made(TurnContentRow).values(row).on_conflict_do_nothing())

    async def get(self, workspace: str, turn_id: str, now_ms: int) -> tuple[bytes, int]:
        """The sealed body, and when its time is over. Raise NotFound where there is none."""
        until_ms = TurnContentRow.at_ms + WorkspaceRow.keep_days * DAY_MS
        query = (
            select(TurnContentRow.body, until_ms.label("until_ms"))
            .join(WorkspaceRow, WorkspaceRow.id == TurnContentRow.workspace_id)
            .where(TurnContentRow.turn_id == turn_id, TurnContentRow.workspace_id == workspace)
            .where(until_ms > now_ms)
        )
        rows = await self._ledger.rows(query)
        if not rows:
            raise NotFound(f"content: nothing is kept of `{turn_id}`")
        return rows[0].body, int(rows[0].until_ms)

    async def remove(self, turn_id: str) -> None:
        await self._ledger.run(delete(TurnContentRow).where(TurnContentRow.turn_id == turn_id))

    async def forget(self, now_ms: int) -> None:
        """Delete all whose time is over. Each workspace's oldest is looked up in the index."""
        first = (
            select(func.min(TurnContentRow.at_ms))
            .where(TurnContentRow.workspace_id == WorkspaceRow.id)
            .scalar_subquery()
        )
        query = select(WorkspaceRow.id, WorkspaceRow.keep_days, first.label("first_ms"))
        for row in await self._ledger.rows(query):
            # Without days all is over.
            last_ms = now_ms if row.keep_days is None else now_ms - row.keep_days * DAY_MS
            if row.first_ms is not None and row.first_ms <= last_ms:
                await self._delete(row.id, last_ms)

    async def _delete(self, workspace: str, last_ms: int) -> None:
        """Some at a time: SQLite has one writer."""
        own = TurnContentRow.workspace_id == workspace, TurnContentRow.at_ms <= last_ms
        some = select(TurnContentRow.turn_id).where(*own).limit(_AT_ONCE)
        while True:
            async with self._ledger.transaction() as connection:
                gone = delete(TurnContentRow).where(TurnContentRow.turn_id.in_(some))
                if (await connection.execute(gone)).rowcount < _AT_ONCE:
                    return

    def _cipher(self, workspace: str) -> AESGCM:
        derived = HKDF(SHA256(), 32, None, b"holdfast kept contents: " + workspace.encode())
        return AESGCM(derived.derive(self._master.get_secret_value().encode()))
