"""The format of segments: cuts and damage give a prefix or a named hole, and no wrong record."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.journal.files import segment_files
from gateway.journal.live_ids import names_of
from gateway.journal.opening import open_journal
from gateway.journal.reading import Found, read_journal
from gateway.journal.segments import MAGIC, Kind, Record, encode, scan
from gateway.journal.state import Head
from gateway.journal.writer import Journal
from tests.gateway.journal import test_journal

IDS = st.text("abcdefghijklmnopqrstuvwxyz0123456789_", min_size=1, max_size=64)
TURNS = st.sampled_from([Kind.OPEN, Kind.CLOSE])
ZEROS = 512


class Written(NamedTuple):
    kind: Kind
    group: int
    turn_id: str
    payload: bytes


@st.composite
def written(draw: st.DrawFn) -> list[Written]:
    """Records of groups of one to three."""
    found = []
    for group in range(draw(st.integers(1, 6))):
        for _ in range(draw(st.integers(1, 3))):
            payload = draw(st.binary(max_size=120))
            found.append(Written(draw(TURNS), group, draw(IDS), payload))
    return found


def content_of(records: list[Written]) -> bytes:
    return b"".join(encode(*record) for record in records)


def plain(record: Record) -> tuple[Kind, int, str, bytes | None]:
    return (record.kind, record.group, record.turn_id, record.payload)


@given(written())
def test_what_was_written_is_read(records: list[Written]) -> None:
    found = scan(content_of(records) + bytes(ZEROS))
    assert [plain(record) for record in found.records] == [tuple(record) for record in records]
    assert found.is_whole and found.end == len(content_of(records))


@given(written(), st.data())
def test_any_cut_yields_the_records_before_it(records: list[Written], data: st.DataObject) -> None:
    content = content_of(records)
    cut = data.draw(st.integers(0, len(content)))
    found = scan(content[:cut] + bytes(data.draw(st.sampled_from([0, ZEROS]))))
    sound = [plain(record) for record in found.records if record.payload is not None]
    whole = [records[: n + 1] for n in range(len(records))]
    expected = max((part for part in whole if len(content_of(part)) <= cut), key=len, default=[])
    # A record whose last bytes were zeros anyhow is whole.
    assert sound[: len(expected)] == [tuple(record) for record in expected]
    assert sound == [tuple(record) for record in records[: len(sound)]]
    assert found.is_torn


@given(written(), st.data())
def test_any_flipped_bytes_yield_sound_records_and_tell_where_the_others_were(
    records: list[Written], data: st.DataObject
) -> None:
    content = bytearray(content_of(records))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    found = scan(bytes(content) + bytes(ZEROS))
    sound = [plain(record) for record in found.records if record.payload is not None]
    left = iter([tuple(record) for record in records])
    assert all(any(each == other for other in left) for each in sound), "nothing new, in order"
    position = 0
    for record in records:
        size = len(encode(*record))
        if tuple(record) not in sound:
            in_hole = any(
                start < position + size and position < stop for start, stop in found.holes
            )
            is_named = any(r.payload is None and r.turn_id == record.turn_id for r in found.records)
            is_tail = not any(content[position:])
            assert in_hole or is_named or is_tail
        position += size


@given(st.binary(max_size=600))
def test_any_bytes_are_read_without_an_error(content: bytes) -> None:
    assert scan(content + MAGIC + content).is_torn in (True, False)


@given(written(), st.data())
def test_what_a_crash_tears_of_the_newest_group_is_no_damage(
    records: list[Written], data: st.DataObject
) -> None:
    """Any of the group's sectors may be missing, and those behind them be there."""
    newest = records[-1].group
    synced = content_of([record for record in records if record.group < newest])
    torn = bytearray(content_of([record for record in records if record.group == newest]))
    for start in range(0, len(torn), 16):
        if data.draw(st.booleans()):
            torn[start : start + 16] = bytes(len(torn[start : start + 16]))
    found = scan(synced + bytes(torn) + bytes(ZEROS))
    before = [tuple(record) for record in records if record.group < newest]
    assert [plain(record) for record in found.records][: len(before)] == before
    assert found.is_torn


def test_damage_before_the_newest_group_is_not_taken_for_a_torn_one() -> None:
    records = [Written(Kind.OPEN, group, f"msg_{group}", b"{}" * 40) for group in range(4)]
    content = content_of(records)
    size = len(content) // 4
    for at in range(2 * size):
        flipped = bytearray(content)
        flipped[at] ^= 0x10
        found = scan(bytes(flipped))
        assert not found.is_torn and not found.is_whole


def head(number: int, ends: dict[int, int]) -> Written:
    told = Head(number, "0123abcd", (), 0, ends)
    return Written(Kind.HEAD, number * 10, "", msgspec.json.encode(told))


