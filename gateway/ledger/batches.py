"""Batches of messages in the ledger's database: rows, results, and which gateway runs them.

Rows and results are encrypted (`sealed.py`).
"""

import asyncio
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import msgspec
from pydantic import SecretStr
from sqlalchemy import (
    ColumnElement,
    Select,
    and_,
    bindparam,
    delete,
    func,
    insert,
    not_,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.base.errors import InvalidRequest, NotFound, RateLimited
from gateway.ledger import identity
from gateway.ledger.database import Ledger, struct_of
from gateway.ledger.schema import BatchItemRow, BatchRow
from gateway.ledger.sealed import Texts

PENDING = "pending"
_LONG_SECONDS = 60.0
"""The deadline of a transaction over all of a batch's rows."""
_ROWS = 200
"""Rows of one insert."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch. The fields are those of `BatchRow`."""

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
    """One row of a batch. The fields are those of `BatchItemRow`, but for the batch's id."""

    position: int
    custom_id: str
    rank: int
    prefix: str
    params: bytes


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How one row ended."""

    position: int
    # The type of the result.
    status: str
    # Compressed JSON.
    result: bytes


_BATCH = [getattr(BatchRow, name) for name in Batch.__struct_fields__]
_ITEM = [getattr(BatchItemRow, name) for name in BatchItem.__struct_fields__]
_RUNS = BatchRow.status.in_(("in_progress", "canceling"))
# Every gateway asks this twice a second, and most have no batch. So the statement is made once.
_ANY_THAT_RUNS = select(BatchRow.id).where(_RUNS).limit(1)


class Batches:
    """The batches of all workspaces.

    A workspace has at most `max_running` batches that have not ended, and at most `max_bytes` of
    rows.
    """

    def __init__(
        self, ledger: Ledger, master: SecretStr, *, max_running: int, max_bytes: int
    ) -> None:
        self._ledger = ledger
        self._texts = Texts(master)
        self._max_running = max_running
        self._max_bytes = max_bytes

    async def create(self, batch: Batch, items: Sequence[BatchItem]) -> None:
        """Raise RateLimited where the workspace has no room for it."""
        async with self._ledger.transaction(_LONG_SECONDS) as connection:
            # The first statement takes the lock, so that no two count the same room.
            await identity.count_change(connection)
            await self._check_room(connection, batch)
            row = {**msgspec.structs.asdict(batch), "owner": "", "owned_until": batch.created_at}
            await connection.execute(insert(BatchRow).values(row))
            for start in range(0, len(items), _ROWS):
                chunk = items[start : start + _ROWS]
                rows = await asyncio.to_thread(self._sealed_rows, batch.id, chunk)
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
        """At most `limit` batches, the newest first: those older than `after`, or newer than
        `before`."""
        place = BatchRow.created_at, BatchRow.id
        query = select(*_BATCH).where(BatchRow.workspace_id == workspace).limit(limit)
        if before is not None:
            query = query.where(tuple_(*place) > tuple_(before.created_at, before.id))
            query = query.order_by(*place)
        else:
            if after is not None:
                query = query.where(tuple_(*place) < tuple_(after.created_at, after.id))
            query = query.order_by(*(column.desc() for column in place))
        batches = [struct_of(Batch, row) for row in await self._ledger.rows(query)]
        return batches[::-1] if before is not None else batches

    async def counts(self, batch_ids: Collection[str]) -> dict[str, dict[str, int]]:
        """How many rows of each batch have each status."""
        keys = BatchItemRow.batch_id, BatchItemRow.status
        query = select(*keys, func.count()).where(BatchItemRow.batch_id.in_(batch_ids))
        counts: dict[str, dict[str, int]] = {}
        for batch_id, status, count in await self._ledger.rows(query.group_by(*keys)):
            counts.setdefault(batch_id, {})[status] = count
        return counts

    async def cancel(self, workspace: str, batch_id: str, now: datetime) -> Batch:
        """Ask for the end of a batch that runs. A batch that has ended stays as it is."""
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

    # What follows is for the gateway that runs them.

    async def claim(
        self,
        owner: str,
        now: datetime,
        until: datetime,
        *,
        working: Collection[str],
        max_owned: int,
    ) -> list[Batch]:
        """Own batches until `until`, and return them: those that the owner is `working` on, and
        others that run and have no owner.

        An owner has at most `max_owned` of a workspace, so that some stay free for other gateways.
        Canceled and expired batches don't count: they end at once.
        """
        async with self._ledger.transaction() as connection:
            if (await connection.execute(_ANY_THAT_RUNS)).first() is None:
                return []
            is_owned = and_(BatchRow.owner == owner, BatchRow.id.in_(working))
            free = or_(is_owned, BatchRow.owner == owner, BatchRow.owned_until <= now)
            chosen = _claimable(is_owned, free, now, max_owned)
            ids = (await connection.execute(chosen)).scalars().all()
            claimed = update(BatchRow).where(BatchRow.id.in_(ids), free)
            await connection.execute(claimed.values(owner=owner, owned_until=until))
            mine = select(*_BATCH).where(BatchRow.id.in_(ids), BatchRow.owner == owner)
            rows = (await connection.execute(mine.order_by(BatchRow.created_at))).all()
            return [struct_of(Batch, row) for row in rows]

    async def pending(self, batch_id: str, limit: int) -> tuple[str, list[BatchItem]]:
        """The batch's status, and the next rows in the order in which they run."""
        waiting = BatchItemRow.batch_id == batch_id, BatchItemRow.status == PENDING
        query = select(*_ITEM).where(*waiting).order_by(BatchItemRow.rank).limit(limit)
        status = select(BatchRow.status).where(BatchRow.id == batch_id)
        async with self._ledger.transaction() as connection:
            status_now = (await connection.execute(status)).scalar_one_or_none() or "ended"
            rows = (await connection.execute(query)).all()
        texts = self._texts.batch(batch_id)

        def opened() -> list[BatchItem]:
            items = [struct_of(BatchItem, row) for row in rows]
            return [
                msgspec.structs.replace(
                    item, params=texts.opened_params(item.position, item.params)
                )
                for item in items
            ]

        return status_now, await asyncio.to_thread(opened)

    async def finish(self, batch_id: str, results: Sequence[Result]) -> None:
        """Store results of pending rows. A second result of a row changes nothing."""
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
        """The result, encrypted as the database stores it. Deriving the key takes a moment."""
        texts = self._texts.batch(batch_id)
        return texts.sealed_result(result.position, result.status, result.result)

    async def end(self, batch_id: str, status: str, result: bytes, now: datetime) -> None:
        """End the batch. Rows that are still pending get this status (`canceled` or `expired`) and
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
            batch_ids = (await connection.execute(query.limit(10))).scalars().all()
            if batch_ids:
                await _forget(connection, batch_ids)

    async def _check_room(self, connection: AsyncConnection, batch: Batch) -> None:
        total = func.coalesce(func.sum(BatchRow.num_bytes), 0)
        running = func.count().filter(BatchRow.status != "ended")
        query = select(total, running).where(BatchRow.workspace_id == batch.workspace_id)
        num_bytes, num_running = (await connection.execute(query)).one()
        if num_bytes + batch.num_bytes > self._max_bytes:
            raise RateLimited("bytes of batches; delete old ones", self._max_bytes)
        if num_running >= self._max_running:
            raise RateLimited("batches that have not ended", self._max_running)


def _claimable(
    is_owned: ColumnElement[bool], is_free: ColumnElement[bool], now: datetime, max_owned: int
) -> Select[tuple[str]]:
    """The ids of the free batches that an owner may have, at most `max_owned` of a workspace."""
    is_over = or_(BatchRow.status == "canceling", BatchRow.expires_at <= now)
    place = func.row_number().over(
        partition_by=BatchRow.workspace_id,
        order_by=(not_(is_owned), BatchRow.created_at, BatchRow.id),
    )
    ranked = (
        select(BatchRow.id, place.label("place"), or_(is_owned, is_over).label("is_sure"))
        .where(_RUNS, is_free)
        .subquery()
    )
    return select(ranked.c.id).where(or_(ranked.c.is_sure, ranked.c.place <= max_owned))


async def _get(connection: AsyncConnection, workspace: str, batch_id: str) -> Batch:
    # PostgreSQL refuses NUL in a text, and no id contains it.
    query = select(*_BATCH).where(BatchRow.id == batch_id.replace("\0", "?"))
    query = query.where(BatchRow.workspace_id == workspace)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFound(f"message_batch_id: no batch `{batch_id[:64]}`")
    return struct_of(Batch, row)


async def _forget(connection: AsyncConnection, batch_ids: Collection[str]) -> None:
    await connection.execute(delete(BatchItemRow).where(BatchItemRow.batch_id.in_(batch_ids)))
    await connection.execute(delete(BatchRow).where(BatchRow.id.in_(batch_ids)))
