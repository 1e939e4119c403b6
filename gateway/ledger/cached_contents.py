"""Gemini's cached contents in the ledger's database: leases with a name and an expiry of their own.

Their prompts are encrypted (`sealed.py`).
"""

import asyncio
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import msgspec
from pydantic import SecretStr
from sqlalchemy import bindparam, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.base.errors import NotFound, RateLimited
from gateway.ledger import identity
from gateway.ledger.database import Ledger, struct_of
from gateway.ledger.schema import CachedContentRow
from gateway.ledger.sealed import Texts

_MAX_EXPIRED = 100


class CachedContent(msgspec.Struct, frozen=True, kw_only=True):
    """One content without its body. The fields are those of `CachedContentRow`."""

    id: str
    workspace_id: str
    model: str
    display_name: str
    num_bytes: int
    num_tokens: int
    prefix: str
    created_at: datetime
    updated_at: datetime
    expires_at: datetime
    held_until: datetime


_COLUMNS = [getattr(CachedContentRow, name) for name in CachedContent.__struct_fields__]
# Every gateway asks this each second, and most have no content. So the statement is made once.
_EXPIRED = (
    select(*_COLUMNS)
    .where(CachedContentRow.expires_at <= bindparam("now"))
    .order_by(CachedContentRow.expires_at)
    .limit(_MAX_EXPIRED)
)


class CachedContents:
    """The cached contents of all workspaces: at most `max_contents` of each, with at most
    `max_bytes` of prompts together."""

    def __init__(
        self, ledger: Ledger, master: SecretStr, max_contents: int, max_bytes: int
    ) -> None:
        self._ledger = ledger
        self._texts = Texts(master)
        self._max_contents = max_contents
        self._max_bytes = max_bytes

    async def check_room(self, workspace: str, num_bytes: int, now: datetime) -> None:
        """Raise RateLimited where the workspace has no room for another."""
        async with self._ledger.transaction() as connection:
            await self._check_room(connection, workspace, num_bytes, now)

    async def create(self, content: CachedContent, body: bytes) -> None:
        """Raise RateLimited where there is no room."""
        sealed = await asyncio.to_thread(
            self._texts.sealed_content, content.workspace_id, content.id, body
        )
        async with self._ledger.transaction() as connection:
            # The first statement takes the lock, so that no two count the same room.
            await identity.count_change(connection)
            created = content.created_at
            await self._check_room(connection, content.workspace_id, content.num_bytes, created)
            row = {**msgspec.structs.asdict(content), "body": sealed}
            await connection.execute(insert(CachedContentRow).values(row))

    async def get(self, workspace: str, content_id: str, now: datetime) -> CachedContent:
        """Raise NotFound for a content that is missing, expired, or another workspace's."""
        return struct_of(CachedContent, await self._row(_COLUMNS, workspace, content_id, now))

    async def with_body(
        self, workspace: str, content_id: str, now: datetime
    ) -> tuple[CachedContent, bytes]:
        """As `get`, with the compressed body."""
        row = await self._row([*_COLUMNS, CachedContentRow.body], workspace, content_id, now)
        body = await asyncio.to_thread(self._texts.opened_content, workspace, row.id, row.body)
        return struct_of(CachedContent, row), body

    async def _row(
        self, columns: Sequence[Any], workspace: str, content_id: str, now: datetime
    ) -> Any:
        # PostgreSQL refuses NUL in a text, and no id contains it.
        query = select(*columns).where(
            CachedContentRow.id == content_id.replace("\0", "?"),
            CachedContentRow.workspace_id == workspace,
            CachedContentRow.expires_at > now,
        )
        for row in await self._ledger.rows(query):
            return row
        raise NotFound(f"cachedContent: no cached content `{content_id[:64]}`")

    async def page(
        self, workspace: str, after: str, limit: int, now: datetime
    ) -> list[CachedContent]:
        """At most `limit` live contents with ids above `after`, in the order of their ids."""
        row = CachedContentRow
        live = row.workspace_id == workspace, row.id > after, row.expires_at > now
        query = select(*_COLUMNS).where(*live).order_by(row.id).limit(limit)
        return [struct_of(CachedContent, row) for row in await self._ledger.rows(query)]

    async def move_expiry(
        self, content: CachedContent, expires_at: datetime, held_until: datetime, now: datetime
    ) -> None:
        change = update(CachedContentRow).where(CachedContentRow.id == content.id)
        times = {"expires_at": expires_at, "held_until": held_until, "updated_at": now}
        await self._ledger.run(change.values(times))

    async def expired(self, now: datetime) -> list[CachedContent]:
        """At most 100 expired contents, the oldest first. They are still in the table."""
        return [
            struct_of(CachedContent, row) for row in await self._ledger.rows(_EXPIRED, {"now": now})
        ]

    async def remove(self, content_ids: Collection[str]) -> None:
        removal = delete(CachedContentRow).where(CachedContentRow.id.in_(content_ids))
        await self._ledger.run(removal)

    async def named(self, prefixes: Collection[str], now: datetime) -> dict[tuple[str, str], str]:
        """The ids of live contents with these prefixes, by workspace and prefix."""
        if not prefixes:
            return {}
        row = CachedContentRow
        live = row.expires_at > now, row.prefix.in_(prefixes)
        rows = await self._ledger.rows(select(row.workspace_id, row.prefix, row.id).where(*live))
        return {(workspace, prefix): content_id for workspace, prefix, content_id in rows}

    async def _check_room(
        self, connection: AsyncConnection, workspace: str, num_bytes: int, now: datetime
    ) -> None:
        query = select(func.count(), func.coalesce(func.sum(CachedContentRow.num_bytes), 0)).where(
            CachedContentRow.workspace_id == workspace, CachedContentRow.expires_at > now
        )
        count, total = (await connection.execute(query)).one()
        if count >= self._max_contents:
            raise RateLimited("cached contents", self._max_contents)
        if total + num_bytes > self._max_bytes:
            raise RateLimited("bytes of cached contents", self._max_bytes)
