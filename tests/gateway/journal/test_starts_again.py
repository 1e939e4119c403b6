"""What a journal tells of its turns over several starts, some of them killed, some with damage."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.base.errors import LedgerRefused
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.journal import live_ids
from gateway.journal.drain import Drain
from gateway.journal.files import segment_files
from gateway.journal.live_ids import Held, LiveIds, names_of
from gateway.journal.writer import Journal
from tests.gateway.journal.test_journal import record


class Rows:
    """The ids of a ledger's rows. It refuses the turns of `refused`."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.refused: set[str] = set()

    async def insert(self, turns: Sequence[TurnRecord]) -> None:
        if any(turn.id in self.refused for turn in turns):
            raise LedgerRefused
        self.ids |= {turn.id for turn in turns}

    async def known(self, turn_ids: Sequence[str]) -> set[str]:
        return self.ids & set(turn_ids)


async def _nobody(_engine: str, _turns: list[str]) -> None: ...


def errors(logged: list[dict[str, object]]) -> list[tuple[object, object]]:
    return [(line["event"], line.get("turn")) for line in logged if line["log_level"] == "error"]


def lives(
    directory: Path, rows: Rows, opened: int, closed: int, *, is_killed: bool = False
) -> tuple[list[str], list[tuple[object, object]]]:
    """A gateway that opens and closes some turns. Return their ids, and the errors of its log.

    One that is killed ends before its drain has looked at the ledger.
    """

    first = 100 * max(segment_files(directory), default=0)

    async def run() -> list[str]:
        journal = Journal(directory)
        drain = Drain(journal, rows.insert, _nobody, Metrics(), rows.known)
        if not is_killed:
            await drain.step()
        turns = [record(journal, first + number) for number in range(opened)]
        for turn in turns:
            await journal.open(turn)
        for turn in turns[:closed]:
            turn.outcome = "stop"
            await journal.close(turn)
        if not is_killed:
            await drain.step()
        await journal.stop()
        return [turn.id for turn in turns]

    with capture_logs() as logged:
        ids = asyncio.run(run())
    return ids, errors(logged)


def keep(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in names_of(directory)}


def put_back(kept: dict[Path, bytes]) -> None:
    for path, content in kept.items():
        path.write_bytes(content)


@pytest.mark.parametrize("num_kills", [0, 1, 3])
def test_starts_that_are_killed_forget_no_name_of_a_drained_turn(
    tmp_path: Path, num_kills: int
) -> None:
    rows = Rows()
    ids, _ = lives(tmp_path, rows, 5, 5)
    assert rows.ids == set(ids)
    for _ in range(num_kills):
        lives(tmp_path, rows, 0, 0, is_killed=True)
    rows.ids = set(ids[3:])  # an older copy of the database
    _, told = lives(tmp_path, rows, 0, 0)
    assert told == [("turn_lost", each) for each in ids[:3]]


def test_turns_that_an_older_ledger_lacks_are_set_aside_until_the_right_one_is_back(
    tmp_path: Path,
) -> None:
    rows = Rows()
    lives(tmp_path, rows, 3, 3)
    right, rows.ids = rows.ids, set()
    lives(tmp_path, rows, 0, 0)

    async def set_aside() -> list[str]:
        journal = Journal(tmp_path)
        found = await journal.set_aside_turns()
        await journal.stop()
        return found

    assert asyncio.run(set_aside()) == sorted(right)
    rows.ids = right
    lives(tmp_path, rows, 0, 0)
    assert asyncio.run(set_aside()) == []
    assert lives(tmp_path, rows, 0, 0)[1] == []


def test_a_kill_between_the_forgetting_and_the_lists_is_no_loss(tmp_path: Path) -> None:
    rows, kept = Rows(), {}

    async def run() -> tuple[str, list[str]]:
        journal = Journal(tmp_path)
        turns = [record(journal, number) for number in range(3)]
        for turn in turns:
            await journal.open(turn)
            turn.outcome = "stop"
            await journal.close(turn)
        kept.update(keep(tmp_path))
        await Drain(journal, rows.insert, _nobody, Metrics(), rows.known).step()
        await journal.stop()
        return journal.instance, [turn.id for turn in turns]

    instance, ids = asyncio.run(run())
    put_back(kept)
    with capture_logs() as logged:
        journal = Journal(tmp_path)
        asyncio.run(journal.stop())
    assert errors(logged) == []
    assert journal.instance == instance
    assert journal.forgotten == ids  # the ledger is asked for them, as for all others
    rows.ids.clear()
    assert lives(tmp_path, rows, 0, 0)[1] == [("turn_lost", each) for each in ids]


