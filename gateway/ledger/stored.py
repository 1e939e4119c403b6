"""What clients keep in the ledger's database: batches of messages, cached contents, and what was
asked and answered: prompts and answers, and responses that clients go on with.

All texts are encrypted (`sealed.py`). The last are kept for as many days as their workspace says.
What counts is how many days the workspace says now, not what it said when the turn came; one that
says none has nothing.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from pydantic import SecretStr
from sqlalchemy import and_, bindparam, delete, func, insert, not_, or_, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.base.errors import InvalidRequest, NotFound, RateLimited
from gateway.ledger import identity
from gateway.ledger.database import Ledger
from gateway.ledger.schema import (
    BatchItemRow,
    BatchRow,
    CachedContentRow,
    KeptResponseRow,
    TurnContentRow,
    WorkspaceRow,
)
from gateway.ledger.sealed import Cipher, Texts

PENDING = "pending"
_LONG_SECONDS = 60.0
Stored = TypeVar("Stored", bound=msgspec.Struct)
_ROWS = 200


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The fields are those of `BatchRow`."""

    id: str
    workspace_id: str
    key_id: str
    version: str
    status: str
    num_bytes: int
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None = None
    cancel_initiated_at: datetime | None = None


class BatchItem(msgspec.Struct, frozen=True, kw_only=True):
    """The fields are those of `BatchItemRow`, but for the batch's id."""

    position: int
    custom_id: str
    rank: int
    prefix: str
    params: bytes


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How one row ended: the type of its result, and the result as compressed JSON."""

    position: int
    status: str
    result: bytes


_BATCH = [getattr(BatchRow, name) for name in Batch.__struct_fields__]
_ITEM = [getattr(BatchItemRow, name) for name in BatchItem.__struct_fields__]
_RUNS = BatchRow.status.in_(("in_progress", "canceling"))
# Every gateway asks this twice a second, and most have no batch. So it is made once.
_ANY_THAT_RUNS = select(BatchRow.id).where(_RUNS).limit(1)


class Batches:
    """A workspace has at most `most_running` batches that have not ended. The rows of its batches
    that are not deleted have at most `most_bytes` together."""

    def __init__(
        self, ledger: Ledger, master: SecretStr, *, most_running: int, most_bytes: int
    ) -> None:
        self._ledger = ledger
        self._texts = Texts(master)
        self._most_running = most_running
        self._most_bytes = most_bytes

    async def create(self, batch: Batch, items: Sequence[BatchItem]) -> None:
        """Raise RateLimited where the workspace has no room for it."""
        async with self._ledger.transaction(_LONG_SECONDS) as connection:
            # The first statement takes the lock, so that no two count the same room.
            await identity.count_change(connection)
            await self._check_room(connection, batch)
            row = {**msgspec.structs.asdict(batch), "owner": "", "owned_until": batch.created_at}
            await connection.execute(insert(BatchRow).values(row))
            for start in range(0, len(items), _ROWS):
                some = items[start : start + _ROWS]
                rows = await asyncio.to_thread(self._sealed_rows, batch.id, some)
                await connection.execute(insert(BatchItemRow), rows)

    def _sealed_rows(self, batch_id: str, items: Sequence[BatchItem]) -> list[dict[str, Any]]:
        texts = self._texts.batch(batch_id)
        fields = {"batch_id": batch_id, "status": PENDING}
        return [
            {
                **msgspec.structs.asdict(item),
                **fields,
                "params": texts.sealed_params(item.position, item.params),
            }
            for item in items
        ]

    async def get(self, workspace: str, batch_id: str) -> Batch:
        """Raise NotFound for one that is not there, or another workspace's."""
        async with self._ledger.transaction() as connection:
            return await _get(connection, workspace, batch_id)

    async def page(
        self, workspace: str, limit: int, *, after: Batch | None, before: Batch | None
    ) -> list[Batch]:
        """At most `limit`, the newest first: older than `after`, or newer than `before`."""
        place = BatchRow.created_at, BatchRow.id
        query = select(*_BATCH).where(BatchRow.workspace_id == workspace).limit(limit)
        if before is not None:
            query = query.where(tuple_(*place) > tuple_(before.created_at, before.id))
            query = query.order_by(*place)
        else:
            if after is not None:
                query = query.where(tuple_(*place) < tuple_(after.created_at, after.id))
            query = query.order_by(*(column.desc() for column in place))
        found = [_as(Batch, row) for row in await self._ledger.rows(query)]
        return found[::-1] if before is not None else found

    async def counts(self, batch_ids: Collection[str]) -> dict[str, dict[str, int]]:
        """How many rows of each batch have each status."""
        keys = BatchItemRow.batch_id, BatchItemRow.status
        query = select(*keys, func.count()).where(BatchItemRow.batch_id.in_(batch_ids))
        found: dict[str, dict[str, int]] = {}
        for batch_id, status, count in await self._ledger.rows(query.group_by(*keys)):
            found.setdefault(batch_id, {})[status] = count
        return found

    async def cancel(self, workspace: str, batch_id: str, now: datetime) -> Batch:
        """Ask for the end of a batch that runs. Nothing happens to one that has ended."""
        running = update(BatchRow).where(BatchRow.id == batch_id, BatchRow.status == "in_progress")
        async with self._ledger.transaction() as connection:
            await _get(connection, workspace, batch_id)
            changes = {"status": "canceling", "cancel_initiated_at": now}
            await connection.execute(running.values(changes))
            return await _get(connection, workspace, batch_id)

    async def remove(self, workspace: str, batch_id: str) -> None:
        """Raise InvalidRequest for a batch that still runs."""
        async with self._ledger.transaction(_LONG_SECONDS) as connection:
            batch = await _get(connection, workspace, batch_id)
            if batch.status != "ended":
                raise InvalidRequest("message_batch_id: cancel the batch first: it is processing")
            await _forget(connection, [batch_id])

    async def results(self, batch_id: str, after: int, limit: int) -> list[tuple[int, str, bytes]]:
        """Position, custom id and result of rows that have ended, in the order of the rows."""
        item = BatchItemRow
        ended = item.batch_id == batch_id, item.position > after, item.status != PENDING
        query = select(item.position, item.custom_id, item.status, item.result).where(*ended)
        rows = await self._ledger.rows(query.order_by(item.position).limit(limit))
        texts = self._texts.batch(batch_id)

        def opened() -> list[tuple[int, str, bytes]]:
            return [
                (position, name, texts.opened_result(position, status, result or b""))
                for position, name, status, result in rows
            ]

        return await asyncio.to_thread(opened)

    # For the gateway that runs them.

    async def claim(
        self, owner: str, now: datetime, until: datetime, *, working: Collection[str], most: int
    ) -> list[Batch]:
        """Own the batches `working` until a time, and others that run and have no owner; return
        them. At most `most` of a workspace are owned, so that others stay free for other gateways,
        besides canceled and expired ones, which end at once."""
        is_owned = and_(BatchRow.owner == owner, BatchRow.id.in_(working))
        is_over = or_(BatchRow.status == "canceling", BatchRow.expires_at <= now)
        place = func.row_number().over(
            partition_by=BatchRow.workspace_id,
            order_by=(not_(is_owned), BatchRow.created_at, BatchRow.id),
        )
        free = or_(is_owned, BatchRow.owner == owner, BatchRow.owned_until <= now)
        found = (
            select(BatchRow.id, place.label("place"), or_(is_owned, is_over).label("is_sure"))
            .where(_RUNS, free)
            .subquery()
        )
        chosen = select(found.c.id).where(or_(found.c.is_sure, found.c.place <= most))
        async with self._ledger.transaction() as connection:
            if (await connection.execute(_ANY_THAT_RUNS)).first() is None:
                return []
            ids = (await connection.execute(chosen)).scalars().all()
            claimed = update(BatchRow).where(BatchRow.id.in_(ids), free)
            await connection.execute(claimed.values(owner=owner, owned_until=until))
            mine = select(*_BATCH).where(BatchRow.id.in_(ids), BatchRow.owner == owner)
            rows = (await connection.execute(mine.order_by(BatchRow.created_at))).all()
            return [_as(Batch, row) for row in rows]

    async def pending(self, batch_id: str, limit: int) -> tuple[str, list[BatchItem]]:
        """The batch's status, and the next rows in the order in which they run."""
        waiting = BatchItemRow.batch_id == batch_id, BatchItemRow.status == PENDING
        query = select(*_ITEM).where(*waiting).order_by(BatchItemRow.rank).limit(limit)
        status = select(BatchRow.status).where(BatchRow.id == batch_id)
        async with self._ledger.transaction() as connection:
            found = (await connection.execute(status)).scalar_one_or_none() or "ended"
            rows = (await connection.execute(query)).all()
        texts = self._texts.batch(batch_id)

        def opened() -> list[BatchItem]:
            items = [_as(BatchItem, row) for row in rows]
            return [
                msgspec.structs.replace(
                    item, params=texts.opened_params(item.position, item.params)
                )
                for item in items
            ]

        return found, await asyncio.to_thread(opened)

    async def finish(self, batch_id: str, results: Sequence[Result]) -> None:
        """Keep results of rows that are pending. A second result of a row changes nothing."""
        statement = (
            update(BatchItemRow.__table__)  # type: ignore[arg-type]
            .where(BatchItemRow.batch_id == batch_id)
            .where(BatchItemRow.position == bindparam("at"))
            .where(BatchItemRow.status == PENDING)
            .values(status=bindparam("new_status"), result=bindparam("new_result"))
        )
        texts = self._texts.batch(batch_id)

        def sealed() -> list[dict[str, Any]]:
            return [
                {
                    "at": result.position,
                    "new_status": result.status,
                    "new_result": texts.sealed_result(
                        result.position, result.status, result.result
                    ),
                }
                for result in results
            ]

        await self._ledger.run(statement, await asyncio.to_thread(sealed))

    def sealed_result(self, batch_id: str, result: Result) -> bytes:
        """The result as the database keeps it. Deriving the key takes a moment."""
        texts = self._texts.batch(batch_id)
        return texts.sealed_result(result.position, result.status, result.result)

    async def end(self, batch_id: str, status: str, result: bytes, now: datetime) -> None:
        """End the batch: rows that are still pending get this status, `canceled` or `expired`, and
        this result."""
        result = self._texts.batch(batch_id).sealed_result(0, status, result)
        waiting = BatchItemRow.batch_id == batch_id, BatchItemRow.status == PENDING
        rows = update(BatchItemRow).where(*waiting)
        ended = update(BatchRow).where(BatchRow.id == batch_id)
        async with self._ledger.transaction(_LONG_SECONDS) as connection:
            await connection.execute(rows.values(status=status, result=result))
            await connection.execute(ended.values(status="ended", ended_at=now))

    async def forget(self, before: datetime) -> None:
        """Delete some batches that ended before a time."""
        query = select(BatchRow.id).where(BatchRow.status == "ended", BatchRow.ended_at < before)
        async with self._ledger.transaction(_LONG_SECONDS) as connection:
            found = (await connection.execute(query.limit(10))).scalars().all()
            if found:
                await _forget(connection, found)

    async def _check_room(self, connection: AsyncConnection, batch: Batch) -> None:
        total = func.coalesce(func.sum(BatchRow.num_bytes), 0)
        running = func.count().filter(BatchRow.status != "ended")
        query = select(total, running).where(BatchRow.workspace_id == batch.workspace_id)
        num_bytes, num_running = (await connection.execute(query)).one()
        if num_bytes + batch.num_bytes > self._most_bytes:
            raise RateLimited("bytes of batches; delete old ones", self._most_bytes)
        if num_running >= self._most_running:
            raise RateLimited("batches that have not ended", self._most_running)


