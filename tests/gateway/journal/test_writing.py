"""The journal's segments as they are written: every group, or nothing of it, whatever fails."""

import asyncio
import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.base.errors import JournalFull, JournalUnavailable
from gateway.journal import files
from gateway.journal.book import Book
from gateway.journal.files import segment_files
from gateway.journal.live_ids import names_of
from gateway.journal.opening import open_journal
from gateway.journal.reading import read_journal
from gateway.journal.segments import Kind, decode, encode, scan
from gateway.journal.state import Place, aside_of
from gateway.journal.writer import Journal
from tests.gateway.journal.test_journal import record

MIB = 1 << 20
Turns = dict[str, tuple[str, bytes]]
"""What the journal must hold: of each turn its table and its bytes."""


def held_in(directory: Path) -> Turns:
    """What a start would read."""
    found = read_journal(directory)
    assert not (found.damaged or found.missing or found.broken), found
    paths = segment_files(directory)

    def payload(turn_id: str, place: Place) -> bytes:
        told = decode(paths[place.segment].read_bytes(), place.offset)
        assert told is not None and told.payload is not None and told.turn_id == turn_id
        return told.payload if place.aside is None else aside_of(told.payload)[1]

    state = found.state
    tables = {"open": state.open, "closed": state.closed, "aside": state.aside}
    return {i: (name, payload(i, place)) for name, t in tables.items() for i, place in t.items()}


KINDS = ("open", "close", "rewrite", "forget", "aside", "found")


class Model:
    """Random changes of a book, and what must come of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.turns: Turns = {}
        self.number = 0

    def of(self, *tables: str) -> list[str]:
        return [turn_id for turn_id, (table, _) in self.turns.items() if table in tables]

    def change(self, book: Book) -> None:
        rng, content = self.rng, self.rng.randbytes(self.rng.choice((20, 700, 6000)))
        turns, opened = self.of("open", "closed"), self.of("open")
        kind = rng.choices(KINDS, (6, 3, 2, 1, 1, 1))[0]
        if kind == "open":
            self.number += 1
            turn_id = f"msg_{self.number:08}"
            book.open(turn_id, content)
            self.turns[turn_id] = ("open", content)
        elif kind in ("close", "rewrite") and opened:
            turn_id = rng.choice(opened)
            (book.close if kind == "close" else book.rewrite)(turn_id, content)
            self.turns[turn_id] = ("closed" if kind == "close" else "open", content)
        elif kind == "forget" and turns:
            gone = rng.sample(turns, rng.randint(1, min(6, len(turns))))
            assert book.forget([*gone, "msg_unknown", gone[0]]) == len(gone)
            for turn_id in gone:
                del self.turns[turn_id]
        elif kind == "aside" and turns and len(self.of("aside")) < 5:
            turn_id = rng.choice(turns)
            assert book.set_aside([turn_id], "reason") == 1
            self.turns[turn_id] = ("aside", self.turns[turn_id][1])
        elif kind == "found" and (aside := self.of("aside")):
            assert book.found([aside[0]]) == 1
            del self.turns[aside[0]]


class Failing:
    """`os.fdatasync` that fails as often as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        self.calls = 0
        self._real: Callable[[int], None] = os.fdatasync
        monkeypatch.setattr(files.os, "fdatasync", self)

    def __call__(self, file: int) -> None:
        self.calls += 1
        if self.times:
            self.times -= 1
            raise OSError(errno.EIO, "Input/output error")
        self._real(file)


@pytest.mark.parametrize("seed", range(4))
def test_after_any_changes_failures_kills_and_starts_the_journal_holds_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    model, failing, directory = Model(seed), Failing(monkeypatch), tmp_path / "journal"
    directory.mkdir()
    opened = open_journal(directory, MIB)
    for step in range(400):
        committed = dict(model.turns)
        for _ in range(model.rng.randint(1, 4)):
            model.change(opened.book)
        failing.times = int(model.rng.random() < 0.1)
        try:
            opened.book.commit()
        except OSError:
            model.turns = committed
        finally:
            opened.book.undo()
        failing.times = 0
        opened.book.clean()
        if step % 40 == 0:
            killed = tmp_path / "killed"
            shutil.copytree(directory, killed)
            assert held_in(killed) == model.turns
            shutil.rmtree(killed)
        if model.rng.random() < 0.03:
            opened.ids.close()
            opened.book.files.close()
            for path in names_of(directory):
                path.unlink()  # nobody has kept them up to date here
            opened = open_journal(directory, MIB)
    assert held_in(directory) == model.turns and failing.calls > 250
    live = sum(opened.book.state.live.values())
    assert sum(path.stat().st_size for path in segment_files(directory).values()) < 2 * live + MIB
    opened.ids.close()
    opened.book.files.close()