def test_a_turn_that_the_ledger_refused_is_told_once_and_its_loss_is_named(tmp_path: Path) -> None:
    rows = Rows()

    async def refuse() -> str:
        journal = Journal(tmp_path)
        turn = record(journal, 77)
        rows.refused.add(turn.id)
        await journal.open(turn)
        await journal.close(turn)
        await Drain(journal, rows.insert, _nobody, Metrics(), rows.known).step()
        await journal.stop()
        return turn.id

    turn_id = asyncio.run(refuse())
    for _ in range(2):
        assert lives(tmp_path, rows, 1, 1)[1] == []
    next(iter(segment_files(tmp_path).values())).unlink()  # no head tells of the oldest
    _, told = lives(tmp_path, rows, 0, 0)
    assert ("turn_set_aside", turn_id) in told


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_segment_of_another_journal_is_not_taken_for_its_own(tmp_path: Path, which: int) -> None:
    """As where the files of two workers are mixed up. The turns there are the other journal's."""
    rows, ids = Rows(), {}
    for name in ("journal", "journal-2"):
        ids[name] = [lives(tmp_path / name, rows, 2, 1, is_killed=True)[0] for _ in range(3)]
    ours, theirs = (list(segment_files(tmp_path / name).values())[which] for name in ids)
    shutil.copy(theirs, ours)
    _, told = lives(tmp_path / "journal", rows, 0, 0)
    assert ("journal_damaged", None) in told
    own = [each for some in ids["journal"] for each in some]
    named = {turn for _, turn in told}
    assert set(ids["journal"][which]) <= named
    assert rows.ids <= set(own)  # none of the other's, whose gateway may have newer records
    closed = {some[0] for number, some in enumerate(ids["journal"]) if number != which}
    assert rows.ids == closed
    assert lives(tmp_path / "journal", rows, 0, 0)[1] == [
        ("turn_lost", each) for each in sorted(ids["journal"][which])
    ]


def test_a_start_that_is_killed_before_its_lists_are_written_is_no_second_loss(
    tmp_path: Path,
) -> None:
    rows = Rows()
    lives(tmp_path, rows, 2, 1, is_killed=True)
    list(segment_files(tmp_path).values())[-1].unlink()
    kept = keep(tmp_path)
    journal = Journal(tmp_path)
    asyncio.run(journal.stop())
    put_back(kept)
    with capture_logs() as logged:
        again = Journal(tmp_path)
        asyncio.run(again.stop())
    assert errors(logged) == []
    assert again.instance == journal.instance


def test_a_list_that_a_full_disk_refused_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_ids, "_RETRY_SECONDS", 0.0)
    rows = Rows()
    lives(tmp_path, rows, 1, 1)
    full = [path.with_suffix(".new") for path in names_of(tmp_path)]
    for path in full:
        path.mkdir()  # writing there fails

    async def run() -> list[str]:
        journal = Journal(tmp_path)
        first, second = record(journal, 5), record(journal, 6)
        await journal.open(first)
        for path in full:
            path.rmdir()
        await journal.open(second)
        await journal.stop()
        return [first.id, second.id]

    ids = asyncio.run(run())
    assert live_ids.read(names_of(tmp_path)).alive == set(ids)


def test_lists_of_many_turns_are_not_begun_anew_with_each_of_them(tmp_path: Path) -> None:
    """While the database is away the journal has many turns."""
    held = [f"msg_12345678{number:012}" for number in range(40_000)]
    ids = LiveIds(names_of(tmp_path), "12345678", {}, Held(held, [], 0, (1, 1)))
    assert names_of(tmp_path)[0].stat().st_size > live_ids.MAX_BYTES
    ids.add(["msg_1"], [], [], (1, 2))
    assert not ids.is_due
    ids.add(held, [], [], (1, 3))
    ids.add(["msg_2"], [], [], (1, 4))
    assert ids.is_due
    ids.close()


def test_a_segment_that_is_deleted_under_a_gateway_stops_no_turn_of_another(tmp_path: Path) -> None:
    rows = Rows()
    early, _ = lives(tmp_path, rows, 2, 2, is_killed=True)
    lives(tmp_path, rows, 0, 0, is_killed=True)

    async def run() -> tuple[str, list[str]]:
        journal = Journal(tmp_path)
        next(iter(segment_files(tmp_path).values())).unlink()
        turn = record(journal, 9)
        await journal.open(turn)
        await journal.close(turn)
        drain = Drain(journal, rows.insert, _nobody, Metrics(), rows.known)
        await drain.step()
        await drain.step()
        aside = await journal.set_aside_turns()
        await journal.stop()
        return turn.id, aside

    turn_id, aside = asyncio.run(run())
    assert rows.ids == {turn_id}
    assert aside == sorted(early)