async def _get(connection: AsyncConnection, workspace: str, batch_id: str) -> Batch:
    # PostgreSQL refuses NUL in a text, and no id contains it.
    query = select(*_BATCH).where(BatchRow.id == batch_id.replace("\0", "?"))
    query = query.where(BatchRow.workspace_id == workspace)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFound(f"message_batch_id: no batch `{batch_id[:64]}`")
    return _as(Batch, row)


async def _forget(connection: AsyncConnection, batch_ids: Collection[str]) -> None:
    await connection.execute(delete(BatchItemRow).where(BatchItemRow.batch_id.in_(batch_ids)))
    await connection.execute(delete(BatchRow).where(BatchRow.id.in_(batch_ids)))


def _as(kind: type[Stored], row: Any) -> Stored:
    """A row of the database as a struct, by the names of its fields."""
    return kind(**{name: row._mapping[name] for name in kind.__struct_fields__})


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

    def __init__(self, ledger: Ledger, master: SecretStr, most: int, most_bytes: int) -> None:
        self._ledger = ledger
        self._texts = Texts(master)
        self._most = most
        self._most_bytes = most_bytes

    async def check_room(self, workspace: str, num_bytes: int, now: datetime) -> None:
        """Raise RateLimited where the workspace has no room for another."""
        async with self._ledger.transaction() as connection:
            await self._check_room(connection, workspace, num_bytes, now)

    async def create(self, content: CachedContent, body: bytes) -> None:
        """Raise RateLimited where there is no room."""
        seal = self._texts.sealed_content
        sealed = await asyncio.to_thread(seal, content.workspace_id, content.id, body)
        async with self._ledger.transaction() as connection:
            # The first statement takes the lock, so that no two count the same room.
            await identity.count_change(connection)
            created = content.created_at
            await self._check_room(connection, content.workspace_id, content.num_bytes, created)
            row = {**msgspec.structs.asdict(content), "body": sealed}
            await connection.execute(insert(CachedContentRow).values(row))

    async def get(self, workspace: str, content_id: str, now: datetime) -> CachedContent:
        """Raise NotFound for one that is not there, expired, or another workspace's."""
        return _as(CachedContent, await self._row(_COLUMNS, workspace, content_id, now))

    async def with_body(
        self, workspace: str, content_id: str, now: datetime
    ) -> tuple[CachedContent, bytes]:
        """As `get`, with the compressed body."""
        row = await self._row([*_COLUMNS, CachedContentRow.body], workspace, content_id, now)
        opened = self._texts.opened_content
        body = await asyncio.to_thread(opened, workspace, row.id, row.body)
        return _as(CachedContent, row), body

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
        """At most `limit` live ones with ids above `after`, in the order of their ids."""
        row = CachedContentRow
        own = row.workspace_id == workspace, row.id > after, row.expires_at > now
        query = select(*_COLUMNS).where(*own).order_by(row.id).limit(limit)
        return [_as(CachedContent, row) for row in await self._ledger.rows(query)]

    async def move_expiry(
        self, content: CachedContent, expires_at: datetime, held_until: datetime, now: datetime
    ) -> None:
        one = update(CachedContentRow).where(CachedContentRow.id == content.id)
        times = {"expires_at": expires_at, "held_until": held_until, "updated_at": now}
        await self._ledger.run(one.values(times))

    async def expired(self, now: datetime) -> list[CachedContent]:
        """Some whose time is over, the oldest first. They are still in the table."""
        return [_as(CachedContent, row) for row in await self._ledger.rows(_EXPIRED, {"now": now})]

    async def remove(self, content_ids: Collection[str]) -> None:
        gone = CachedContentRow.id.in_(content_ids)
        await self._ledger.run(delete(CachedContentRow).where(gone))

    async def named(self, prefixes: Collection[str], now: datetime) -> dict[tuple[str, str], str]:
        """The live ones of these prefixes: by workspace and prefix, their ids."""
        if not prefixes:
            return {}
        row = CachedContentRow
        live = row.expires_at > now, row.prefix.in_(prefixes)
        found = await self._ledger.rows(select(row.workspace_id, row.prefix, row.id).where(*live))
        return {(workspace, prefix): content_id for workspace, prefix, content_id in found}

    async def _check_room(
        self, connection: AsyncConnection, workspace: str, num_bytes: int, now: datetime
    ) -> None:
        query = select(func.count(), func.coalesce(func.sum(CachedContentRow.num_bytes), 0)).where(
            CachedContentRow.workspace_id == workspace, CachedContentRow.expires_at > now
        )
        count, total = (await connection.execute(query)).one()
        if count >= self._most:
            raise RateLimited("cached contents", self._most)
        if total + num_bytes > self._most_bytes:
            raise RateLimited("bytes of cached contents", self._most_bytes)


