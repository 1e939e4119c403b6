"""A damaged journal: the gateway starts, and what is lost is named."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from gateway.base.metrics import Metrics
from gateway.journal.drain import Drain
from gateway.journal.writer import Journal
from gateway.ledger.database import Ledger
from tests.gateway.journal.damaged_starts import Outcome, start_here
from tests.gateway.journal.damaged_turns import prepare
from tests.gateway.journal.damages import run
from tests.gateway.journal.test_journal import record
from tests.gateway.process import gateway_process
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually, make_settings, migrate, serve


def test_no_turn_of_a_damaged_data_directory_is_lost_without_a_word() -> None:
    outcomes = run(16, processes=0.125)
    assert sum(each.is_process for each in outcomes) == 2
    for each in outcomes:
        assert not (each.unnamed or each.collateral or each.wrong), each


@pytest.mark.parametrize("is_emptied", [True, False])
def test_what_only_the_write_ahead_log_still_has_is_kept(tmp_path: Path, is_emptied: bool) -> None:
    """SQLite deletes a log whose database file is gone or empty."""
    truth = asyncio.run(prepare(tmp_path / "data"))
    data = tmp_path / "killed"
    for name in ("turns.log", "turns-copy.log", "journal.db"):
        (data / "journal" / name).unlink()
    if is_emptied:
        (data / "journal" / "journal.db").touch()
    outcome = Outcome(0, ["journal/journal.db", "journal/turns.log", "journal/turns-copy.log"])
    asyncio.run(start_here(data, truth, outcome))
    assert not (outcome.unnamed or outcome.collateral or outcome.wrong), outcome
    assert {each for each, true in truth.items() if true.stage != "open"} <= set(outcome.intact)
    assert list((data / "journal").glob("damaged-*/journal.db-wal"))


def change(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(statement, values).rowcount == 1


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_record_whose_digit_flipped_is_set_aside_and_stops_no_other(
    tmp_path: Path, is_closed: bool
) -> None:
    settings = make_settings(tmp_path)
    migrate(settings)

    async def make() -> list[str]:
        journal = Journal(tmp_path / "journal")
        turns = [record(journal, number) for number in range(4)]
        for turn in turns:
            await journal.open(turn)
        for turn in turns[1:] if not is_closed else turns:
            turn.outcome, turn.output_tokens = "stop", 7
            await journal.close(turn)
        await journal.stop()
        return [turn.id for turn in turns]

    ids = asyncio.run(make())
    path = tmp_path / "journal" / "journal.db"
    with closing(sqlite3.connect(path)) as db:
        (blob,) = db.execute("SELECT record FROM turns WHERE id = ?", (ids[0],)).fetchone()
    flipped = blob.replace(b'"attempt":1', b'"attempt":9')
    assert flipped != blob
    change(path, "UPDATE turns SET record = ? WHERE id = ?", flipped, ids[0])

    async def drain() -> tuple[list[str], set[str]]:
        journal, ledger = Journal(tmp_path / "journal"), Ledger(settings.ledger_url)

        async def tell(_engine: str, _turns: list[str]) -> None: ...

        assert not await journal.open_turns()
        await Drain(journal, ledger.insert_turns, tell, Metrics(), ledger.known).step()
        aside, known = await journal.set_aside_turns(), await ledger.known(ids)
        await ledger.close()
        await journal.stop()
        return aside, known

    assert asyncio.run(drain()) == ([ids[0]], set(ids[1:]))


def test_a_gateway_starts_with_an_open_record_that_nobody_can_read(tmp_path: Path) -> None:
    with serve(ScriptedEngine()) as engine:
        log = tmp_path / "log"
        (tmp_path / "journal").mkdir()
        journal = tmp_path / "journal" / "journal.db"
        with gateway_process(tmp_path, engine, log):
            pass
        statement = "INSERT INTO turns (id, record) VALUES ('msg_0', ?)"
        change(journal, statement, b"\xff\xfe no record")
        with gateway_process(tmp_path, engine, log) as (url, process):
            eventually(lambda: "set_aside" in log.read_text("utf-8"))
            assert process.poll() is None
            assert (
                "holdfast_gateway_journal_set_aside 1.0"
                in httpx.get(f"{url}/metrics", timeout=120).text
            )
        assert "Traceback" not in log.read_text("utf-8")
