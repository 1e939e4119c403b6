"""Journals of workers that a gateway with fewer workers has no process for."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from gateway.base.record import TurnRecord
from gateway.cli.left import left_journals
from gateway.http.machine import journal_of
from gateway.journal.writer import Journal

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)


def hold_a_turn(directory: Path, *, is_over: bool = False) -> None:
    async def run() -> None:
        journal = Journal(directory)
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
