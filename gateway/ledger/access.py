"""Workspaces and their API keys. A workspace has one cache, one bill and its limits.

A key is shown once, stored as SHA-256 and looked up by digest. SHA-256 is enough because a key made
here has 256 random bits, which no list of guesses can reach. Keys that an operator chooses, such as
HOLDFAST_API_KEY, must be as random.
"""

import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

from sqlalchemy import ColumnElement, bindparam, func, insert, not_, or_, select, tuple_, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.base.errors import InvalidRequest, NotFound
from gateway.ledger import identity
from gateway.ledger.database import Ledger
from gateway.ledger.rollups import DAY_SECONDS
from gateway.ledger.schema import ApiKeyRow, SharedLimitsRow, TurnRollupRow, WorkspaceRow
from gateway.structs.fleet import Key, KeyScope, Workspace

# Ids go into response headers and file names of exports.
ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)"
"""Without the look-ahead Python's `$` would allow a line's end behind the id."""
# Names are shown in tables. Control characters break a table's lines. Invisible characters make two
# names look alike. Characters of direction turn the rest of a line around.
_UNSEEN = r"\x00-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff"
NAME_PATTERN = rf"^[^{_UNSEEN}]+$(?!\n)"
IN_WORDS = {
    ID_PATTERN: "must be 1 to 64 letters, digits, `.`, `_` or `-`, and begin with a letter or"
    " digit",
    NAME_PATTERN: "must have no control characters, line ends or invisible characters",
}
MAX_DISPLAY_NAME = 128
MAX_KEY_NAME = 64
DEFAULT_WORKSPACE = "default"


