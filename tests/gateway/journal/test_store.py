"""The journal's file: what is on disk, its room, its owner, and what becomes of a damaged one."""

import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from gateway.base.errors import JournalFull, JournalUnavailable
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.journal import store
from gateway.journal.drain import Drain
from gateway.journal.file import rows_in
from gateway.journal.store import Journal
from gateway.journal.table import ASIDE, BROKEN, LOST, Row, new_row
from gateway.ledger.database import Ledger
from scripts.stack import serving_gateway
from tests.gateway.journal.test_journal import nobody, record
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually, make_settings, migrate, serve

MIB = 1 << 20
# The largest fingerprint there is.
FINGERPRINT = os.urandom(3100)
FILES = ("journal.db", "journal.db-wal", "journal.db-shm")


class Commits:
    """Commits of the journal, of which the next `times` fail with this code of SQLite's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = self.calls = 0
        self.code = sqlite3.SQLITE_IOERR
        self._real = store._commit
        monkeypatch.setattr(store, "_commit", self)

    def __call__(self, db: sqlite3.Connection) -> None:
        self.calls += 1
        if self.times:
            self.times -= 1
            error = sqlite3.OperationalError("it fails")
            error.sqlite_errorcode = self.code
            raise error
        self._real(db)


def on(directory: Path, work: Callable[[Journal], Awaitable[object]], **options: int) -> Journal:
    """A journal's life from its start to its stop."""

    async def live() -> Journal:
        journal = Journal(directory, **options).start()
        try:
            await work(journal)
        finally:
            await journal.stop()
        return journal

    return asyncio.run(live())


async def close(journal: Journal, turn: TurnRecord) -> None:
    turn.outcome = "stop"
    turn.fingerprint = FINGERPRINT
    await journal.close(turn)


async def room(journal: Journal) -> None:
    """Wait until there is room."""
    for _ in range(400):
        if journal.has_room:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("there is no room")


def states(directory: Path) -> dict[str, str]:
    return {row.id: row.state for row in rows_in(directory)}


def killed(directory: Path, number: int = 30) -> list[str]:
    """A journal as a kill leaves it: the odd turns are open, the even ones closed. Their ids."""
    ids: list[str] = []

    async def fill(journal: Journal) -> None:
        for index in range(number):
            turn = record(journal, index)
            ids.append(turn.id)
            await journal.open(turn)
            if index % 2 == 0:
                await close(journal, turn)
        shutil.copytree(directory, directory.parent / "copy")

    on(directory, fill)
    shutil.rmtree(directory)
    (directory.parent / "copy").rename(directory)
    return ids


def whole(directory: Path) -> None:
    """Bring what is in the log over to the file."""
    with contextlib.closing(sqlite3.connect(directory / "journal.db")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def test_a_turn_is_open_closed_once_rewritten_only_while_open_and_forgotten(tmp_path: Path) -> None:
    async def work(journal: Journal) -> None:
        first = record(journal, 1)
        second = record(journal, 2)
        assert await journal.unknown([first.id, second.id]) == [first.id, second.id]
        await journal.open(first)
        await journal.open(second)
        assert (journal.backlog, journal.num_closed) == (2, 0)
        first.attempt = 2
        second.attempt = 3
        await journal.rewrite(first)
        assert [turn.attempt for turn in await journal.open_turns()] == [2, 1]
        await journal.close(second)
        second.attempt = 4
        await journal.rewrite(second)
        await journal.close(second)
        assert [turn.attempt for turn in await journal.closed_turns(10)] == [3]
        assert (journal.backlog, journal.num_closed) == (2, 1)
        await journal.forget([second.id, "msg_unknown"])
        assert await journal.unknown([first.id, second.id]) == [second.id]
        assert (journal.backlog, journal.num_closed) == (1, 0)

    assert on(tmp_path, work).backlog == 1


def test_what_is_set_aside_keeps_its_bytes_until_it_is_found_and_a_close_brings_it_back(
    tmp_path: Path,
) -> None:
    async def work(journal: Journal) -> None:
        turn = record(journal, 1)
        late = record(journal, 2)
        await journal.open(turn)
        await journal.set_aside([turn.id, late.id], LOST)
        await journal.set_aside([turn.id], "again")
        assert (journal.backlog, journal.num_set_aside) == (0, 2)
        assert await journal.set_aside_turns() == await journal.set_aside_turns(LOST)
        rows = {row.id: (row.reason, bool(row.record), bool(row.at)) for row in rows_in(tmp_path)}
        assert rows == {turn.id: (LOST, True, True), late.id: (LOST, False, True)}
        await journal.close(late)
        assert [turn.id for turn in await journal.closed_turns(10)] == [late.id]
        await journal.found([turn.id])
        assert journal.num_set_aside == 0

    on(tmp_path, work)


def test_after_any_failures_the_journal_holds_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    commits = Commits(monkeypatch)
    opened: set[str] = set()
    closed: set[str] = set()

    async def live(journal: Journal) -> None:
        async def turn(number: int) -> None:
            opened_turn = record(journal, number)
            await asyncio.sleep(2 * rng.random())
            try:
                await journal.open(opened_turn)
            except (JournalFull, JournalUnavailable):
                return
            opened.add(opened_turn.id)
            commits.times = int(rng.random() < 0.05)
            if rng.random() < 0.8:
                await journal.close(opened_turn)
                closed.add(opened_turn.id)

        await asyncio.gather(*map(turn, range(100)))
        commits.times = 0
        await room(journal)
        shutil.copytree(tmp_path / "journal", tmp_path / "killed")

    journal = on(tmp_path / "journal", live)
    assert opened and closed and commits.calls > 10
    expected = {turn_id: "closed" if turn_id in closed else "open" for turn_id in opened}
    assert states(tmp_path / "killed") == states(tmp_path / "journal") == expected
    assert (journal.backlog, journal.num_closed) == (len(opened), len(closed))


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_FSYNC])
def test_a_turn_whose_opening_failed_is_not_there_and_a_close_is_tried_until_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    commits = Commits(monkeypatch)

    async def work(journal: Journal) -> None:
        turn = record(journal, 1)
        refused = record(journal, 2)
        await journal.open(turn)
        commits.times = 2
        commits.code = code
        with pytest.raises(JournalFull):
            await journal.open(refused)
        assert not journal.has_room
        with pytest.raises(JournalFull):
            await journal.open(refused)
        await journal.close(turn)
        await room(journal)
        assert states(tmp_path) == {turn.id: "closed"}

    on(tmp_path, work)


