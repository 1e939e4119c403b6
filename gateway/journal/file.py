"""The journal's file: its schema, how it is opened and locked, what is read of a damaged one."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from gateway.base.errors import JournalUnavailable
from gateway.journal import contents
from gateway.journal.table import ASIDE, CLOSED, OPEN, ROWS, Row, Table
from gateway.journal.versions import APPLICATION, FILE, FORMAT, connect_to_read

# The file and SQLite's own beside it.
FILES = (FILE, f"{FILE}-wal", f"{FILE}-shm")
INSTANCES = "instances"
# The beginning of the names of folders in which damaged files are kept.
DAMAGED_PREFIX = "damaged-"
_MODE = 0o600
_SCHEMA = f"""
PRAGMA application_id = {APPLICATION};
CREATE TABLE turns (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    record BLOB,
    checksum INTEGER NOT NULL,
    reason TEXT,
    at TEXT
);
CREATE INDEX turns_by_state ON turns (state);
"""
# Format 2: how many turns of each day the ledger had when the journal forgot them (`audit.py`).
# Format 4: contents of turns (`contents.py`).
_LATER_FORMATS = f"""
CREATE TABLE IF NOT EXISTS forgotten (day_ms INTEGER PRIMARY KEY, number INTEGER NOT NULL);
{contents.SCHEMA}
PRAGMA user_version = {FORMAT};
"""
_DAMAGES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_UNREADABLE = frozenset({sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ})
_PRIMARY = 0xFF


def has_journal(directory: Path) -> bool:
    """Whether there is anything of a journal."""
    return any((directory / name).exists() for name in (*FILES, INSTANCES))


def rows_in(directory: Path) -> list[Row]:
    """The journal's rows, the oldest first; also while a gateway writes it. Raise sqlite3.Error."""
    with closing(connect_to_read(directory)) as db:
        return [Row(*row) for row in db.execute(ROWS + " ORDER BY rowid")]


class Damaged(Exception):
    """The file is no sound journal."""


def lock_directory(directory: Path) -> Any:
    """Lock the journal, since two processes would close each other's turns. The kernel ends the
    lock of a dead process. Raise JournalUnavailable."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("w")
    except OSError as error:
        raise JournalUnavailable(f"journal `{directory}`: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise JournalUnavailable(f"journal `{directory}` is used by another process") from None
    return file


def open_file(directory: Path) -> Table:
    """Open or make the file. Raise Damaged or sqlite3.Error where it is not sound."""
    path = directory / FILE
    is_new = not path.exists() or path.stat().st_size == 0
    if is_new and (directory / f"{FILE}-wal").exists():
        raise Damaged("the file is gone, and its log is there")  # SQLite would delete the log
    if not is_new:
        with closing(connect_to_read(directory)) as db:
            problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise Damaged(str(problem))
            # A kill at the first start may have come before the schema.
            has_schema = db.execute("SELECT 1 FROM sqlite_master").fetchone() is not None
            is_new = not has_schema and not (directory / INSTANCES).exists()
            if not is_new and db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
                raise Damaged("it is no journal")
    # SQLite gives its log the file's own mode.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE))
    for file in (*directory.glob(f"{FILE}*"), *directory.glob(f"{DAMAGED_PREFIX}*/{FILE}*")):
        file.chmod(_MODE)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    if is_new:
        db.executescript(f"BEGIN;{_SCHEMA}{_LATER_FORMATS}COMMIT;")
        sync_directory(directory)
    elif db.execute("PRAGMA user_version").fetchone()[0] < FORMAT:
        db.executescript(f"BEGIN;{_LATER_FORMATS}COMMIT;")
    return Table(db)


def readable_rows(directory: Path) -> Iterator[Row]:
    """The rows of a damaged file that SQLite can read, from the front and from the back."""
    for order in ("ASC", "DESC"):
        with suppress(sqlite3.Error), closing(connect_to_read(directory)) as db:
            for row in db.execute(f"{ROWS} ORDER BY rowid {order}"):
                turn_id, state, record = row[:3]
                is_row = isinstance(turn_id, str) and isinstance(record, bytes | None)
                if is_row and state in (OPEN, CLOSED, ASIDE):
                    yield Row(*row)


def readable_days(directory: Path) -> list[tuple[int, int]]:
    """The counts of forgotten turns in a damaged file, where they can be read."""
    with suppress(sqlite3.Error), closing(connect_to_read(directory)) as db:
        return db.execute("SELECT day_ms, number FROM forgotten").fetchall()
    return []


def is_damage(error: Exception) -> bool:
    """Whether the error says that the file is damaged, or can't be read."""
    code = int(getattr(error, "sqlite_errorcode", 0))  # an error of Python's own has none
    return code & _PRIMARY in _DAMAGES or code in _UNREADABLE


def id_of(status: os.stat_result) -> tuple[int, int]:
    """A file's device and inode, which tell it from every other file."""
    return status.st_dev, status.st_ino


def file_id(path: Path) -> tuple[int, int] | None:
    """The id of the file at the path; None where there is none, or it can't be looked at."""
    try:
        return id_of(path.stat())
    except OSError:
        return None


def sync_directory(directory: Path) -> None:
    """Return when what was made, renamed or removed in the directory is on disk."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
