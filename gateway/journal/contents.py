"""Prompts and answers in the journal's file, until the database has them.

A turn's content is written in the commit of its close, so both survive `kill -9` or neither does.
Bodies are encrypted. Damage is found when one is opened (`ledger/sealed.py`).
"""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from gateway.journal.versions import connect_to_read

SCHEMA = """
CREATE TABLE IF NOT EXISTS contents (
    id TEXT PRIMARY KEY,
    workspace TEXT NOT NULL,
    at_ms INTEGER NOT NULL,
    body BLOB NOT NULL
);
"""
_PUT = "INSERT INTO contents VALUES (?, ?, ?, ?) ON CONFLICT (id) DO NOTHING"
_ALL = "SELECT id, workspace, at_ms, body FROM contents ORDER BY rowid"
_PURGE = "DELETE FROM contents WHERE workspace = ? RETURNING length(body)"
_TAKE = "DELETE FROM contents WHERE id IN (SELECT value FROM json_each(?)) RETURNING length(body)"


class Content(NamedTuple):
    """The sealed prompt and answer of a turn that began at `at_ms`."""

    id: str
    workspace: str
    at_ms: int
    body: bytes


def put(db: sqlite3.Connection, contents: Sequence[Content]) -> None:
    """Write contents. A second content of a turn changes nothing."""
    db.executemany(_PUT, contents)


def oldest(db: sqlite3.Connection, most_bytes: int) -> list[Content]:
    """The oldest contents, with `most_bytes` together at most. One is returned whatever its
    size."""
    contents: list[Content] = []
    num_bytes = 0
    with closing(db.execute(_ALL)) as rows:
        for row in rows:
            content = Content(*row)
            num_bytes += len(content.body)
            if contents and num_bytes > most_bytes:
                break
            contents.append(content)
    return contents


def remove(db: sqlite3.Connection, turn_ids: Sequence[str]) -> int:
    """Remove the contents of these turns; return their bytes."""
    with zeroing(db):
        return sum(row[0] for row in db.execute(_TAKE, (json.dumps(list(turn_ids)),)).fetchall())


def purge(db: sqlite3.Connection, workspace: str) -> tuple[int, int]:
    """Remove a workspace's contents and write zeros in their place. Return how many there were, and
    their bytes."""
    with zeroing(db):
        sizes = db.execute(_PURGE, (workspace,)).fetchall()
    return len(sizes), sum(row[0] for row in sizes)


@contextmanager
def zeroing(db: sqlite3.Connection) -> Iterator[None]:
    """Zero in the file what is removed in this context, so that free pages do not keep it."""
    db.execute("PRAGMA secure_delete = ON")
    try:
        yield
    finally:
        db.execute("PRAGMA secure_delete = OFF")


def total_bytes(db: sqlite3.Connection) -> int:
    (number,) = db.execute("SELECT coalesce(sum(length(body)), 0) FROM contents").fetchone()
    return int(number)


def all_of(db: sqlite3.Connection) -> Iterator[Content]:
    for row in db.execute(_ALL):
        yield Content(*row)


def readable(directory: Path) -> Iterator[Content]:
    """The contents of a damaged file, as far as SQLite reads them. A file of an earlier format has
    none."""
    with suppress(sqlite3.Error), closing(connect_to_read(directory)) as db:
        yield from all_of(db)