def test_an_opening_that_takes_too_long_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_DEADLINE_SECONDS", 0.2)
    real = store._commit
    goes_on = threading.Event()

    def commit(db: sqlite3.Connection) -> None:
        goes_on.wait()
        real(db)

    async def work(journal: Journal) -> None:
        monkeypatch.setattr(store, "_commit", commit)
        late = record(journal, 1)
        turn = record(journal, 2)
        leaving = asyncio.create_task(journal.open(turn))
        with pytest.raises(JournalUnavailable):
            await journal.open(late)
        leaving.cancel()
        await asyncio.sleep(0)
        monkeypatch.setattr(store, "_DEADLINE_SECONDS", 60.0)
        goes_on.set()
        assert await journal.unknown([late.id, turn.id]) == [late.id, turn.id]

    on(tmp_path, work)


def test_a_full_journal_refuses_new_turns_closes_the_open_ones_and_recovers(tmp_path: Path) -> None:
    async def work(journal: Journal) -> None:
        turns: list[TurnRecord] = []
        count = 0
        with pytest.raises(JournalFull):
            while True:
                turn = record(journal, count)
                await journal.open(turn)
                turns.append(turn)
                count += 1
                if len(turns) > 4:
                    await close(journal, turns.pop(0))
        assert count > 50 and not journal.has_room
        for turn in turns:
            await close(journal, turn)
        assert not await journal.open_turns()
        turn_ids = [turn.id for turn in await journal.closed_turns(100_000)]
        assert len(turn_ids) == len(set(turn_ids)) == journal.backlog == count
        assert MIB <= journal.num_bytes <= MIB + MIB // 8
        await journal.forget(turn_ids[: count // 2])
        assert journal.has_room
        await journal.open(record(journal, count))

    on(tmp_path, work, max_bytes=MIB)


def test_a_journal_has_one_owner_and_a_folder_that_can_be_written(tmp_path: Path) -> None:
    async def work(_: Journal) -> None:
        with pytest.raises(JournalUnavailable, match="used by another process"):
            Journal(tmp_path / "journal").start()

    for _ in range(2):
        on(tmp_path / "journal", work)
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalUnavailable, match="Not a directory"):
        Journal(tmp_path / "file" / "journal").start()


async def nothing(_: Journal) -> None: ...


def rewrite(directory: Path, change: Callable[[bytes], bytes]) -> None:
    whole(directory)
    path = directory / "journal.db"
    path.write_bytes(change(path.read_bytes()))


def flip_a_page(directory: Path) -> None:
    """Spoil a page in the middle of the file."""

    def flipped(content: bytes) -> bytes:
        at = len(content) // 2 // 4096 * 4096
        return content[:at] + os.urandom(4096) + content[at + 4096 :]

    rewrite(directory, flipped)


def spoil_the_head(directory: Path) -> None:
    rewrite(directory, lambda content: b"no database here" + content[16:])


def cut(directory: Path) -> None:
    rewrite(directory, lambda content: content[: len(content) // 2])


def take_another_database(directory: Path) -> None:
    whole(directory)
    (directory / "journal.db").unlink()
    with contextlib.closing(sqlite3.connect(directory / "journal.db")) as db, db:
        db.execute("CREATE TABLE turns (id TEXT PRIMARY KEY, closed INTEGER)")


def lose_the_file(directory: Path) -> None:
    (directory / "journal.db").unlink()


DAMAGES = [flip_a_page, spoil_the_head, cut, take_another_database, lose_the_file]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_kept_whole_and_the_journal_goes_on_with_what_can_be_read(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    directory = tmp_path / "journal"
    ids = killed(directory)
    (old,) = (directory / "instances").read_text().split()
    damage(directory)
    file_bytes = {
        name: (directory / name).read_bytes() for name in FILES[:2] if (directory / name).exists()
    }

    async def work(journal: Journal) -> None:
        assert journal.has_room and journal.instance != old and journal.instances[0] == old
        turn = record(journal, 99)
        await journal.open(turn)
        await journal.close(turn)

    with capture_logs() as logged:
        first = on(directory, work)
    again = on(directory, nothing)
    assert again.instances == first.instances and again.damaged == first.damaged
    (event,) = (line for line in logged if line["event"] == "journal_damaged")
    (name,) = first.damaged
    assert event["log_level"] == "error" and event["kept"] == name
    assert {file: (directory / name / file).read_bytes() for file in file_bytes} == file_bytes
    turn_states = states(directory)
    assert turn_states.keys() - {f"msg_{first.instance}000099"} <= set(ids)
    for turn_id in turn_states.keys() & set(ids):
        assert turn_states[turn_id] in (("closed", "open")[ids.index(turn_id) % 2], ASIDE)
    if damage is flip_a_page:
        assert len(turn_states) > 5


def test_a_start_that_is_killed_while_it_reads_a_kept_file_reads_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = killed(tmp_path / "journal")
    flip_a_page(tmp_path / "journal")

    def killed_here(_: Path) -> Iterator[Row]:
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(store, "readable_rows", killed_here)
        with pytest.raises(JournalUnavailable, match="killed"):
            Journal(tmp_path / "journal").start()
    journal = on(tmp_path / "journal", nothing)
    assert journal.backlog > 5 and set(states(tmp_path / "journal")) <= set(ids)


def test_a_file_that_is_damaged_under_the_gateway_is_replaced_and_no_running_turn_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = Commits(monkeypatch)

    async def work(journal: Journal) -> None:
        turns = [record(journal, number) for number in range(3)]
        for turn in turns:
            await journal.open(turn)
        old = journal.instance
        commits.times = 1
        commits.code = sqlite3.SQLITE_CORRUPT
        await journal.close(turns[0])
        assert len(journal.damaged) == 1 and old in journal.instances and journal.instance != old
        assert states(tmp_path) == {turns[0].id: "closed", turns[1].id: "open", turns[2].id: "open"}
        monkeypatch.setattr(store, "readable_rows", lambda _: iter(()))
        commits.times = 1
        await journal.close(turns[1])
        await journal.close(turns[2])
        assert sorted(states(tmp_path)) == sorted(turn.id for turn in turns[1:])
        assert journal.num_closed == 2 and len(journal.damaged) == 2

    on(tmp_path, work)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_record_whose_digit_flipped_is_set_aside_and_stops_no_other(
    tmp_path: Path, is_closed: bool
) -> None:
    settings = make_settings(tmp_path)
    migrate(settings)
    ids: list[str] = []

    async def make(journal: Journal) -> None:
        turns = [record(journal, number) for number in range(4)]
        ids.extend(turn.id for turn in turns)
        for number, turn in enumerate(turns):
            await journal.open(turn)
            if number or is_closed:
                turn.outcome = "stop"
                turn.output_tokens = 7
                await journal.close(turn)

    on(tmp_path / "journal", make)
    path = tmp_path / "journal" / "journal.db"
    content = path.read_bytes()
    at = content.rfind(b'"id":"' + ids[0].encode())
    path.write_bytes(content[:at] + content[at:].replace(b'"opened_at":"2', b'"opened_at":"3', 1))
    assert path.read_bytes() != content

    async def drain(journal: Journal) -> None:
        ledger = Ledger(settings.ledger_url)
        assert not await journal.open_turns()
        await Drain(journal, ledger.insert_turns, nobody, Metrics(), ledger.known).step()
        assert await journal.set_aside_turns(BROKEN) == [ids[0]]
        assert await ledger.known(ids) == set(ids[1:])
        await ledger.close()

    journal = on(tmp_path / "journal", drain)
    assert journal.num_set_aside == 1
    assert [row.state for row in rows_in(tmp_path / "journal")] == [ASIDE]


def test_a_gateway_starts_with_a_damaged_file_and_a_record_that_nobody_can_read(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "journal"
    log = tmp_path / "log"
    killed(directory, 4)
    spoil_the_head(directory)
    on(directory, nothing)
    with contextlib.closing(sqlite3.connect(directory / "journal.db")) as db, db:
        row = new_row("msg_0", "open", b"\xff\xfe no record")
        db.execute("INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?)", row)
    with (
        serve(ScriptedEngine()) as engine,
        serving_gateway(tmp_path, [engine], log=log) as gateway,
    ):
        url = gateway.wait().url
        eventually(lambda: "set_aside" in log.read_text("utf-8"))
        assert gateway.process.poll() is None
        metrics = httpx.get(f"{url}/metrics", timeout=120).text
        assert "journal_set_aside 1.0" in metrics and "journal_damaged 1.0" in metrics
        assert len(httpx.get(f"{url}/readyz", timeout=120).json()["journal"]["damaged"]) == 1
    assert "Traceback" not in log.read_text("utf-8")
