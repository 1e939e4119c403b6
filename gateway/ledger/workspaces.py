"""Workspaces: each has one cache, one bill and its limits."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.base.errors import InvalidRequest, NotFound
from gateway.base.grants import AutoCacheMode, AutoCacheTtl, Limits
from gateway.ledger import watermark
from gateway.ledger.database import Ledger
from gateway.ledger.schema import TurnRollupRow, WorkspaceRow
from gateway.ledger.sums.rollups import DAY_SECONDS

# Ids go into response headers and file names of exports.
ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)"
"""Python's `$` alone allows a line's end behind it."""
# Names are shown in tables. Control characters break their lines, invisible ones make two names
# look alike, and those of direction turn the rest of a line around.
_UNSEEN = r"\x00-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff"
NAME_PATTERN = rf"^[^{_UNSEEN}]+$(?!\n)"
IN_WORDS = {
    ID_PATTERN: "must be 1 to 64 letters, digits, `.`, `_` or `-`, and begin with a letter or"
    " digit",
    NAME_PATTERN: "must have no control characters, line ends or invisible characters",
}
MAX_DISPLAY_NAME, MAX_KEY_NAME = 128, 64
DEFAULT_WORKSPACE = "default"


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    """A null limit is no limit. Money is in nano-dollars, months are in UTC.

    `auto_cache` says what is held of requests without markers; null is the installation's setting.
    """

    id: str
    display_name: str
    created_at: datetime
    archived_at: datetime | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrency: int | None
    monthly_spend_nano: int | None
    lease_share: float | None
    auto_cache: AutoCacheMode | None = None
    auto_cache_ttl: AutoCacheTtl | None = None

    @property
    def limits(self) -> Limits:
        return Limits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_concurrency=self.max_concurrency,
            monthly_spend=self.monthly_spend_nano,
        )


class Workspaces:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def create(self, workspace: str, now: datetime, values: Mapping[str, Any]) -> Workspace:
        """`values` are columns by name.

        Raise InvalidRequest if the id is taken, or if the id or the name is not valid.
        """
        check_workspace_id(workspace)
        _check_names(values)
        async with self._ledger.transaction() as connection:
            await watermark.advance(connection)
            if await find_workspace(connection, workspace) is not None:
                raise InvalidRequest(f"id: there is a workspace `{workspace}` already")
            row = {"id": workspace, "created_at": now, **values}
            await connection.execute(insert(WorkspaceRow).values(row))
            return await _get(connection, workspace)

    async def change(self, workspace: str, values: Mapping[str, Any]) -> Workspace:
        """Set columns by name.

        Raise NotFound where there is no such workspace, InvalidRequest if its name is not valid.
        """
        _check_names(values)
        async with self._ledger.transaction() as connection:
            await watermark.advance(connection)
            await _get(connection, workspace)
            if values:
                changed = update(WorkspaceRow).where(WorkspaceRow.id == workspace)
                await connection.execute(changed.values(**values))
            return await _get(connection, workspace)

    async def archive(self, workspace: str, now: datetime) -> Workspace:
        """Its keys stop working until it is restored. Its usage stays in the ledger."""
        if workspace == DEFAULT_WORKSPACE:
            raise InvalidRequest("workspace: the default workspace can't be archived")
        return await self.change(workspace, {"archived_at": now})

    async def restore(self, workspace: str) -> Workspace:
        return await self.change(workspace, {"archived_at": None})

    async def all(self) -> list[Workspace]:
        """The oldest first."""
        query = select(WorkspaceRow.__table__).order_by(WorkspaceRow.created_at, WorkspaceRow.id)
        async with self._ledger.transaction() as connection:
            return [workspace_of(row) for row in (await connection.execute(query)).all()]

    async def get(self, workspace: str) -> Workspace:
        """Raise NotFound where there is no such workspace."""
        async with self._ledger.transaction() as connection:
            return await _get(connection, workspace)

    async def spent(self, workspaces: list[str], month: datetime) -> dict[str, int]:
        """The cost of the turns since the month's first moment, in nano-dollars.

        Turns without a price cost nothing here. The numbers come from the sums by day, since a
        month begins with a day (UTC).
        """
        query = (
            select(TurnRollupRow.workspace_id, func.sum(TurnRollupRow.cost_nano))
            .where(TurnRollupRow.workspace_id.in_(workspaces))
            .where(TurnRollupRow.width_seconds == DAY_SECONDS)
            .where(TurnRollupRow.start_ms >= int(month.timestamp() * 1000))
            .group_by(TurnRollupRow.workspace_id)
        )
        async with self._ledger.transaction() as connection:
            rows = (await connection.execute(query)).all()
        found = {str(name): int(amount or 0) for name, amount in rows}
        return {name: found.get(name, 0) for name in workspaces}


def check_workspace_id(workspace: str, field: str = "id") -> None:
    if not re.match(ID_PATTERN, workspace):
        raise InvalidRequest(f"{field}: {IN_WORDS[ID_PATTERN]}")


def check_name(field: str, name: str, most: int) -> None:
    """Raise InvalidRequest where a name for people is not valid; `most` are characters."""
    if not 1 <= len(name) <= most:
        raise InvalidRequest(f"{field}: must have 1 to {most} characters")
    if not re.match(NAME_PATTERN, name):
        raise InvalidRequest(f"{field}: {IN_WORDS[NAME_PATTERN]}")


def _check_names(values: Mapping[str, Any]) -> None:
    if "display_name" in values:
        check_name("display_name", values["display_name"], MAX_DISPLAY_NAME)


async def find_workspace(connection: AsyncConnection, workspace: str) -> Workspace | None:
    # PostgreSQL refuses NUL in a text, and no id contains it.
    if "\0" in workspace:
        return None
    query = select(WorkspaceRow.__table__).where(WorkspaceRow.id == workspace)
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else workspace_of(row)


def workspace_of(row: Any) -> Workspace:
    values = {name: row._mapping[name] for name in Workspace.__struct_fields__}
    return Workspace(**{**values, "display_name": values["display_name"] or values["id"]})


async def _get(connection: AsyncConnection, workspace: str) -> Workspace:
    found = await find_workspace(connection, workspace)
    if found is None:
        raise NotFound(f"workspace: no workspace `{workspace[:64]}`")
    return found