class Workspaces:
    """The workspaces in the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def create(self, workspace: str, now: datetime, values: Mapping[str, Any]) -> Workspace:
        """Make a workspace with `values`, which are columns by name. Raise InvalidRequest if the id
        is taken, or if the id or the name is not valid."""
        if not re.match(ID_PATTERN, workspace):
            raise InvalidRequest(f"id: {IN_WORDS[ID_PATTERN]}")
        _check_display_name(values)
        async with _changing(self._ledger) as connection:
            if await find_workspace(connection, workspace) is not None:
                raise InvalidRequest(f"id: there is a workspace `{workspace}` already")
            row = {"id": workspace, "created_at": now, **values}
            await connection.execute(insert(WorkspaceRow).values(row))
            return await _get(connection, workspace)

    async def change(self, workspace: str, values: Mapping[str, Any]) -> Workspace:
        """Set columns by name. Raise NotFound where there is no such workspace, InvalidRequest if
        its name is not valid."""
        _check_display_name(values)
        async with _changing(self._ledger) as connection:
            await _get(connection, workspace)
            if values:
                change = update(WorkspaceRow).where(WorkspaceRow.id == workspace)
                await connection.execute(change.values(**values))
            return await _get(connection, workspace)

    async def archive(self, workspace: str, now: datetime) -> Workspace:
        """Stop its keys from working until it is restored. Its usage stays in the ledger."""
        if workspace == DEFAULT_WORKSPACE:
            raise InvalidRequest("workspace: the default workspace can't be archived")
        return await self.change(workspace, {"archived_at": now})

    async def restore(self, workspace: str) -> Workspace:
        return await self.change(workspace, {"archived_at": None})

    async def all(self) -> list[Workspace]:
        """All workspaces, the oldest first."""
        query = select(WorkspaceRow.__table__).order_by(WorkspaceRow.created_at, WorkspaceRow.id)
        return [_workspace(row) for row in await self._ledger.rows(query)]

    async def get(self, workspace: str) -> Workspace:
        """Raise NotFound where there is no such workspace."""
        async with self._ledger.transaction() as connection:
            return await _get(connection, workspace)

    async def spent(self, workspaces: list[str], month: datetime) -> dict[str, int]:
        """The cost of the turns since the month's first moment (UTC), in nano-dollars, from the
        sums by day. Turns without a price cost nothing here."""
        row = TurnRollupRow
        of_month = row.workspace_id.in_(workspaces), row.start_ms >= int(month.timestamp() * 1000)
        query = select(row.workspace_id, func.sum(row.cost_nano)).group_by(row.workspace_id)
        query = query.where(*of_month, row.by_engine == 0, row.width_seconds == DAY_SECONDS)
        spent = {name: int(amount or 0) for name, amount in await self._ledger.rows(query)}
        return {name: spent.get(name, 0) for name in workspaces}


def _check_display_name(values: Mapping[str, Any]) -> None:
    if "display_name" in values:
        check_name("display_name", values["display_name"], MAX_DISPLAY_NAME)


def check_name(field: str, name: str, max_characters: int) -> None:
    """Raise InvalidRequest where a name that people read is not valid."""
    if not 1 <= len(name) <= max_characters:
        raise InvalidRequest(f"{field}: must have 1 to {max_characters} characters")
    if not re.match(NAME_PATTERN, name):
        raise InvalidRequest(f"{field}: {IN_WORDS[NAME_PATTERN]}")


@asynccontextmanager
async def _changing(ledger: Ledger) -> AsyncIterator[AsyncConnection]:
    """A transaction that changes workspaces or keys."""
    async with ledger.transaction() as connection:
        await identity.count_change(connection)
        yield connection


async def find_workspace(connection: AsyncConnection, workspace: str) -> Workspace | None:
    # PostgreSQL refuses NUL in a text, and no id contains it.
    query = select(WorkspaceRow.__table__).where(WorkspaceRow.id == workspace.replace("\0", "?"))
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else _workspace(row)


def _workspace(row: Any) -> Workspace:
    values = {name: row._mapping[name] for name in Workspace.__struct_fields__}
    return Workspace(**{**values, "display_name": values["display_name"] or values["id"]})


async def _get(connection: AsyncConnection, workspace: str) -> Workspace:
    workspace_row = await find_workspace(connection, workspace)
    if workspace_row is None:
        raise NotFound(f"workspace: no workspace `{workspace[:64]}`")
    return workspace_row


LOOKUP_SECONDS = 1.0
AUTO_CACHE = ("auto_cache", "auto_cache_ttl")
_PAGE = 500


class ApiKey(Key, frozen=True, kw_only=True):
    """A key with its digest, which no page shows."""

    digest: str

    def works(self, now: datetime) -> bool:
        """Whether it is neither revoked nor expired."""
        is_expired = self.expires_at is not None and self.expires_at <= now
        return self.revoked_at is None and not is_expired


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """Who may ask, as of one version of the keys and workspaces."""

    # See `Keys.version`.
    version: int
    # Whether the database holds sample data.
    is_sample: bool
    # The newest keys that work.
    keys: list[ApiKey]
    # All workspaces, by their ids.
    workspaces: dict[str, Workspace]
    # Those of the digests that were asked about whose keys have ended.
    has_ended: frozenset[str]


def digest_of(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def new_key() -> str:
    return f"hf-{secrets.token_urlsafe(32)}"


class Keys:
    """The keys in the ledger. A change that could not be made raises LedgerUnavailable."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def create(
        self,
        key: str,
        workspace: str,
        name: str,
        now: datetime,
        *,
        scope: KeyScope = "inference",
        expires_at: datetime | None = None,
    ) -> str:
        """Store a key of a workspace; return the key's id. A missing workspace is made. A key that
        is stored already stays as it is.

        Raise InvalidRequest where the workspace's id or the name is not valid.
        """
        check_name("name", name, MAX_KEY_NAME)
        async with _changing(self._ledger) as connection:
            if await find_workspace(connection, workspace) is None:
                if not re.match(ID_PATTERN, workspace):
                    raise InvalidRequest(f"workspace: {IN_WORDS[ID_PATTERN]}")
                insertion = insert(WorkspaceRow).values(id=workspace, created_at=now)
                await connection.execute(insertion)
            stored = _first(await _select(connection, ApiKeyRow.digest == digest_of(key)))
            if stored is not None:
                return stored.id
            values = {"workspace_id": workspace, "name": name, "scope": scope}
            return await _insert(connection, key, created_at=now, expires_at=expires_at, **values)

    async def rotate(
        self, key_id: str, key: str, now: datetime, grace_seconds: float | None
    ) -> ApiKey:
        """Store `key` as the successor of a working key, with the same expiry. The old key ends
        after the grace, or with None when it is revoked.

        Raise NotFound where no such key works, and InvalidRequest where it was replaced already.
        """
        async with _changing(self._ledger) as connection:
            old = _first(await _select(connection, ApiKeyRow.id == key_id))
            if old is None or not old.works(now):
                raise NotFound(f"key: no active key `{key_id}`")
            successor = _first(await _select(connection, ApiKeyRow.replaces == key_id))
            if successor is not None:
                raise InvalidRequest(f"key: `{key_id}` was already replaced by `{successor.id}`")
            names = ("name", "scope", "expires_at", *AUTO_CACHE)
            values = {name: getattr(old, name) for name in names}
            values |= {"workspace_id": old.workspace, "created_at": now, "replaces": key_id}
            new_id = await _insert(connection, key, **values)
            if grace_seconds is not None:
                end = now + timedelta(seconds=grace_seconds)
                end = end if old.expires_at is None else min(end, old.expires_at)
                change = update(ApiKeyRow).where(ApiKeyRow.id == key_id)
                await connection.execute(change.values(expires_at=end))
            (row,) = await _select(connection, ApiKeyRow.id == new_id)
            return row

    async def revoke(self, key_id: str, now: datetime) -> bool:
        """End a key for good. False if no key of that id was active."""
        active = ApiKeyRow.id == key_id, ApiKeyRow.revoked_at.is_(None)
        revocation = update(ApiKeyRow).where(*active).values(revoked_at=now)
        async with _changing(self._ledger) as connection:
            return (await connection.execute(revocation)).rowcount > 0

    async def change(self, key_id: str, values: Mapping[str, Any]) -> ApiKey:
        """Set columns by name. Raise NotFound where there is no such key."""
        async with _changing(self._ledger) as connection:
            if values:
                change = update(ApiKeyRow).where(ApiKeyRow.id == key_id)
                await connection.execute(change.values(**values))
            key = _first(await _select(connection, ApiKeyRow.id == key_id))
            if key is None:
                raise NotFound(f"key: no key `{key_id[:64]}`")
            return key

    async def all(self, workspace: str | None = None) -> list[ApiKey]:
        """All keys, the oldest first. With a `workspace` only its keys."""
        condition = None if workspace is None else ApiKeyRow.workspace_id == workspace
        async with self._ledger.transaction() as connection:
            return await _select(connection, condition)

    async def find(self, digest: str, now: datetime) -> tuple[ApiKey, Workspace] | None:
        """The key of this digest and its workspace. None where the key does not work."""
        async with self._ledger.transaction(LOOKUP_SECONDS) as connection:
            key = _first(await _select(connection, ApiKeyRow.digest == digest))
            if key is None or not key.works(now):
                return None
            workspace = await find_workspace(connection, key.workspace)
        return None if workspace is None or workspace.archived_at else (key, workspace)

    async def version(self) -> int:
        """A number that grows with every change of keys and workspaces."""
        async with self._ledger.transaction(LOOKUP_SECONDS) as connection:
            return await identity.num_changes(connection)

    async def directory(self, limit: int, now: datetime, digests_asked: list[str]) -> Directory:
        """The `limit` newest keys that work, of workspaces that are not archived. All is of one
        moment. Keys are read by pages, and the event loop runs between two of them."""
        async with self._ledger.snapshot() as connection:
            version = await identity.num_changes(connection)
            is_sample = await identity.is_sample(connection)
            rows = (await connection.execute(select(WorkspaceRow.__table__))).all()
            workspaces = {row.id: _workspace(row) for row in rows}
            newest = (ApiKeyRow.created_at, ApiKeyRow.id)
            query = (
                select(ApiKeyRow.__table__)
                .join(WorkspaceRow, WorkspaceRow.id == ApiKeyRow.workspace_id)
                .where(_works(now), WorkspaceRow.archived_at.is_(None))
                .order_by(*(column.desc() for column in newest))
            )
            keys: list[ApiKey] = []
            page = query
            while len(keys) < limit:
                page_rows = await connection.execute(page.limit(min(_PAGE, limit - len(keys))))
                page_keys = [_key(row) for row in page_rows.mappings()]
                keys += page_keys
                if len(page_keys) < _PAGE:
                    break
                page = query.where(
                    tuple_(*newest) < tuple_(page_keys[-1].created_at, page_keys[-1].id)
                )

            ended = select(ApiKeyRow.digest).where(
                ApiKeyRow.digest.in_(digests_asked), not_(_works(now))
            )
            has_ended = frozenset(
                (await connection.execute(ended)).scalars() if digests_asked else ()
            )
        return Directory(
            version=version,
            is_sample=is_sample,
            keys=keys,
            workspaces=workspaces,
            has_ended=has_ended,
        )

    async def touch(self, used: Mapping[str, datetime]) -> None:
        """Note when keys were last used. A later time from another gateway stays."""
        if not used:
            return
        last_used_at = ApiKeyRow.last_used_at
        is_older = or_(last_used_at.is_(None), last_used_at < bindparam("used"))
        statement = (
            update(ApiKeyRow.__table__)  # type: ignore[arg-type]
            .where(ApiKeyRow.id == bindparam("key"), is_older)
            .values(last_used_at=bindparam("used"))
        )
        rows = [{"key": key_id, "used": moment} for key_id, moment in used.items()]
        await self._ledger.run(statement, rows)

    async def workspaces(self) -> list[str]:
        return [row.id for row in await self._ledger.rows(select(WorkspaceRow.id))]


