"""A transaction in the ledger's thread: all of it, or nothing."""

import asyncio
import threading
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from gateway.ledger.database import WritingThread

_LONG_SECONDS = 60.0


def _file(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE notes (number INTEGER)"))
    return engine


def _add(connection: Connection) -> None:
    connection.execute(text("INSERT INTO notes VALUES (1)"))


def _count(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM notes")).scalar_one())


def test_what_nobody_waits_for_any_more_is_rolled_back_and_the_next_one_is_kept(
    tmp_path: Path,
) -> None:
    engine, go_on = _file(tmp_path / "notes.db"), threading.Event()
    writing = WritingThread(lambda: engine)

    def add_and_wait(connection: Connection) -> None:
        _add(connection)
        assert go_on.wait(_LONG_SECONDS)

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await writing.commit(add_and_wait, 0.05)
        waiting = asyncio.create_task(writing.commit(_add, _LONG_SECONDS))
        await asyncio.sleep(0)
        go_on.set()
        await waiting
        assert _count(engine) == 1, "the first one came too late"
        await writing.close()

    asyncio.run(run())


def test_a_transaction_whose_work_fails_leaves_nothing(tmp_path: Path) -> None:
    engine = _file(tmp_path / "notes.db")
    writing = WritingThread(lambda: engine)

    def fail(connection: Connection) -> None:
        _add(connection)
        raise ValueError("not this one")

    async def run() -> None:
        with pytest.raises(ValueError, match="not this one"):
            await writing.commit(fail, _LONG_SECONDS)
        await writing.commit(_add, _LONG_SECONDS)
        assert _count(engine) == 1
        await writing.close()

    asyncio.run(run())
