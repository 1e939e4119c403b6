"""The journal of before: a database of SQLite, in `journal.db`. It is taken over once.

A record has a seal there (`seals.py`). One whose seal is broken is set aside with its bytes. A file
whose structure is broken is moved to a folder of its own. Its records are read by SQLite as far as
possible, and then from the raw bytes. The same happens to a write-ahead log whose file is gone or
empty: it has records, and SQLite would delete it.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from gateway.base.logs import get_logger
from gateway.journal.seals import SEALED, Broken, unseal
from gateway.journal.state import BROKEN

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS turns (
    id TEXT PRIMARY KEY,
    closed INTEGER NOT NULL DEFAULT 0,
    record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS turns_by_closed ON turns (closed);
CREATE TABLE IF NOT EXISTS set_aside (
    id TEXT PRIMARY KEY,
    at TEXT NOT NULL,
    reason TEXT NOT NULL,
    record BLOB
);
"""
_NAME = "journal.db"
_FILES = (_NAME, "journal.db-wal", "journal.db-shm")
_DAMAGES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PRIMARY = 0xFF
_FORMER = "former "


@dataclass(slots=True)
class OldJournal:
    """`turns` are id, whether it is closed, and the record as JSON.

    `aside` are id, ISO time, reason, and what is left of the record.
    """

    instance: str | None = None
    former: list[str] = field(default_factory=list)
    num_forgotten: int = 0
    turns: list[tuple[str, bool, bytes]] = field(default_factory=list)
    aside: list[tuple[str, str, str, bytes | None]] = field(default_factory=list)
    is_damaged: bool = False

    @property
    def ids(self) -> set[str]:
        return {each[0] for each in self.turns} | {each[0] for each in self.aside}


def has_old(directory: Path) -> bool:
    """Whether there is anything of a journal of before."""
    return any(_size(directory / name) for name in _FILES[:2])


def read_old(directory: Path) -> OldJournal | None:
    """What the journal of before holds; None where there is none.

    Raise sqlite3.Error or OSError where it can't be read in any way.
    """
    if not has_old(directory):
        return None
    old = OldJournal()
    opened, damage = _open_whole(directory / _NAME)
    if opened is None:
        kept = _move(directory)
        get_logger("journal").error("journal_damaged", error=damage, kept=str(kept))
        opened, old.is_damaged = sqlite3.connect(":memory:"), True
        opened.executescript(SCHEMA)
        _restore(opened, kept)
    with closing(opened) as db:
        _read_meta(db, old)
        _read_turns(db, old)
        query = "SELECT id, at, reason, record FROM set_aside ORDER BY id"
        old.aside += [(str(row[0]), row[1], row[2], row[3]) for row in db.execute(query)]
    return old


def delete_old(directory: Path) -> None:
    """Delete what was taken over. Raise OSError."""
    for name in reversed(_FILES):
        (directory / name).unlink(missing_ok=True)


def holds_turns(directory: Path) -> bool:
    """Whether there are turns in a journal of before. One that can't be read may hold some."""
    if not has_old(directory):
        return False
    try:
        with closing(sqlite3.connect(f"file:{directory / _NAME}?mode=ro", uri=True)) as db:
            return db.execute("SELECT 1 FROM turns LIMIT 1").fetchone() is not None
    except sqlite3.Error:
        return True


def old_aside(directory: Path) -> list[tuple[str, str, str, int]]:
    """Turns that a journal of before set aside: id, ISO time, reason, bytes that are kept.

    Raise sqlite3.Error.
    """
    if not has_old(directory):
        return []
    query = "SELECT id, at, reason, coalesce(length(record), 0) FROM set_aside"
    with closing(sqlite3.connect(f"file:{directory / _NAME}?mode=ro", uri=True)) as db:
        return [(str(row[0]), str(row[1]), str(row[2]), int(row[3])) for row in db.execute(query)]


def _read_meta(db: sqlite3.Connection, old: OldJournal) -> None:
    for name, value in db.execute("SELECT name, value FROM meta"):
        if name == "instance":
            old.instance = str(value)
        elif name == "forgotten" and str(value).isdecimal():
            old.num_forgotten = int(value)
        elif str(name).startswith(_FORMER):
            old.former.append(str(name).removeprefix(_FORMER))


