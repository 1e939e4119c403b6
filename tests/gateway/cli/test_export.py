"""`python -m gateway export` holds the database for a bounded time."""

import asyncio
import os
import sqlite3
import subprocess
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import main
from gateway.journal.store import Journal
from gateway.journal.table import REFUSED
from scripts.stack import ROOT, python
from tests.gateway.journal.test_journal import record
from tests.gateway.ledger.test_sums import at
from tests.gateway.serving import eventually, fill, make_settings

NUM_TURNS = 600
SINCE = ["export", "--since", "2026-01-01", "--until", "2027-01-01", "--rows", "turns"]


@pytest.fixture
def ledger_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A ledger with more turns than a pipe holds as CSV."""
    settings = make_settings(tmp_path)
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    fill(settings, [at(number, number % 30) for number in range(NUM_TURNS)])
    return settings.ledger_url


def test_an_export_whose_output_nobody_reads_holds_no_snapshot(
    tmp_path: Path, ledger_url: str
) -> None:
    command = [*python("gateway"), *SINCE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=os.environ) as process:
        assert process.stdout is not None
        begun = process.stdout.read(1)
        assert process.poll() is None, "its output fits the pipe: the test shows nothing"
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
            with db:
                db.execute("CREATE TABLE more (id INTEGER)")
            eventually(lambda: db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)
        lines = (begun + process.stdout.read()).decode().splitlines()
        assert process.wait() == 0 and len(lines) == NUM_TURNS + 1


def test_an_export_that_reads_for_too_long_is_ended_and_says_what_to_do(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def slow(*_: Any) -> None:
        await asyncio.sleep(600)

    monkeypatch.setattr("gateway.ledger.upkeep.page_of", slow)
    assert main([*SINCE, "--seconds", "0.1"]) == 1
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "--seconds" in output.err


def test_an_export_says_what_it_lacks(
    tmp_path: Path, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns that were deleted, that wait in the journal, and that it has set aside."""
    assert main(SINCE) == 0
    assert capsys.readouterr().err == ""

    async def fill_journal() -> None:
        journal = Journal(tmp_path / "journal").start()
        for number in range(3):
            turn = record(journal, number)
            await journal.open(turn)
            turn.outcome = "stop"
            await journal.close(turn)
        await journal.set_aside([record(journal, 2).journal_id], REFUSED)
        await journal.stop()

    asyncio.run(fill_journal())
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db, db:
        (middle,) = db.execute("SELECT (MIN(opened_ms) + MAX(opened_ms)) / 2 FROM turns").fetchone()
        deleted = middle // 86_400_000 * 86_400_000
        db.execute("INSERT INTO horizon (id, turns_ms) VALUES (1, ?)", (deleted,))
    assert main(SINCE) == 0
    errors = capsys.readouterr().err
    day = datetime.fromtimestamp(deleted / 1000, UTC).date()
    assert f"turns of before {day}T00:00:00Z were deleted" in errors
    assert "2 turns of this gateway that ended, and wait in " in errors
    assert "1 turn that the journal has set aside" in errors
    assert main([*SINCE[:-1], "days"]) == 0
    assert "deleted" not in capsys.readouterr().err, "the sums have them"