def journal_of(directory: Path) -> list[bytes]:
    """Three segments, each with a turn that was opened."""
    contents: list[bytes] = []
    for number in (1, 2, 3):
        ends = {n + 1: len(content) for n, content in enumerate(contents)}
        turn = Written(Kind.OPEN, number * 10 + 1, f"msg_{number}", b"{}")
        last = Written(Kind.PROBE, number * 10 + 2, "", b"")
        contents.append(content_of([head(number, ends), turn, last]))
        (directory / f"segment-{number:010}").write_bytes(contents[-1] + bytes(ZEROS))
    return contents


def test_whole_segments_are_read_together(tmp_path: Path) -> None:
    journal_of(tmp_path)
    found = read_journal(tmp_path)
    assert set(found.state.open) == {"msg_1", "msg_2", "msg_3"}
    assert not (found.damaged or found.missing or found.broken)


def damage(directory: Path, how: str) -> Found:
    contents = journal_of(directory)
    second, third = (directory / f"segment-{n:010}" for n in (2, 3))
    match how:
        case "deleted":
            second.unlink()
        case "cut":
            second.write_bytes(contents[1][:-1])
        case "emptied":
            second.write_bytes(b"")
        case "an older copy":
            end = contents[1].rindex(MAGIC)
            second.write_bytes(contents[1][:end] + bytes(ZEROS))
        case "a copy of another":
            second.write_bytes(third.read_bytes())
        case "no head":
            second.write_bytes(contents[1][1:])
    return read_journal(directory)


@pytest.mark.parametrize(
    "how", ["deleted", "cut", "emptied", "an older copy", "a copy of another", "no head"]
)
def test_a_segment_that_is_not_what_the_next_one_tells_is_damage(tmp_path: Path, how: str) -> None:
    found = damage(tmp_path, how)
    assert [*found.damaged, *found.missing] == [2]
    assert {"msg_1", "msg_3"} <= set(found.state.open)


def test_what_a_crash_tore_is_no_damage_at_this_start_nor_at_the_next(tmp_path: Path) -> None:
    contents = journal_of(tmp_path)
    torn = [Written(Kind.OPEN, 33, f"msg_torn{n}", b"{}" * 50) for n in range(3)]
    group = bytearray(content_of(torn))
    group[len(group) // 2 - 40 : len(group) // 2] = bytes(40)
    (tmp_path / "segment-0000000003").write_bytes(contents[2] + bytes(group) + bytes(ZEROS))
    for _ in range(3):
        with capture_logs() as logged:
            opened = open_journal(tmp_path, 1 << 20)
        assert not [line for line in logged if line["event"] != "names_missing"]
        assert set(opened.book.state.open) == {
            *("msg_1", "msg_2", "msg_3", "msg_torn0", "msg_torn2")
        }
        opened.ids.close()
        opened.book.files.close()


def test_what_stands_behind_the_end_that_the_next_head_tells_was_never_acknowledged(
    tmp_path: Path,
) -> None:
    contents = journal_of(tmp_path)
    refused = encode(Kind.OPEN, 23, "msg_refused", b"{}")
    (tmp_path / "segment-0000000002").write_bytes(contents[1] + refused)
    found = read_journal(tmp_path)
    assert "msg_refused" not in found.state and not found.damaged


def cut_behind_the_opening(path: Path) -> None:
    """At the end of a record, as no crash would leave what was synced."""
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(MAGIC)])


def tear_the_close(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(MAGIC) + 30])


def clear_the_close(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(MAGIC)].ljust(len(content), b"\0"))


def delete_the_newest(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "damage", [cut_behind_the_opening, tear_the_close, clear_the_close, delete_the_newest]
)
@pytest.mark.parametrize("is_told", [True, False])
def test_a_turn_whose_close_may_be_in_what_was_lost_is_named(
    tmp_path: Path, damage: Callable[[Path], None], is_told: bool
) -> None:
    """The lists tell how far the newest segment was on disk. A crash of the machine may leave
    lists that tell of less, and then what looks torn is no damage."""
    directory = tmp_path / "journal"

    async def make() -> str:
        journal = Journal(directory)
        early, late = test_journal.record(journal, 1), test_journal.record(journal, 2)
        await journal.open(early)
        kept = {path: path.read_bytes() for path in names_of(directory)}
        await journal.stop()
        journal = Journal(directory)  # another segment
        await journal.open(late)
        early.outcome = "stop"
        await journal.close(early)
        await journal.stop()
        for path, content in kept.items() if not is_told else ():
            path.write_bytes(content)
        return early.id

    turn_id = asyncio.run(make())
    damage(list(segment_files(directory).values())[-1])
    with capture_logs() as logged:
        opened = open_journal(directory, 1 << 20)
    opened.ids.close()
    opened.book.files.close()
    named = [line["turn"] for line in logged if line["event"] == "turn_unsure"]
    assert turn_id in opened.book.state.open
    assert (turn_id in named) if is_told else not named
    assert any(line["event"] == "journal_damaged" for line in logged) == is_told
    with capture_logs() as logged:
        again = open_journal(directory, 1 << 20)
    again.ids.close()
    again.book.files.close()
    assert not logged
