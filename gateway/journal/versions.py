"""Which version wrote a journal.

A journal of a newer version, or from before the first format, is refused and left as it is. So
none of its turns is lost. Lower formats are brought up to date (`file.py`).

`PRAGMA user_version` is the format. 0 and 1 are the first format. 2 counts the turns that the
journal forgets. 3 has tries of batches' rows, with their results. 4 has the contents of turns. 5
has writes for 12 hours, which an earlier version would leave out of a turn.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from gateway.base.errors import JournalUnavailable

FORMAT = 5
"""It must be raised by a change after which an earlier version can't read all of a journal."""

FILE = "journal.db"
APPLICATION = 0x486F6C64
"""SQLite's `application_id` of a journal, by which another database in its place is found."""

_PROMISE = "2026-11-28"
# What versions before the first format wrote: rows of segments, or a database of these tables.
_SEGMENTS = "segment-*"
_OLD_TABLES = frozenset({"meta", "set_aside", "turns"})
_WAY_ON = (
    "start the version that wrote it until its `/readyz` says `journal_backlog` 0, then move the"
    " directory away; moving it away now loses the turns that the ledger does not have"
)


def connect_to_read(directory: Path) -> sqlite3.Connection:
    """A connection that changes neither the file nor its log."""
    return sqlite3.connect(f"{(directory / FILE).absolute().as_uri()}?mode=ro", uri=True)


def check_version(directory: Path) -> None:
    """Raise JournalUnavailable for a journal of another version. A file that can't be read passes,
    because its version is not known."""
    reason = _segments_in(directory) or _database_in(directory)
    if reason is not None:
        raise JournalUnavailable(f"journal `{directory}`: {reason}: {_WAY_ON}")


def _segments_in(directory: Path) -> str | None:
    count = sum(1 for _ in directory.glob(_SEGMENTS))
    if count == 0:
        return None
    return (
        f"a version before {_PROMISE} wrote it ({count} segments), and this version reads format"
        f" {FORMAT}"
    )


def _database_in(directory: Path) -> str | None:
    if not (directory / FILE).exists():
        return None
    try:
        with closing(connect_to_read(directory)) as db:
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
            is_old = application != APPLICATION and tables >= _OLD_TABLES
            query = "SELECT count(*) FROM turns"
            num_turns = db.execute(query).fetchone()[0] if is_old else 0
    except sqlite3.Error:
        return None
    if is_old:
        return (
            f"a version before {_PROMISE} wrote it ({num_turns} turns), and this version reads"
            f" format {FORMAT}"
        )
    if application == APPLICATION and version > FORMAT:
        return f"a newer version wrote it (format {version}), and this one reads format {FORMAT}"
    return None
