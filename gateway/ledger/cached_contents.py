"""Cached contents in the ledger's database: prompts that clients named, until they expire."""

from collections.abc import Collection
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import bindparam, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.base.errors import NotFound, RateLimited
from gateway.ledger import identity
from gateway.ledger.database import Ledger
from gateway.ledger.schema import CachedContentRow

_MOST_EXPIRED = 100


class CachedContent(msgspec.Struct, frozen=True, kw_only=True):
    """One row without its body; the fields are those of `CachedContentRow`."""

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
# Every gateway asks this each second, and most have no content. So it is made once.
_EXPIRED = (
    select(*_COLUMNS)
    .where(CachedContentRow.expires_at <= bindparam("now"))
    .order_by(CachedContentRow.expires_at)
    .limit(_MOST_EXPIRED)
)


class CachedContents:
    """`most` rows and `most_bytes` of prompts are kept for each workspace."""

    def __init__(self, ledger: Ledger, most: int, most_bytes: int) -> None:
        self._ledger = ledger
        self._most = most
        self._most_bytes = most_bytes

    async def check_room(self, workspace: str, num_bytes: int, now: datetime) -> None:
        """Raise RateLimited where the workspace has no room for another."""
        async with self._ledger.transaction() as connection:
            await self._check_room(connection, workspace, num_bytes, now)

    async def create(self, content: CachedContent, body: bytes) -> None:
        """Raise RateLimited where there is no room."""
        async with self._ledger.transaction() as connection:
            # The first statement takes the lock, so that no two count the same room.
            await identity.count_change(connection)
            created = content.created_at
            await self._check_room(connection, content.workspace_id, content.num_bytes, created)
            row = {**msgspec.structs.asdict(content), "body": body}
            await connection.execute(insert(CachedContentRow).values(row))

    async def get(self, workspace: str, content_id: str, now: datetime) -> CachedContent:
        """Raise NotFound for one that is not there, expired, or another workspace's."""
        async with self._ledger.transaction() as connection:
            return _content_of(await _row(connection, _COLUMNS, workspace, content_id, now))

    async def with_body(
        self, workspace: str, content_id: str, now: datetime
    ) -> tuple[CachedContent, bytes]:
        """As `get`, with the compressed body."""
        columns = [*_COLUMNS, CachedContentRow.body]
        async with self._ledger.transaction() as connection:
            row = await _row(connection, columns, workspace, content_id, now)
            return _content_of(row), row.body

    async def page(
        self, workspace: str, after: str, limit: int, now: datetime
    ) -> list[CachedContent]:
        """At most `limit` live ones with ids above `after`, in the order of their ids."""
        query = (
            select(*_COLUMNS)
            .where(CachedContentRow.workspace_id == workspace)
            .where(CachedContentRow.id > after)
            .where(CachedContentRow.expires_at > now)
            .order_by(CachedContentRow.id)
            .limit(limit)
        )
        return [_content_of(row) for row in await self._ledger.rows(query)]

    async def move_expiry(
        self, content: CachedContent, expires_at: datetime, held_until: datetime, now: datetime
    ) -> None:
        statement = (
            update(CachedContentRow)
            .where(CachedContentRow.id == content.id)
            .values(expires_at=expires_at, held_until=held_until, updated_at=now)
        )
        await self._ledger.run(statement)

    async def expired(self, now: datetime) -> list[CachedContent]:
        """Some whose time is over, the oldest first. They are still in the table."""
        rows = await self._ledger.rows(_EXPIRED, {"now": now})
        return [_content_of(row) for row in rows]

    async def remove(self, content_ids: Collection[str]) -> None:
        statement = delete(CachedContentRow).where(CachedContentRow.id.in_(content_ids))
        await self._ledger.run(statement)

    async def named(self, prefixes: Collection[str], now: datetime) -> dict[tuple[str, str], str]:
        """The live ones of these prefixes: by workspace and prefix, their ids."""
        if not prefixes:
            return {}
        query = (
            select(CachedContentRow.workspace_id, CachedContentRow.prefix, CachedContentRow.id)
            .where(CachedContentRow.expires_at > now)
            .where(CachedContentRow.prefix.in_(prefixes))
        )
        rows = await self._ledger.rows(query)
        return {(row.workspace_id, row.prefix): row.id for row in rows}

    async def _check_room(
        self, connection: AsyncConnection, workspace: str, num_bytes: int, now: datetime
    ) -> None:
        query = (
            select(func.count(), func.coalesce(func.sum(CachedContentRow.num_bytes), 0))
            .where(CachedContentRow.workspace_id == workspace)
            .where(CachedContentRow.expires_at > now)
        )
        count, total = (await connection.execute(query)).one()
        if count >= self._most:
            raise RateLimited("cached contents", self._most)
        if total + num_bytes > self._most_bytes:
            raise RateLimited("bytes of cached contents", self._most_bytes)


async def _row(
    connection: AsyncConnection, columns: list[Any], workspace: str, content_id: str, now: datetime
) -> Any:
    # PostgreSQL refuses NUL in a text, and no id contains it.
    query = (
        select(*columns)
        .where(CachedContentRow.id == content_id.replace("\0", "?"))
        .where(CachedContentRow.workspace_id == workspace)
        .where(CachedContentRow.expires_at > now)
    )
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFound(f"cachedContent: no cached content `{content_id[:64]}`")
    return row


def _content_of(row: Any) -> CachedContent:
    names = CachedContent.__struct_fields__
    return CachedContent(**{name: row._mapping[name] for name in names})
