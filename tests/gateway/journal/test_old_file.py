"""A journal of before, a database of SQLite, is taken over at the next start and loses nothing."""

import asyncio
import os
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.base.record import TurnRecord
from gateway.cli.left import left_journals
from gateway.cli.main import main
from gateway.journal.live_ids import Held, LiveIds, names_of
from gateway.journal.reading import read_journal
from gateway.journal.writer import Journal
from tests.gateway.journal.old_journals import write_old

INSTANCE = "0123abcd"


def turns_of(count: int) -> list[TurnRecord]:
    """The even ones are open."""
    return [
        TurnRecord(
            id=f"msg_{INSTANCE}{number:06}",
            instance=INSTANCE,
            workspace="default",
            key_id="key",
            model="m",
            stream=False,
            opened_at=datetime(2026, 11, 21, tzinfo=UTC),
            outcome="stop" if number % 2 else "open",
            output_tokens=number,
            fingerprint=b"f" * (number * 97 % 3000),
        )
        for number in range(count)
    ]


async def _taken_over(directory: Path) -> tuple[Journal, list[TurnRecord], list[str]]:
    journal = Journal(directory)
    turns = [*await journal.open_turns(), *await journal.closed_turns(10_000)]
    aside = await journal.set_aside_turns()
    await journal.stop()
    return journal, turns, aside


def take_over(directory: Path) -> tuple[Journal, list[TurnRecord], list[str]]:
    return asyncio.run(_taken_over(directory))


@pytest.mark.parametrize("is_killed", [True, False])
def test_every_turn_is_taken_over_once_under_the_same_instance(
    tmp_path: Path, is_killed: bool
) -> None:
    turns = turns_of(300)
    write_old(
        tmp_path,
        turns,
        instance=INSTANCE,
        num_forgotten=7,
        aside=["msg_aside"],
        is_killed=is_killed,
    )
    LiveIds(
        names_of(tmp_path)[:2], INSTANCE, {}, Held([turn.id for turn in turns], [], 7, (0, 0))
    ).close()
    with capture_logs() as logged:
        journal, found, aside = take_over(tmp_path)
    assert not [line for line in logged if line["log_level"] == "error"]
    assert sorted(found, key=lambda turn: turn.id) == turns and aside == ["msg_aside"]
    assert journal.instances == (INSTANCE, "00000000")
    assert not list(tmp_path.glob("journal.db*"))
    state = read_journal(tmp_path).state
    assert state.num_forgotten == 7 and len(state.open) == len(state.closed) == 150
    again, found, aside = take_over(tmp_path)
    assert len(found) == 300 and aside == ["msg_aside"] and again.instance == INSTANCE


def test_a_start_that_was_killed_before_the_old_file_went_changes_nothing(tmp_path: Path) -> None:
    write_old(tmp_path, turns_of(20), instance=INSTANCE)
    take_over(tmp_path)
    write_old(tmp_path, turns_of(20), instance=INSTANCE)
    journal, found, aside = take_over(tmp_path)
    assert len(found) == 20 and not aside and journal.instance == INSTANCE


@pytest.mark.parametrize("seed", range(6))
def test_what_damage_took_from_an_old_journal_is_named(tmp_path: Path, seed: int) -> None:
    rng, turns = random.Random(seed), turns_of(40)
    write_old(tmp_path, turns, instance=INSTANCE, is_killed=seed % 2 == 0)
    LiveIds(
        names_of(tmp_path)[:2], INSTANCE, {}, Held([turn.id for turn in turns], [], 0, (0, 0))
    ).close()
    path = max(tmp_path.glob("journal.db*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    if seed < 2:
        content = content[: rng.randrange(len(content))]
    elif seed < 4:
        content = bytearray()
    else:
        start = rng.randrange(len(content) // 2)
        content[start : start + 8192] = os.urandom(8192)
    path.write_bytes(content)
    with capture_logs() as logged:
        journal, found, aside = take_over(tmp_path)
    by_id = {turn.id: turn for turn in turns}
    assert {turn.id for turn in found} | set(aside) == set(by_id)
    assert all(turn == by_id[turn.id] for turn in found)
    assert not aside or journal.instance != INSTANCE
    assert not aside or "turn_set_aside" in str(logged)


@pytest.mark.parametrize("is_emptied", [True, False])
def test_what_only_the_write_ahead_log_still_has_is_kept(tmp_path: Path, is_emptied: bool) -> None:
    """SQLite deletes a log whose database file is gone or empty."""
    turns = turns_of(12)
    write_old(tmp_path, turns, instance=INSTANCE)
    (tmp_path / "journal.db").unlink()
    if is_emptied:
        (tmp_path / "journal.db").touch()
    _, found, _ = take_over(tmp_path)
    assert sorted(found, key=lambda turn: turn.id) == turns
    assert list(tmp_path.glob("damaged-*/journal.db-wal"))


def test_commands_read_a_journal_that_was_not_taken_over_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_old(tmp_path / "journal-2", turns_of(2), instance=INSTANCE, aside=["msg_aside"])
    assert left_journals(tmp_path, 1) == [tmp_path / "journal-2"]
    assert main(["journal", "list", "--journal", str(tmp_path / "journal-2")]) == 0
    assert "msg_aside 2026-11-01T00:00:00+00:00 refused by the ledger 4" in capsys.readouterr().out
    take_over(tmp_path / "journal-2")
    assert main(["journal", "list", "--journal", str(tmp_path / "journal-2")]) == 0
    assert "msg_aside 2026-11-01T00:00:00+00:00 refused by the ledger 4" in capsys.readouterr().out
