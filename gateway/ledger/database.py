"""Makes all connections to the database. Every wait on the database has a deadline.

The kernel of a frozen server still acknowledges what is sent, and psycopg answers a cancelled wait
by asking the same server to cancel, for ten seconds. So at the deadline the connection's socket is
shut down: the driver sees a broken connection at once.
"""

import asyncio
import math
import os
import socket
import sqlite3
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Executable, event, make_url, select, text
from sqlalchemy.exc import DataError, DBAPIError, OperationalError, SQLAlchemyError, StatementError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.base.epochs import EpochReport
from gateway.base.errors import (
    GatewayError,
    LedgerDamaged,
    LedgerNotMigrated,
    LedgerRefused,
    LedgerUnavailable,
    SampleData,
)
from gateway.base.record import TurnRecord
from gateway.ledger import epochs
from gateway.ledger.identity import Identity, is_damage, is_sample
from gateway.ledger.rollups import insert_closed
from gateway.ledger.schema import TurnRow

DEADLINE_SECONDS = 5.0
_COMMAND_SECONDS = 600.0
_STATEMENT_SHARE = 0.8
"""A statement ends before the transaction's deadline, so that the database says what happened."""
_MARGIN_SECONDS = 0.5
"""The time after the deadline in which the driver notices the end of its socket."""
_CLOSE_SECONDS = 2.0
_IDS = 500
"""Parameters of one statement."""
_UNDEFINED = ("42P01", "42703")
"""PostgreSQL's undefined_table and undefined_column."""
_TICK_SECONDS = 0.25
Stored = TypeVar("Stored", bound=msgspec.Struct)
Result = TypeVar("Result")


