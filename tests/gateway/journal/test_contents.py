"""Contents of turns in the journal: in one commit with the close, over damage, and in a file of a
format that had none."""

import sqlite3
from contextlib import closing
from pathlib import Path

from gateway.journal.contents import Content
from gateway.journal.file import rows_in
from gateway.journal.store import Journal
from gateway.journal.table import CLOSED, OPEN
from gateway.journal.versions import FORMAT
from tests.gateway.journal.test_journal import record
from tests.gateway.journal.test_store import killed, on, states

WITHOUT_CONTENTS = 3


def content_of(turn_id: str, num_bytes: int = 20) -> Content:
    return Content(turn_id, "default", 1_000, b"x" * num_bytes)


def test_a_journal_without_contents_opens_with_all_its_turns_and_takes_contents(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "journal"
    ids = killed(directory)
    with closing(sqlite3.connect(directory / "journal.db")) as db:
        db.execute("DROP TABLE contents")
        db.execute(f"PRAGMA user_version = {WITHOUT_CONTENTS}")
    before = rows_in(directory)

    async def work(journal: Journal) -> None:
        assert rows_in(directory) == before
        assert await journal.content_bytes() == 0
        await journal.close(record(journal, 99), content_of(ids[0]))
        assert [content.id for content in await journal.oldest_contents(1)] == [ids[0]]

    journal = on(directory, work)
    assert journal.damaged == [] and len(before) == len(ids)
    with closing(sqlite3.connect(directory / "journal.db")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (FORMAT,)


def test_a_content_is_there_with_its_close_once_and_leaves_by_its_turns_id(tmp_path: Path) -> None:
    async def work(journal: Journal) -> None:
        turns = [record(journal, number) for number in range(4)]
        for turn in turns:
            await journal.open(turn)
        for turn in turns[:3]:
            turn.outcome = "stop"
            await journal.close(turn, content_of(turn.id))
            await journal.close(turn, content_of(turn.id, 90))  # changes nothing
        assert sorted(states(tmp_path).values()) == [CLOSED] * 3 + [OPEN]
        assert await journal.content_bytes() == 60
        # As many as have the bytes, and one at least.
        for most_bytes, number in ((1, 1), (40, 2), (59, 2), (60, 3)):
            oldest = await journal.oldest_contents(most_bytes)
            assert [content.id for content in oldest] == [turn.id for turn in turns[:number]]
        # A content is not the turn: it stays when the turn leaves, until the database has it.
        await journal.forget([turns[0].id])
        assert await journal.content_bytes() == 60
        assert await journal.forget_contents([turns[0].id, turns[3].id, "msg_nobody"]) == 20
        assert await journal.forget_contents([turns[0].id]) == 0
        await journal.keep(content_of(turns[3].id))
        assert await journal.content_bytes() == 60

    on(tmp_path, work)


def test_contents_outlive_a_removed_file_and_a_damaged_one(tmp_path: Path) -> None:
    async def fill(journal: Journal) -> None:
        turn = record(journal, 0)
        await journal.close(turn, content_of(turn.id))
        for path in tmp_path.glob("journal.db*"):
            path.unlink()
        await journal.open(record(journal, 1))
        assert await journal.content_bytes() == 20

    on(tmp_path, fill)
    # Another program's mark: the file is kept aside, and what it has comes over.
    with closing(sqlite3.connect(tmp_path / "journal.db")) as db:
        db.execute("PRAGMA application_id = 7")

    async def look(journal: Journal) -> None:
        assert len(journal.damaged) == 1
        assert await journal.content_bytes() == 20

    on(tmp_path, look)
