"""Transactions on a machine that is too busy, and values that no database holds."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from gateway.admission.keyring import KeyRing
from gateway.base.clock import Clock
from gateway.base.errors import LedgerNotMigrated, LedgerRefused
from gateway.base.record import TurnRecord
from gateway.ledger.access import Keys
from gateway.ledger.database import Ledger
from tests.gateway.ledger.test_sums import at
from tests.gateway.serving import make_settings
from tests.migrated import migrate

NOW = datetime(2026, 11, 22, tzinfo=UTC)


@pytest.fixture
def url(tmp_path: Path) -> str:
    settings = make_settings(tmp_path)
    migrate(settings)
    return settings.ledger_url


def run(url: str, work: Callable[[Ledger], Any], seconds: float = 2.0) -> Any:
    async def check() -> Any:
        ledger = Ledger(url, seconds)
        try:
            return await work(ledger)
        finally:
            await ledger.close()

    return asyncio.run(check())


def test_a_process_that_stood_still_does_not_take_its_database_for_one_that_is_away(
    url: str,
) -> None:
    async def work(ledger: Ledger) -> int:
        async with ledger.transaction() as connection:
            loop = asyncio.get_running_loop()
            loop.call_soon(time.sleep, 4)  # twice the deadline, and nobody's fault
            return int((await connection.execute(text("SELECT 7"))).scalar_one())

    assert run(url, work) == 7


def test_who_leaves_while_a_connection_is_given_back_leaves_no_broken_one(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(ledger: Ledger) -> None:
        # What the pool does when it takes a connection back takes longer than the deadline has.
        event.listen(ledger.engine.sync_engine, "reset", lambda *_: time.sleep(3))
        for _ in range(2):
            async with ledger.transaction() as connection:
                await connection.execute(text("SELECT 1"))

        async def brief() -> None:
            async with ledger.transaction() as connection:
                await connection.execute(text("SELECT 1"))

        task = asyncio.create_task(brief())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        run(url, work)
    assert not [record for record in caplog.records if "reset" in record.getMessage()]


@pytest.mark.parametrize(
    "changes",
    [
        {"output_tokens": 2**63},
        {"input_tokens": -(2**70)},
        {"cost": 2**64},
        {"model": None},
    ],
)
def test_a_count_that_no_column_holds_is_refused_and_nothing_of_it_is_stored(
    url: str, changes: dict[str, Any]
) -> None:
    async def work(ledger: Ledger) -> None:
        turn = at(1, 0)
        for name, value in changes.items():
            setattr(turn, name, value)
        with pytest.raises(LedgerRefused):
            await ledger.insert_turns([turn])
        await ledger.insert_turns([at(2, 0)])
        assert await ledger.known(["msg_0001", "msg_0002"]) == {"msg_0002"}

    run(url, work)


def test_sums_that_would_exceed_their_column_are_refused(url: str) -> None:
    async def work(ledger: Ledger) -> None:
        big: list[TurnRecord] = [at(n, 0, output_tokens=2**62) for n in (1, 2, 3)]
        with pytest.raises(LedgerRefused):
            await ledger.insert_turns(big)

    run(url, work)


def test_a_key_and_its_workspace_that_are_made_between_two_reads_break_no_refresh(
    url: str,
) -> None:
    path = url.removeprefix("sqlite+aiosqlite:///")

    async def work(ledger: Ledger) -> None:
        keys = Keys(ledger)
        await keys.create("hf-first", "default", "first", NOW)
        new_keys: list[str] = []

        def make_another(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if "FROM workspaces" in statement and not new_keys:
                new_keys.append("new")
                with sqlite3.connect(path, timeout=10) as connection:
                    connection.execute(
                        "UPDATE watermarks SET value = value + 1 WHERE name = 'access'"
                    )
                    connection.execute(
                        "INSERT INTO workspaces (id, created_at) VALUES ('new', ?)",
                        (NOW.isoformat(" "),),
                    )
                    connection.execute(
                        "INSERT INTO api_keys (id, workspace_id, name, digest, created_at)"
                        " VALUES ('key_new', 'new', 'n', 'd', ?)",
                        (NOW.isoformat(" "),),
                    )

        event.listen(ledger.engine.sync_engine, "after_cursor_execute", make_another)
        ring = KeyRing(keys, make_settings(Path("none")), Clock())
        await ring.refresh()
        assert new_keys and set(ring.workspaces) == {"default"}, "all of one moment"
        await ring.poll()
        assert set(ring.workspaces) == {"default", "new"}, "and the change is seen next"

    run(url, work, 60.0)


def test_a_database_without_tables_is_told_with_the_command_that_makes_them(tmp_path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        async with ledger.transaction() as connection:
            await connection.execute(text("SELECT * FROM turns"))

    with pytest.raises(LedgerNotMigrated, match="python -m gateway migrate"):
        run(make_settings(tmp_path).ledger_url, work)
