"""Opens the journal's file, whatever has happened to it.

What can be read is kept. A record whose seal is broken is *set aside* with its bytes. A file whose
structure is broken is moved to a folder of its own. Its records are read by SQLite as far as
possible, and then from the raw bytes. The same happens to a write-ahead log whose file is gone or
empty: it has records, and SQLite would delete it.

Turns whose record is gone are set aside by name, as *lost*. If the list of names is shorter than
the journal's own count, that is reported: the ledger may have lost some of those turns, and they
can't be named. A journal that has lost something gets a new instance. `recover --instance` can then
make rows from what engines counted for the old instance.
"""

import re
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gateway.base.logs import get_logger
from gateway.journal import live_ids
from gateway.journal.seals import SEALED, Broken, unseal

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
LOST = "lost"
BROKEN = "broken"
_DAMAGES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PRIMARY = 0xFF
_FORMER = "former "
_MADE_BY = re.compile("msg_([0-9a-f]{8})")

Connect = Callable[[Path], sqlite3.Connection]


@dataclass(frozen=True, slots=True)
class Opened:
    """`forgotten` turns were drained lately, so that the ledger must have them.

    `former` are the instances that this journal had before each of its losses.
    """

    db: sqlite3.Connection
    instance: str
    ids: live_ids.LiveIds
    forgotten: list[str]
    former: list[str]


def open_journal(directory: Path, connect: Connect) -> Opened:
    """Raise sqlite3.Error or OSError where the journal can't be opened in any way."""
    path, log = directory / "journal.db", get_logger("journal")
    lists = live_ids.names_of(directory)
    told = live_ids.read(lists)
    earlier = told.instance
    opened, damage = _open_whole(path, connect)
    if opened is None:
        kept = _move(directory)
        log.error("journal_damaged", error=damage, kept=str(kept))
        db = connect(path)
        _restore(db, kept)
    else:
        db = opened
    _verify(db)
    missing = told.alive - _ids(db)
    _set_aside(db, [(turn_id, LOST, None) for turn_id in sorted(missing)])
    instance = _instance(db)
    if opened is None or missing or earlier not in (None, instance):
        old, own, instance = earlier or instance, instance, secrets.token_hex(4)
        db.execute("INSERT OR REPLACE INTO meta VALUES ('instance', ?)", (instance,))
        for each in {old, own, *_instances_of(_ids(db))}:
            db.execute("INSERT OR IGNORE INTO meta VALUES (?, '')", (_FORMER + each,))
        log.error("journal_lost_turns", number=len(missing), instance=old, new_instance=instance)
    db.commit()
    num_forgotten = forgotten_in(db)
    if told.num_forgotten < num_forgotten:
        number = num_forgotten - told.num_forgotten
        log.error("names_missing", file=str(lists[0]), number=number)
    held = (row[0] for row in db.execute("SELECT id FROM turns"))
    ids = live_ids.LiveIds(lists, instance, held, num_forgotten)
    query = "SELECT substr(name, ?) FROM meta WHERE substr(name, 1, ?) = ?"
    former = db.execute(query, (len(_FORMER) + 1, len(_FORMER), _FORMER))
    return Opened(db, instance, ids, told.forgotten, [str(row[0]) for row in former])


def forgotten_in(db: sqlite3.Connection) -> int:
    """The number of turns that this journal has ever forgotten, because the ledger has them."""
    found = db.execute("SELECT value FROM meta WHERE name = 'forgotten'").fetchone()
    return int(found[0]) if found is not None and str(found[0]).isdecimal() else 0


def _open_whole(path: Path, connect: Connect) -> tuple[sqlite3.Connection | None, str]:
    """The file's connection, or None and what is wrong with the file."""
    if _size(path) == 0 and _size(path.with_name(f"{path.name}-wal")):
        return None, "its file is gone or empty"
    db = None
    try:
        db = connect(path)
        if _is_whole(db):
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


def _instances_of(turn_ids: Iterable[str]) -> set[str]:
    """The instances that made these ids (`TurnService.new_id`)."""
    return {found[1] for found in map(_MADE_BY.match, turn_ids) if found is not None}


def _is_whole(db: sqlite3.Connection) -> bool:
    return bool(db.execute("PRAGMA integrity_check(1)").fetchone()[0] == "ok")


def _move(directory: Path) -> Path:
    """Put the damaged files into a folder of their own."""
    kept = directory / f"damaged-{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
    kept.mkdir()
    for name in ("journal.db", "journal.db-wal", "journal.db-shm"):
        if (directory / name).exists():
            (directory / name).rename(kept / name)
    return kept


def _restore(db: sqlite3.Connection, kept: Path) -> None:
    """Bring over what can be read; of a turn that is found twice its close counts."""
    # Read first: opening the file for SQLite may change it.
    content = [file.read_bytes() for file in sorted(kept.glob("journal.db*"))]
    found: dict[str, tuple[bool, bytes]] = {}
    rows = [*_rows(kept / "journal.db"), *_carved(content)]
    for turn_id, is_closed, sealed in rows:
        with suppress(Broken):
            state, _ = unseal(turn_id, is_closed, sealed)
            if state or turn_id not in found:
                found[turn_id] = (state, sealed)
    db.executemany(
        "INSERT OR REPLACE INTO turns (id, closed, record) VALUES (?, ?, ?)",
        [(turn_id, int(state), sealed) for turn_id, (state, sealed) in found.items()],
    )
    broken = {turn_id: sealed for turn_id, _, sealed in rows if turn_id not in found}
    _set_aside(db, [(turn_id, BROKEN, sealed) for turn_id, sealed in broken.items()])
    db.commit()


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


def _verify(db: sqlite3.Connection) -> None:
    """Set broken records aside. Correct rows that differ from their sound record."""
    broken: list[tuple[str, str, bytes | None]] = []
    wrong: list[tuple[int, str]] = []
    for turn_id, closed, sealed in db.execute("SELECT id, closed, record FROM turns"):
        if closed == 2:  # an earlier version's way to set aside
            broken.append((turn_id, "refused by the ledger", sealed))
            continue
        try:
            state, _ = unseal(turn_id, closed == 1, sealed)
        except (Broken, TypeError):
            broken.append((str(turn_id), BROKEN, sealed if isinstance(sealed, bytes) else None))
        else:
            if int(state) != closed:
                wrong.append((int(state), turn_id))
    db.executemany("UPDATE turns SET closed = ? WHERE id = ?", wrong)
    _set_aside(db, broken)


def _set_aside(db: sqlite3.Connection, turns: list[tuple[str, str, bytes | None]]) -> None:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    for turn_id, reason, record in turns:
        get_logger("journal").error("turn_set_aside", turn=turn_id, reason=reason)
        db.execute(
            "INSERT OR REPLACE INTO set_aside VALUES (?, ?, ?, ?)", (turn_id, at, reason, record)
        )
        db.execute("DELETE FROM turns WHERE id = ?", (turn_id,))


def _ids(db: sqlite3.Connection) -> set[str]:
    return {row[0] for row in db.execute("SELECT id FROM turns UNION SELECT id FROM set_aside")}


def _instance(db: sqlite3.Connection) -> str:
    """Made once, with the journal."""
    found = db.execute("SELECT value FROM meta WHERE name = 'instance'").fetchone()
    if found is None:
        found = (secrets.token_hex(4),)
        db.execute("INSERT INTO meta VALUES ('instance', ?)", found)
    return str(found[0])
