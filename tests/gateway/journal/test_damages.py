"""A damaged journal: the gateway starts, and what is lost is named."""

import asyncio
from pathlib import Path

import httpx
import pytest

from gateway.base.metrics import Metrics
from gateway.journal.drain import Drain
from gateway.journal.files import segment_files
from gateway.journal.segments import Kind
from gateway.journal.writer import Journal
from gateway.ledger.database import Ledger
from tests.gateway.journal.damages import run
from tests.gateway.journal.segment_edits import append
from tests.gateway.journal.test_journal import record
from tests.gateway.process import gateway_process
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually, make_settings, migrate, serve


def test_no_turn_of_a_damaged_data_directory_is_lost_without_a_word() -> None:
    outcomes = run(16, processes=0.125)
    assert sum(each.is_process for each in outcomes) == 2
    for each in outcomes:
        assert not (each.unnamed or each.collateral or each.wrong), each


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
    (path,) = segment_files(tmp_path / "journal").values()
    content = path.read_bytes()
    at = content.rfind(b'{"id":"' + ids[0].encode())
    head, record_and_rest = content[:at], content[at:]
    path.write_bytes(head + record_and_rest.replace(b'"attempt":1', b'"attempt":9', 1))
    assert path.read_bytes() != content

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
        with gateway_process(tmp_path, engine, log):
            pass
        append(tmp_path / "journal", Kind.OPEN, "msg_0", b"\xff\xfe no record")
        with gateway_process(tmp_path, engine, log) as (url, process):
            eventually(lambda: "set_aside" in log.read_text("utf-8"))
            assert process.poll() is None
            assert (
                "holdfast_gateway_journal_set_aside 1.0"
                in httpx.get(f"{url}/metrics", timeout=120).text
            )
        assert "Traceback" not in log.read_text("utf-8")