async def _insert(connection: AsyncConnection, key: str, **values: Any) -> str:
    """Store a new key, and return its id. `values` are the other columns."""
    digest = digest_of(key)
    key_id = f"key_{digest[:16]}"
    await connection.execute(insert(ApiKeyRow).values(id=key_id, digest=digest, **values))
    return key_id


def _works(now: datetime) -> ColumnElement[bool]:
    """`ApiKey.works`, in SQL."""
    expires = ApiKeyRow.expires_at
    return ApiKeyRow.revoked_at.is_(None) & or_(expires.is_(None), expires > now)


async def _select(
    connection: AsyncConnection, condition: ColumnElement[bool] | None
) -> list[ApiKey]:
    query = select(ApiKeyRow.__table__).order_by(ApiKeyRow.created_at, ApiKeyRow.id)
    if condition is not None:
        query = query.where(condition)
    return [_key(row) for row in (await connection.execute(query)).mappings()]


def _key(row: Mapping[Any, Any]) -> ApiKey:
    names = [name for name in ApiKey.__struct_fields__ if name != "workspace"]
    return ApiKey(**{name: row[name] for name in names}, workspace=row["workspace_id"])


def _first(keys: list[ApiKey]) -> ApiKey | None:
    return keys[0] if keys else None


_SECONDS = 1.0
# A gateway that freezes in an exchange holds its locks for two seconds at most.
_FROZEN = select(func.set_config("idle_in_transaction_session_timeout", "2000", True))
_ROW = SharedLimitsRow.__table__
_CHANGE = (
    update(SharedLimitsRow)
    .where(SharedLimitsRow.workspace_id == bindparam("name"))
    .values(state=bindparam("text"))
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The states of some workspaces, locked. What `states` has at the end is written."""

    # The database's clock, which all gateways read, in Unix seconds.
    now: float
    # By the workspace's id.
    states: dict[str, str]


class SharedLimitsTable:
    """What gateways tell each other of limits. It is on PostgreSQL: SQLite serves one gateway."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @asynccontextmanager
    async def exchange(self, workspaces: Sequence[str]) -> AsyncIterator[Exchange]:
        """Lock the rows of these workspaces, in the order of their ids, so that gateways never wait
        in a circle. Raise the errors of `Ledger.transaction`, after a second at the latest."""
        async with self._ledger.transaction(_SECONDS) as connection:
            await connection.execute(_FROZEN)
            if workspaces:
                new = [{"workspace_id": name, "state": ""} for name in workspaces]
                await connection.execute(
                    postgresql.insert(SharedLimitsRow).on_conflict_do_nothing(), new
                )
            query = select(_ROW).where(_ROW.c.workspace_id.in_(workspaces))
            query = query.order_by(_ROW.c.workspace_id).with_for_update()
            locked_rows = (await connection.execute(query)).all()
            now = await connection.scalar(select(func.extract("epoch", func.clock_timestamp())))
            exchange = Exchange(float(now or 0), {name: state for name, state in locked_rows})
            yield exchange
            if exchange.states:
                rows = [{"name": name, "text": text} for name, text in exchange.states.items()]
                await connection.execute(_CHANGE, rows)
