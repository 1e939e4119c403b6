"""Journals as they were before: a database of SQLite. Files as a kill leaves them."""

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from gateway.base.record import TurnRecord
from gateway.journal.old_file import SCHEMA
from gateway.journal.seals import seal


def write_old(
    directory: Path,
    turns: Sequence[TurnRecord],
    *,
    instance: str,
    num_forgotten: int = 0,
    aside: Sequence[str] = (),
    is_killed: bool = True,
) -> None:
    """Turns are closed where their outcome is not `open`.

    After a kill all is in the write-ahead log, else all is in the file.
    """
    making = directory.parent / f"{directory.name}-making"
    making.mkdir(parents=True)
    with closing(sqlite3.connect(making / "journal.db")) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.executescript(SCHEMA)
        meta = [("instance", instance), ("forgotten", str(num_forgotten)), ("former 00000000", "")]
        db.executemany("INSERT INTO meta VALUES (?, ?)", meta)
        for turn in turns:
            is_closed = turn.outcome != "open"
            sealed = seal(turn.id, is_closed, msgspec.json.encode(turn))
            db.execute("INSERT INTO turns VALUES (?, ?, ?)", (turn.id, is_closed, sealed))
        for turn_id in aside:
            row = (turn_id, "2026-11-01T00:00:00+00:00", "refused by the ledger", b"left")
            db.execute("INSERT INTO set_aside VALUES (?, ?, ?, ?)", row)
        db.commit()
        if is_killed:
            shutil.copytree(making, directory, dirs_exist_ok=True)
    if not is_killed:
        shutil.copytree(making, directory, dirs_exist_ok=True)
    shutil.rmtree(making)
