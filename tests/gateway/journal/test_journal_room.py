"""The journal's room: a bound, a disk that fills up, one owner, and records of an older version."""

import asyncio
import contextlib
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.base.errors import JournalFull, JournalUnavailable
from gateway.base.record import TurnRecord
from gateway.journal.files import segment_files
from gateway.journal.old_file import SCHEMA
from gateway.journal.reading import read_journal
from gateway.journal.writer import Journal

MIB = 1 << 20
# The largest fingerprint there is.
FINGERPRINT = os.urandom(3100)


def record(journal: Journal, number: int) -> TurnRecord:
    return TurnRecord(
        id=f"msg_{journal.instance}{number:06}",
        instance=journal.instance,
        workspace="default",
        key_id="key",
        model="m",
        stream=False,
        opened_at=datetime(2026, 11, 21, tzinfo=UTC),
    )


async def fill(journal: Journal, num_open: int) -> tuple[int, list[TurnRecord]]:
    """Open and close turns until there is no room; the last `num_open` stay open."""
    turns: list[TurnRecord] = []
    for number in range(100_000):
        turn = record(journal, number)
        try:
            await journal.open(turn)
        except JournalFull:
            return number, turns
        turns.append(turn)
        if len(turns) > num_open:
            await close(journal, turns.pop(0))
    raise AssertionError("the journal has no bound")


async def close(journal: Journal, turn: TurnRecord) -> None:
    turn.outcome, turn.fingerprint = "stop", FINGERPRINT
    await journal.close(turn)


def check_files(directory: Path) -> None:
    found = read_journal(directory)
    assert not (found.damaged or found.missing or found.broken)


def test_a_full_journal_refuses_new_turns_closes_the_open_ones_and_recovers(tmp_path: Path) -> None:
    async def check() -> None:
        journal = Journal(tmp_path, MIB)
        count, opened = await fill(journal, 4)
        assert count > 50 and len(opened) == 4 and not journal.has_room
        for turn in opened:
            await close(journal, turn)
        assert not await journal.open_turns()
        kept = [turn.id for turn in await journal.closed_turns(100_000)]
        assert len(kept) == len(set(kept)) == journal.backlog == count
        sizes = [path.stat().st_size for path in segment_files(tmp_path).values()]
        assert sum(sizes) == journal.num_bytes <= MIB + MIB // 8
        await journal.forget(kept[: count // 2])
        assert journal.has_room
        await journal.open(record(journal, count))
        await journal.stop()
        check_files(tmp_path)

    asyncio.run(check())


def test_no_more_turns_are_open_than_the_reserve_can_close(tmp_path: Path) -> None:
    async def check() -> None:
        journal = Journal(tmp_path, MIB)
        with pytest.raises(JournalFull):
            for number in range(100):
                await journal.open(record(journal, number))
        opened = await journal.open_turns()
        assert 0 < len(opened) < 100
        await close(journal, opened[0])
        await journal.open(record(journal, 100))
        await journal.stop()

    asyncio.run(check())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system can't be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_starts_that_a_full_disk_refuses_leave_no_files(small_disk: Path) -> None:
    directory = small_disk / "journal"

    async def make() -> str:
        journal = Journal(directory, 8 * MIB)
        turn = record(journal, 1)
        await journal.open(turn)
        await journal.stop()
        return turn.id

    async def open_turns() -> list[str]:
        journal = Journal(directory, 8 * MIB)
        found = [turn.id for turn in await journal.open_turns()]
        await journal.stop()
        return found

    turn_id = asyncio.run(make())
    (directory / "reserve").unlink()
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    before = segment_files(directory)
    for _ in range(3):
        with pytest.raises(JournalUnavailable):
            Journal(directory, 8 * MIB)
    assert segment_files(directory) == before
    filler.unlink()
    assert asyncio.run(open_turns()) == [turn_id]


def test_a_disk_that_others_filled_stops_new_turns_only_and_harms_nothing(small_disk: Path) -> None:
    async def check() -> None:
        journal = Journal(small_disk / "journal", 8 * MIB)
        assert journal.has_room
        done = record(journal, 1_000_000)
        await journal.open(done)
        await close(journal, done)
        opened = [record(journal, 3_000_000 + number) for number in range(20)]
        for turn in opened:
            await journal.open(turn)
        filler = small_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(b"x" * 65536)
        count, more = await fill(journal, 0)
        assert not more and not journal.has_room
        for turn in opened:
            await close(journal, turn)
        assert not await journal.open_turns()
        assert len(await journal.closed_turns(100_000)) == 1 + len(opened) + count
        filler.unlink()
        for _ in range(400):
            if journal.has_room:
                break
            await asyncio.sleep(0.05)
        await journal.open(record(journal, 2_000_000))
        await journal.stop()
        check_files(small_disk / "journal")

    asyncio.run(check())


def test_a_gateway_starts_on_a_full_disk_and_settles_what_is_open(small_disk: Path) -> None:
    async def check() -> None:
        journal = Journal(small_disk / "journal", 8 * MIB)
        turn = record(journal, 1)
        await journal.open(turn)
        await journal.stop()
        with contextlib.suppress(OSError), (small_disk / "filler").open("wb") as file:
            while True:
                file.write(b"x" * 4096)
        journal = Journal(small_disk / "journal", 8 * MIB)
        assert not journal.has_room
        (found,) = await journal.open_turns()
        await close(journal, found)
        await journal.forget([turn.id])
        assert journal.backlog == 0
        await journal.stop()

    asyncio.run(check())


def test_a_work_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    """Queued up together, they go into one transaction."""

    async def check() -> None:
        journal = Journal(tmp_path)
        turns = [record(journal, number) for number in range(50)]
        twice = turns[:25] + turns[20:]
        results = await asyncio.gather(
            *(journal.open(turn) for turn in twice), return_exceptions=True
        )
        failed = [result for result in results if result is not None]
        assert len(failed) == 5 and {type(error) for error in failed} == {JournalUnavailable}
        assert len(await journal.open_turns()) == journal.backlog == 50
        await journal.stop()

    asyncio.run(check())


def test_a_journal_has_one_owner(tmp_path: Path) -> None:
    async def check() -> None:
        journal = Journal(tmp_path)
        with pytest.raises(JournalUnavailable, match="used by another process"):
            Journal(tmp_path)
        await journal.stop()
        await Journal(tmp_path).stop()

    asyncio.run(check())


def test_records_of_the_first_version_are_read(tmp_path: Path) -> None:
    old = (
        b'{"id":"msg_00000000a","instance":"00000000","workspace":"default","key_id":"key",'
        b'"model":"m","stream":false,"opened_at":"2026-11-21T12:00:00Z","outcome":"stop",'
        b'"input_tokens":7,"output_tokens":3,"gone":1}'
    )

    async def check() -> None:
        with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as db, db:
            db.executescript(SCHEMA)
            db.execute("INSERT INTO turns VALUES ('msg_00000000a', 1, ?)", (old,))
        journal = Journal(tmp_path)
        (turn,) = await journal.closed_turns(10)
        assert (turn.input_tokens, turn.prefix, turn.dialect) == (7, None, None)
        await journal.stop()

    asyncio.run(check())