class PatientTimer:
    """Calls `act` once, on the event loop, after `seconds` in which the loop ran."""

    def __init__(self, seconds: float, act: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds_left = seconds
        self._act = act
        self._at = self._loop.time()
        self._arm()

    def cancel(self) -> None:
        self._handle.cancel()

    def _arm(self) -> None:
        self._handle = self._loop.call_later(min(self._seconds_left, _TICK_SECONDS), self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        self._seconds_left -= min(now - self._at, 2 * _TICK_SECONDS)
        self._at = now
        if self._seconds_left > 0:
            self._arm()
        else:
            self._act()


@asynccontextmanager
async def patient(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError after `seconds` in which this process ran."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as scope:
        timer = PatientTimer(seconds, lambda: scope.reschedule(loop.time()))
        try:
            yield
        finally:
            timer.cancel()


class Ledger:
    """One pool of at most `pool_size` connections to the database. Parts of the gateway that must
    not wait for each other have a ledger each."""

    def __init__(
        self,
        url: str,
        deadline_seconds: float = DEADLINE_SECONDS,
        pool_size: int = 10,
        identity: Identity | None = None,
    ) -> None:
        """`identity` is that of another pool on the same database."""
        self._deadline_seconds = deadline_seconds
        self.engine = make_engine(url, int(deadline_seconds * 1000 * _STATEMENT_SHARE), pool_size)
        self.identity = identity or Identity()
        self.identity.watch(self.engine.sync_engine)
        self._discarding: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def transaction(
        self, deadline_seconds: float | None = None, *, is_any_schema: bool = False
    ) -> AsyncIterator[AsyncConnection]:
        """One transaction within the deadline, committed at the end of the block.

        Raise LedgerRefused for a value that the database can't hold, LedgerDamaged or
        LedgerReplaced for a file that is not the ledger any more, LedgerNotMigrated for a schema of
        another version unless `is_any_schema`, and LedgerUnavailable otherwise.
        """
        seconds = self._deadline_seconds if deadline_seconds is None else deadline_seconds
        self.identity.check_file()
        if not is_any_schema:
            self.identity.check_schema()
        try:
            async with patient(seconds + _MARGIN_SECONDS):
                connection = await self._connect(seconds)
                async with self._in_order(connection, seconds):
                    yield connection
                    await connection.commit()
            # A task of its own, which a cancelled caller does not stop: a close that ends half-way
            # would leave the connection in an unknown state.
            await asyncio.wait({self._later(connection.close())}, timeout=_CLOSE_SECONDS)
        except TimeoutError:
            raise LedgerUnavailable from None
        except (SQLAlchemyError, OSError) as error:
            self.identity.is_damaged |= is_damage(error)
            raise _translated(error) from error

    @asynccontextmanager
    async def snapshot(
        self, deadline_seconds: float | None = None
    ) -> AsyncIterator[AsyncConnection]:
        """As `transaction`, for reads. Every statement of the block sees the same moment."""
        async with self.transaction(deadline_seconds) as connection:
            await connection.exec_driver_sql(
                "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
                if self.is_postgres
                else "BEGIN"
            )
            yield connection

    async def rows(
        self, query: Executable, values: Mapping[str, Any] | None = None
    ) -> Sequence[Any]:
        """The rows of one query, in a transaction of its own."""
        async with self.transaction() as connection:
            return (await connection.execute(query, values)).all()

    async def run(
        self, statement: Executable, values: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """One statement in a transaction of its own, with `values` once for each of them."""
        async with self.transaction() as connection:
            await connection.execute(statement, values)

    async def _connect(self, seconds: float) -> AsyncConnection:
        """A connection whose server answers. One from the pool may have lost its server."""
        connection = await self.engine.connect()
        if not self.is_postgres:
            return connection
        try:
            async with self._in_order(connection, seconds):
                await connection.exec_driver_sql("SELECT 1")
                await connection.rollback()
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            connection = await self.engine.connect()
        return connection

    @asynccontextmanager
    async def _in_order(self, connection: AsyncConnection, seconds: float) -> AsyncIterator[None]:
        """Break the connection at the deadline. Throw it away where the block ends in an error."""
        cut_timer = None
        if self.is_postgres:
            pooled = await connection.get_raw_connection()
            cut_timer = PatientTimer(seconds, partial(_cut, pooled.driver_connection))
        is_in_order = False
        try:
            yield
            is_in_order = True
        finally:
            if cut_timer is not None:
                cut_timer.cancel()
            if not is_in_order:
                self._later(_throw_away(connection))

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background: SQLite's thread may be waiting for a lock."""
        task = asyncio.create_task(work, name="give a connection back")
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)
        # An error here says again that the connection was broken: it is not reported.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    async def insert_turns(self, records: Sequence[TurnRecord]) -> None:
        """Insert closed turns and add them to the sums. Turns that are there change nothing.

        Raise the errors of `transaction`. SampleData: the database holds sample data, and nothing
        was inserted. LedgerReplaced: the rows went into a file that has lost its name, so the
        journal must keep the turns.
        """
        async with self.transaction() as connection:
            await connection.run_sync(insert_closed, records)
        self.identity.check_file()

    async def record_epochs(self, reports: Sequence[EpochReport]) -> None:
        """Record what engines report of their epochs.

        Raise the errors of `transaction`, and SampleData where the database holds sample data: the
        leases of its turns are made up, too.
        """
        async with self.transaction() as connection:
            if await is_sample(connection):
                raise SampleData
            await epochs.record_epochs(connection, reports)

    async def known(self, turn_ids: Sequence[str]) -> set[str]:
        """Those of these turns that the ledger has."""
        known_ids: set[str] = set()
        async with self.snapshot() as connection:
            for start in range(0, len(turn_ids), _IDS):
                query = select(TurnRow.id).where(TurnRow.id.in_(turn_ids[start : start + _IDS]))
                known_ids.update((await connection.execute(query)).scalars())
        return known_ids

    async def analyze(self) -> None:
        """Update the planner's statistics, after many rows were loaded at once."""
        async with self.engine.begin() as connection:
            await connection.execute(text("ANALYZE"))

    @property
    def is_postgres(self) -> bool:
        return self.engine.dialect.name == "postgresql"

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.gather(*self._discarding, return_exceptions=True)
                await self.engine.dispose()
        except TimeoutError:
            pass  # the process ends, and its connections with it


async def _throw_away(connection: AsyncConnection) -> None:
    try:
        await connection.invalidate()
        await connection.close()
    except (SQLAlchemyError, OSError):
        pass  # it is thrown away because it was broken


def _cut(driver_connection: Any) -> None:
    """End a psycopg connection's traffic: its waiting calls fail at once."""
    if driver_connection.closed:
        return
    with socket.socket(fileno=os.dup(driver_connection.fileno())) as shared:
        try:
            shared.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended by itself


def _translated(error: Exception) -> GatewayError:
    """The gateway's error for an error of the database. LedgerRefused is for what the database
    would refuse again, such as a sum beyond 64 bits."""
    cause = getattr(error, "orig", None)
    is_overflow = isinstance(error, OperationalError) and "integer overflow" in str(cause)
    is_unsent = isinstance(error, StatementError) and not isinstance(error, DBAPIError)
    if is_overflow or is_unsent or isinstance(error, DataError):
        return LedgerRefused()
    if is_damage(error):
        return LedgerDamaged()
    is_older = getattr(cause, "sqlstate", None) in _UNDEFINED
    if isinstance(cause, sqlite3.OperationalError):
        is_older = str(cause).startswith(("no such table", "no such column"))
    return LedgerNotMigrated() if is_older else LedgerUnavailable()


@contextmanager
def translated() -> Iterator[None]:
    """Raise the database's errors as the gateway's, in one line, for code that has no ledger."""
    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        failure = _translated(error)
        if type(failure) not in (LedgerDamaged, LedgerNotMigrated):
            line = str(getattr(error, "orig", None) or error).splitlines()[0]
            failure = LedgerUnavailable(f"{LedgerUnavailable.default}: {line}")
        raise failure from error


async def with_ledger(
    url: str, work: Callable[[Ledger], Awaitable[Result]], seconds: float = _COMMAND_SECONDS
) -> Result:
    """Run one piece of work of a command, with a ledger that has longer deadlines."""
    ledger = Ledger(url, seconds)
    try:
        return await work(ledger)
    finally:
        await ledger.close()


def make_engine(
    url: str,
    statement_ms: int = 4000,
    pool_size: int = 10,
) -> AsyncEngine:
    if url.startswith("postgresql"):
        return create_async_engine(
            url,
            hide_parameters=True,
            json_serializer=_json_of,
            pool_size=pool_size // 2,
            max_overflow=pool_size - pool_size // 2,
            pool_timeout=2,
            connect_args={
                "connect_timeout": 3,
                # Without `jit`: to compile a drain's statements takes longer than to run them.
                "options": f"-c statement_timeout={statement_ms} -c timezone=UTC -c jit=off",
                "tcp_user_timeout": statement_ms,
            },
        )
    # SQLite in memory has one connection and no pool.
    is_file = make_url(url).database not in (None, "", ":memory:")
    sizes = {"pool_size": pool_size, "max_overflow": 0, "pool_timeout": 2} if is_file else {}
    engine = create_async_engine(
        url,
        hide_parameters=True,
        json_serializer=_json_of,
        connect_args={"timeout": statement_ms / 1000},
        **sizes,
    )
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    return engine


def _json_of(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _prepare_sqlite(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # Commits must be durable, because the journal forgets turns that the ledger has. A build of
    # SQLite may have another default.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    try:
        cursor.execute("SELECT ln(1)")
    except sqlite3.OperationalError:  # a build without mathematics
        connection.create_function("ln", 1, math.log, deterministic=True)
    cursor.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledgers:
    """Pools of one database, so that large reads delay neither the drain nor a revocation."""

    # For closed turns, out of the journal.
    drain: Ledger
    # For keys and workspaces.
    access: Ledger
    # For what clients store: batches, cached contents, responses.
    store: Ledger
    # For the pages.
    reads: Ledger


def open_ledgers(stack: AsyncExitStack, url: str) -> Ledgers:
    """Open all pools; the stack closes them."""
    identity = Identity()

    def opened(pool_size: int) -> Ledger:
        ledger = Ledger(url, DEADLINE_SECONDS, pool_size, identity)
        stack.push_async_callback(ledger.close)
        return ledger

    return Ledgers(drain=opened(2), access=opened(6), store=opened(8), reads=opened(8))


def struct_of(kind: type[Stored], row: Any) -> Stored:
    """A row of the database as a struct, by the names of its fields."""
    return kind(**{name: row._mapping[name] for name in kind.__struct_fields__})
