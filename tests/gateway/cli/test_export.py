"""`python -m gateway export` holds the database for a bounded time."""

import asyncio
import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import main
from scripts.stack import ROOT, python
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
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and "--seconds" in told.err