DAY_MS = 86_400_000
_CONTENTS_AT_ONCE = 200


class Contents:
    """One table's bodies, by ids. Those of workspaces that say no days are kept for `days`."""

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
        """Keep a sealed body. A turn has one: a second one changes nothing."""
        made = postgresql.insert if self._ledger.is_postgres else sqlite.insert
        row = {
            self._table.turn_id: turn_id,
            self._table.workspace_id: workspace,
            self._table.at_ms: at_ms,
            self._table.body: body,
        }
        await self._ledger.run(made(self._table).values(row).on_conflict_do_nothing())

    async def get(self, workspace: str, turn_id: str, now_ms: int) -> tuple[bytes, int]:
        """The sealed body, and when its time is over. Raise NotFound where there is none."""
        found = await self.find(workspace, [turn_id], now_ms)
        if not found:
            raise NotFound(f"content: nothing is kept of `{turn_id[:64]}`")
        return found[turn_id]

    async def find(
        self, workspace: str, ids: Collection[str], now_ms: int
    ) -> dict[str, tuple[bytes, int]]:
        """As `get`, of those of the ids that are there."""
        table = self._table
        days = func.coalesce(WorkspaceRow.keep_days, self._days)
        until_ms = table.at_ms + days * DAY_MS
        query = (
            select(table.turn_id, table.body, until_ms.label("until_ms"))
            .join(WorkspaceRow, WorkspaceRow.id == table.workspace_id)
            # PostgreSQL refuses NUL in a text, and no id contains it.
            .where(table.turn_id.in_([one for one in ids if "\0" not in one]))
            .where(table.workspace_id == workspace, until_ms > now_ms)
        )
        rows = await self._ledger.rows(query)
        return {row[0]: (row.body, int(row.until_ms)) for row in rows}

    async def num_bytes(self, workspace: str) -> int:
        """What is kept of a workspace."""
        table = self._table
        total = func.coalesce(func.sum(func.length(table.body)), 0)
        [row] = await self._ledger.rows(select(total).where(table.workspace_id == workspace))
        return int(row[0])

    async def change(
        self, workspace: str, turn_id: str, now_ms: int | None, make: Callable[[bytes], bytes]
    ) -> None:
        """Put another sealed body in its place; nothing where none is. Its time begins anew at
        `now_ms`, or goes on."""
        table = self._table
        at_ms = table.at_ms if now_ms is None else now_ms
        one = table.turn_id == turn_id, table.workspace_id == workspace
        async with self._ledger.transaction() as connection:
            # The first statement takes the lock, so that no two change the same one.
            await connection.execute(update(table).where(*one).values(at_ms=at_ms))
            body = (await connection.execute(select(table.body).where(*one))).scalar_one_or_none()
            if body is not None:
                made = await asyncio.to_thread(make, body)
                await connection.execute(update(table).where(*one).values(body=made))

    async def remove(self, ids: Collection[str]) -> None:
        await self._ledger.run(delete(self._table).where(self._table.turn_id.in_(ids)))

    async def forget(self, now_ms: int) -> None:
        """Delete all whose time is over. Each workspace's oldest is looked up in the index."""
        first = (
            select(func.min(self._table.at_ms))
            .where(self._table.workspace_id == WorkspaceRow.id)
            .scalar_subquery()
        )
        query = select(WorkspaceRow.id, WorkspaceRow.keep_days, first.label("first_ms"))
        for row in await self._ledger.rows(query):
            days = self._days if row.keep_days is None else row.keep_days
            # Without days all is over.
            last_ms = now_ms if days is None else now_ms - days * DAY_MS
            if row.first_ms is not None and row.first_ms <= last_ms:
                await self._delete(row.id, last_ms)

    async def _delete(self, workspace: str, last_ms: int) -> None:
        """Some at a time: SQLite has one writer."""
        table = self._table
        own = table.workspace_id == workspace, table.at_ms <= last_ms
        some = select(table.turn_id).where(*own).limit(_CONTENTS_AT_ONCE)
        while True:
            async with self._ledger.transaction() as connection:
                gone = delete(table).where(table.turn_id.in_(some))
                if (await connection.execute(gone)).rowcount < _CONTENTS_AT_ONCE:
                    return

    def _cipher(self, workspace: str) -> Cipher:
        return Cipher(self._master, f"holdfast kept contents: {workspace}")
