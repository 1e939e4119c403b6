"""Journals of workers that a gateway with fewer workers has no process for."""

import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.base.record import TurnRecord
from gateway.base.settings import load_database
from gateway.cli.left import left_journals, recover_left
from gateway.cli.migrate import migrate
from gateway.http.machine import journal_of
from gateway.journal.store import Journal
from scripts.stack import ENGINE_SECRET, gateway_environment, python
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import serve

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)


def hold_a_turn(directory: Path, *, is_over: bool = False) -> None:
    async def run() -> None:
        journal = Journal(directory).start()
        record = TurnRecord(
            id=f"msg_{journal.instance}0001",
            instance=journal.instance,
            workspace="w",
            key_id="k",
            model="m",
            stream=False,
            opened_at=NOW,
        )
        await journal.open(record)
        if is_over:
            await journal.close(record)
            await journal.forget([record.id])
        await journal.stop()

    asyncio.run(run())


def test_journals_beyond_the_workers_are_left_if_they_hold_turns(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        hold_a_turn(journal_of(tmp_path, number))
    hold_a_turn(journal_of(tmp_path, 3), is_over=True)
    (tmp_path / "journal-x").mkdir()
    (tmp_path / "journal-7").mkdir()
    assert left_journals(tmp_path, 1) == [tmp_path / "journal-2", tmp_path / "journal-10"]
    assert left_journals(tmp_path, 2) == [tmp_path / "journal-10"]
    assert left_journals(tmp_path, 10) == []


def test_a_journal_that_can_not_be_read_may_hold_turns(tmp_path: Path) -> None:
    broken = tmp_path / "journal-2"
    broken.mkdir()
    (broken / "journal.db").write_bytes(b"no database" * 100)
    assert left_journals(tmp_path, 1) == [broken]
    assert left_journals(tmp_path / "nowhere", 1) == []


def environment(data: Path, engine: str, patch: pytest.MonkeyPatch) -> None:
    for name, value in gateway_environment(0, data, [engine]).items():
        patch.setenv(name, value)


def test_a_left_journal_that_can_not_be_settled_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = journal_of(tmp_path, 2)
    with serve(ScriptedEngine(secret=ENGINE_SECRET)) as engine:
        environment(tmp_path, engine, monkeypatch)
        migrate(load_database())
        for number in (2, 3):
            hold_a_turn(journal_of(tmp_path, number))

        async def run() -> None:
            stopping, owner = asyncio.Event(), Journal(held).start()  # another process has it
            settling = asyncio.create_task(recover_left(tmp_path, 1, stopping))
            async with asyncio.timeout(120):
                while left_journals(tmp_path, 1) != [held]:
                    await asyncio.sleep(0.1)
                await owner.stop()
                await settling
            assert left_journals(tmp_path, 1) == []

        asyncio.run(run())


def test_a_journal_that_is_being_settled_is_free_when_the_gateway_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start may have a worker for it."""
    directory = journal_of(tmp_path, 2)
    engine = ScriptedEngine(secret=ENGINE_SECRET)
    with serve(engine) as url:
        environment(tmp_path, url, monkeypatch)
        migrate(load_database())
        hold_a_turn(directory)

        async def run() -> None:
            settling = await asyncio.create_subprocess_exec(
                *(*python("gateway"), "recover", "--ends-with-input", "--journal", str(directory)),
                stdin=asyncio.subprocess.PIPE,
            )
            async with asyncio.timeout(120):
                while not engine.cancelled:  # it asks the engine for ten seconds from here on
                    await asyncio.sleep(0.02)
                assert settling.stdin is not None
                settling.stdin.close()  # as the kernel does for a parent that is gone
                assert await settling.wait() == os.EX_TEMPFAIL
            await Journal(directory).start().stop()

        asyncio.run(run())