def test_a_turn_whose_sync_failed_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the machine may leave its bytes in the segment. The next head tells the end."""

    async def check() -> None:
        journal, failing = Journal(tmp_path), Failing(monkeypatch)
        first, refused, last = (record(journal, number) for number in range(3))
        await journal.open(first)
        failing.times = 2  # the second time the turn is tried alone
        with pytest.raises((JournalFull, JournalUnavailable)):
            await journal.open(refused)
        for _ in range(400):
            if journal.has_room:
                break
            await asyncio.sleep(0.05)
        assert set(held_in(tmp_path)) == {first.id} and max(segment_files(tmp_path)) > 1
        path = segment_files(tmp_path)[1]
        end = scan(path.read_bytes()).end
        left = encode(Kind.OPEN, 99, refused.id, b"{}")
        path.write_bytes(path.read_bytes()[:end] + left)
        await journal.open(last)
        await journal.close(last)
        await journal.stop()
        assert set(held_in(tmp_path)) == {first.id, last.id}

    asyncio.run(check())


def test_each_groups_segment_and_a_new_ones_name_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def noting(real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(file: int) -> None:
            real(file)
            synced.append(os.readlink(f"/proc/self/fd/{file}"))

        return sync

    for name in ("fdatasync", "fsync"):
        monkeypatch.setattr(files.os, name, noting(getattr(os, name)))
    opened = open_journal(tmp_path, MIB)
    begun = set()
    for number in range(20):
        synced.clear()
        opened.book.open(f"msg_{number}", bytes(6000))
        is_new = opened.book.files.number not in begun and number > 0
        begun.add(opened.book.files.number)
        opened.book.commit()
        path = segment_files(tmp_path)[opened.book.files.number]
        assert synced == [str(path), *([str(tmp_path)] if is_new else [])]
    assert len(begun) > 2
    opened.ids.close()
    opened.book.files.close()


def test_damage_of_an_earlier_group_is_not_taken_for_what_a_crash_tore(tmp_path: Path) -> None:
    opened = open_journal(tmp_path, MIB)
    for number in range(3):
        opened.book.open(f"msg_{number}", b"the record of %d" % number)
        opened.book.commit()
    opened.ids.close()
    opened.book.files.close()
    (path,) = segment_files(tmp_path).values()
    path.write_bytes(path.read_bytes().replace(b"the record of 0", b"the record of X"))
    found = read_journal(tmp_path)
    assert set(found.broken) == {"msg_0"} and found.torn is None


def test_a_disk_that_fails_for_a_while_loses_no_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        journal, failing = Journal(tmp_path), Failing(monkeypatch)
        turn = record(journal, 1)
        await journal.open(turn)
        failing.times = 5
        turn.outcome = "stop"
        await journal.close(turn)
        assert [found.outcome for found in await journal.closed_turns(10)] == ["stop"]
        await journal.stop()
        assert len(segment_files(tmp_path)) <= 3

    asyncio.run(check())
    state = read_journal(tmp_path).state
    assert len(state.closed) == 1 and not state.open


def test_a_turn_that_stays_keeps_no_room_of_those_that_went(tmp_path: Path) -> None:
    async def check() -> None:
        journal = Journal(tmp_path, MIB)
        long, aside = record(journal, 1_000_000), record(journal, 1_000_001)
        await journal.open(long)
        await journal.open(aside)
        await journal.set_aside([aside.id], "refused by the ledger")
        for number in range(1500):
            turn = record(journal, number)
            await journal.open(turn)
            turn.outcome = "stop"
            await journal.close(turn)
            await journal.forget([turn.id])
        assert journal.num_bytes < MIB // 4
        assert [turn.id for turn in await journal.open_turns()] == [long.id]
        assert await journal.set_aside_turns() == [aside.id]
        await journal.stop()
        assert set(held_in(tmp_path)) == {long.id, aside.id}

    asyncio.run(check())


def test_a_folder_that_can_not_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalUnavailable, match="Not a directory"):
        Journal(tmp_path / "file" / "journal")
