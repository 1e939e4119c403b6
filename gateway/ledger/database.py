"""The one place that makes engines and sessions. Every wait on the database has a deadline."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy import event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.errors import LedgerUnavailable
from gateway.ledger.models import TurnRow
from gateway.ledger.rollups import add_turns
from gateway.record import TurnRecord

_DEADLINE_SECONDS = 5.0
_COMMAND_SECONDS = 600.0
# A statement ends before the transaction's deadline, so that the database says what happened.
_STATEMENT_SHARE = 0.8

Result = TypeVar("Result")


class Ledger:
    def __init__(self, url: str, deadline_seconds: float = _DEADLINE_SECONDS) -> None:
        self._deadline_seconds = deadline_seconds
        self.engine = make_engine(url, int(deadline_seconds * 1000 * _STATEMENT_SHARE))

    @asynccontextmanager
    async def transaction(
        self, deadline_seconds: float | None = None
    ) -> AsyncIterator[AsyncConnection]:
        """One transaction, committed at the end of the block, within the deadline."""
        seconds = self._deadline_seconds if deadline_seconds is None else deadline_seconds
        try:
            async with asyncio.timeout(seconds), self.engine.begin() as connection:
                yield connection
        except TimeoutError:
            raise LedgerUnavailable from None
        except (SQLAlchemyError, OSError) as error:
            raise LedgerUnavailable from error

    async def insert_turns(self, records: Sequence[TurnRecord]) -> None:
        """Insert closed turns, and add them to the sums; those already there change nothing."""
        insert = postgresql.insert if self.is_postgres else sqlite.insert
        statement = insert(TurnRow).on_conflict_do_nothing().returning(TurnRow.id)
        rows = {record.id: _row(record) for record in reversed(records)}
        async with self.transaction() as connection:
            inserted = await connection.execute(
                statement, [rows[turn_id] for turn_id in sorted(rows)]
            )
            await add_turns(connection, inserted.scalars().all())

    async def analyze(self) -> None:
        """Tell the database's planner what the tables hold; after loading a lot at once."""
        async with self.engine.begin() as connection:
            await connection.execute(text("ANALYZE"))

    @property
    def is_postgres(self) -> bool:
        return self.engine.dialect.name == "postgresql"

    async def close(self) -> None:
        await self.engine.dispose()


async def with_ledger(url: str, work: Callable[[Ledger], Awaitable[Result]]) -> Result:
    """What a command does: one piece of work with a patient ledger of its own."""
    ledger = Ledger(url, _COMMAND_SECONDS)
    try:
        return await work(ledger)
    finally:
        await ledger.close()


def make_engine(url: str, statement_ms: int = 4000) -> AsyncEngine:
    if url.startswith("postgresql"):
        return create_async_engine(
            url,
            pool_size=5,
            max_overflow=5,
            pool_timeout=2,
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": 3,
                "options": f"-c statement_timeout={statement_ms} -c timezone=UTC",
                "tcp_user_timeout": statement_ms,
            },
        )
    engine = create_async_engine(url, connect_args={"timeout": statement_ms / 1000})
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _row(record: TurnRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "instance": record.instance,
        "workspace_id": record.workspace,
        "key_id": record.key_id,
        "model": record.model,
        "engine": record.engine,
        "engine_model": record.engine_model,
        "epoch": record.epoch,
        "stream": record.stream,
        "opened_at": record.opened_at,
        "opened_ms": int(record.opened_at.timestamp() * 1000),
        "outcome": record.outcome,
        "miss_reason": record.miss_reason,
        "input_tokens": record.input_tokens,
        "cache_read_tokens": record.cache_read_tokens,
        "cache_write_5m_tokens": record.cache_write_5m_tokens,
        "cache_write_1h_tokens": record.cache_write_1h_tokens,
        "automatic_tokens": record.automatic_tokens,
        "computed_tokens": record.computed_tokens,
        "output_tokens": record.output_tokens,
        "thinking_tokens": record.thinking_tokens,
        "first_token_seconds": record.first_token_seconds,
        "duration_seconds": record.duration_seconds,
        "price": record.price,
        "cost_nano": record.cost,
        "cost_without_cache_nano": record.cost_without_cache,
        "num_removed": record.num_removed,
        "fingerprint": record.fingerprint,
        "dialect": record.dialect,
        "prefix": record.prefix,
        "prefix_ttl": record.prefix_ttl,
        "stop_reason": record.stop_reason,
        "queue_seconds": record.queue_seconds,
        "prefill_seconds": record.prefill_seconds,
        "decode_seconds": record.decode_seconds,
    }