def _read_turns(db: sqlite3.Connection, old: OldJournal) -> None:
    """Sound records, closed or not as their seal says. Others are set aside."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    for turn_id, closed, sealed in db.execute(
        "SELECT id, closed, record FROM turns ORDER BY rowid"
    ):
        reason = "refused by the ledger" if closed == 2 else BROKEN  # 2: as it once was told
        left = sealed if isinstance(sealed, bytes) else None
        try:
            if closed == 2:
                raise Broken
            is_closed, record = unseal(turn_id, closed == 1, sealed)
        except (Broken, TypeError, AttributeError):
            get_logger("journal").error("turn_set_aside", turn=str(turn_id), reason=reason)
            old.aside.append((str(turn_id), now, reason, left))
        else:
            old.turns.append((turn_id, is_closed, record))


def _open_whole(path: Path) -> tuple[sqlite3.Connection | None, str]:
    """The file's connection, or None and what is wrong with the file."""
    if _size(path) == 0:
        return None, "its file is gone or empty"
    db = None
    try:
        db = sqlite3.connect(path)
        db.executescript(SCHEMA)
        if db.execute("PRAGMA integrity_check(1)").fetchone()[0] == "ok":
            return db, ""
        damage = "its structure is broken"
    except sqlite3.DatabaseError as error:
        if (error.sqlite_errorcode & _PRIMARY) not in _DAMAGES:
            raise
        damage = str(error)
    if db is not None:
        db.close()
    return None, damage


def _size(path: Path) -> int:
    """In bytes; 0 where there is no such file."""
    return path.stat().st_size if path.exists() else 0


def _move(directory: Path) -> Path:
    """Put the damaged files into a folder of their own."""
    kept = directory / f"damaged-{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
    kept.mkdir()
    for name in _FILES:
        if (directory / name).exists():
            (directory / name).rename(kept / name)
    return kept


def _restore(db: sqlite3.Connection, kept: Path) -> None:
    """Bring over what can be read; of a turn that is found twice its close counts."""
    # Read first: opening the file for SQLite may change it.
    content = [file.read_bytes() for file in sorted(kept.glob("journal.db*"))]
    found: dict[str, tuple[bool, bytes]] = {}
    rows = [*_rows(kept / _NAME), *_carved(content)]
    for turn_id, is_closed, sealed in rows:
        with suppress(Broken):
            state, _ = unseal(turn_id, is_closed, sealed)
            if state or turn_id not in found:
                found[turn_id] = (state, sealed)
    db.executemany(
        "INSERT OR REPLACE INTO turns (id, closed, record) VALUES (?, ?, ?)",
        [(turn_id, int(state), sealed) for turn_id, (state, sealed) in found.items()],
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    broken = {turn_id: sealed for turn_id, _, sealed in rows if turn_id not in found}
    db.executemany(
        "INSERT OR REPLACE INTO set_aside VALUES (?, ?, ?, ?)",
        [(turn_id, now, BROKEN, sealed) for turn_id, sealed in broken.items()],
    )


def _rows(path: Path) -> Iterator[tuple[str, bool, bytes]]:
    """Rows as far as SQLite reads them, from the front and from the back."""
    query = "SELECT id, closed, record FROM turns ORDER BY rowid"
    if not _size(path):
        return
    for ordered in (query, f"{query} DESC"):
        with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as db:
            for row in db.execute(ordered):
                if isinstance(row[0], str) and isinstance(row[2], bytes):
                    yield row[0], row[1] == 1, row[2]


def _carved(contents: list[bytes]) -> Iterator[tuple[str, bool, bytes]]:
    """Sealed records in raw bytes. The seal tells a record from bytes that only look like one."""
    for content in contents:
        for found in SEALED.finditer(content):
            turn_id = found[1].decode()
            with suppress(Broken):
                unseal(turn_id, True, found[0])
                yield turn_id, True, found[0]
