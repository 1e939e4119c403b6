"""API keys: created once, stored as SHA-256, looked up by digest."""

import secrets
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.database import Ledger
from gateway.ledger.models import ApiKeyRow, WorkspaceRow

_LOOKUP_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    id: str
    workspace: str
    name: str
    digest: str
    created_at: datetime
    revoked_at: datetime | None


def digest_of(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def new_key() -> str:
    return f"hf-{secrets.token_urlsafe(32)}"


class Keys:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def create(self, key: str, workspace: str, name: str, now: datetime) -> str:
        """Store the key of a workspace, both created when absent; return the key's id."""
        digest = digest_of(key)
        async with self._ledger.transaction() as connection:
            await _ensure_workspace(connection, workspace, now)
            query = select(ApiKeyRow.id).where(ApiKeyRow.digest == digest)
            if (known := (await connection.execute(query)).scalar_one_or_none()) is not None:
                return known
            key_id = f"key_{digest[:16]}"
            values = {
                "id": key_id,
                "workspace_id": workspace,
                "name": name,
                "digest": digest,
                "created_at": now,
                "revoked_at": None,
            }
            await connection.execute(insert(ApiKeyRow).values(values))
            return key_id

    async def all(self) -> list[ApiKey]:
        return await self._select(None)

    async def active(self, limit: int) -> list[ApiKey]:
        """The newest keys that work."""
        keys = [key for key in await self._select(None) if key.revoked_at is None]
        return keys[-limit:]

    async def find(self, digest: str) -> ApiKey | None:
        found = await self._select(digest)
        return found[0] if found and found[0].revoked_at is None else None

    async def revoke(self, key_id: str, now: datetime) -> bool:
        statement = (
            update(ApiKeyRow)
            .where(ApiKeyRow.id == key_id, ApiKeyRow.revoked_at.is_(None))
            .values(revoked_at=now)
            .returning(ApiKeyRow.id)
        )
        async with self._ledger.transaction() as connection:
            return (await connection.execute(statement)).scalar_one_or_none() is not None

    async def workspaces(self) -> list[str]:
        async with self._ledger.transaction() as connection:
            return list((await connection.execute(select(WorkspaceRow.id))).scalars())

    async def _select(self, digest: str | None) -> list[ApiKey]:
        query = select(
            ApiKeyRow.id,
            ApiKeyRow.workspace_id,
            ApiKeyRow.name,
            ApiKeyRow.digest,
            ApiKeyRow.created_at,
            ApiKeyRow.revoked_at,
        ).order_by(ApiKeyRow.created_at)
        if digest is not None:
            query = query.where(ApiKeyRow.digest == digest)
        async with self._ledger.transaction(_LOOKUP_SECONDS) as connection:
            rows = (await connection.execute(query)).all()
        return [
            ApiKey(
                id=row.id,
                workspace=row.workspace_id,
                name=row.name,
                digest=row.digest,
                created_at=row.created_at,
                revoked_at=row.revoked_at,
            )
            for row in rows
        ]


async def _ensure_workspace(connection: AsyncConnection, workspace: str, now: datetime) -> None:
    query = select(WorkspaceRow.id).where(WorkspaceRow.id == workspace)
    if (await connection.execute(query)).scalar_one_or_none() is None:
        await connection.execute(insert(WorkspaceRow).values(id=workspace, created_at=now))
