"""The turns of an open journal file: its rows with their checksums, and the statements on them."""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from typing import NamedTuple
from zlib import crc32

import msgspec

from gateway.base.row_ids import MARK, MARK_PLACE

# The states of a turn. ASIDE: it can't be drained.
OPEN = "open"
CLOSED = "closed"
ASIDE = "aside"
# Why a turn is set aside.
LOST = "lost"
BROKEN = "broken"
REFUSED = "refused by the ledger"

_COUNT_DAY = """
INSERT INTO forgotten VALUES (?, ?)
ON CONFLICT (day_ms) DO UPDATE SET number = number + excluded.number
"""
_TAKE_DAY = """
INSERT INTO forgotten VALUES (?, ?)
ON CONFLICT (day_ms) DO UPDATE SET number = max(number, excluded.number)
"""
_FORGET = """
DELETE FROM turns WHERE id IN (SELECT value FROM json_each(?))
AND state IN ('open', 'closed') RETURNING record
"""
_DAY_MS = 86_400_000
# The turns of each state. They are counted in memory, within each transaction.
_COUNTING = """
PRAGMA temp_store = MEMORY;
CREATE TEMP TABLE counts AS SELECT value AS state,
    (SELECT count(*) FROM turns WHERE state = value) AS number
    FROM json_each('["open", "closed", "aside"]');
CREATE TEMP TRIGGER added AFTER INSERT ON turns BEGIN
    UPDATE counts SET number = number + 1 WHERE state = new.state;
END;
CREATE TEMP TRIGGER changed AFTER UPDATE ON turns BEGIN
    UPDATE counts SET number = number + (state = new.state) - (state = old.state);
END;
CREATE TEMP TRIGGER removed AFTER DELETE ON turns BEGIN
    UPDATE counts SET number = number - 1 WHERE state = old.state;
END;
"""
# The turns of each state, and the bytes of pages that are in use.
_NUMBERS = """
SELECT json_group_object(state, number), (
    SELECT (page_count - freelist_count) * page_size
    FROM pragma_page_count, pragma_freelist_count, pragma_page_size
) FROM counts
"""
_REMOVE = """
DELETE FROM turns WHERE id IN (SELECT value FROM json_each(?))
AND state IN (SELECT value FROM json_each(?))
"""
_REPLACE = """
ON CONFLICT (id) DO UPDATE SET state = excluded.state, record = excluded.record,
checksum = excluded.checksum, reason = excluded.reason, at = excluded.at WHERE
"""
_OVER_OPEN = "turns.state = 'open' OR turns.state = 'aside' AND excluded.state = 'closed'"
"""An open turn may be rewritten or closed. A close also replaces a turn that was set aside."""
OVER_CLOSED = f"{_OVER_OPEN} OR turns.state = 'closed'"
"""The same, and a closed turn may be closed again, with another end."""
ROWS = "SELECT id, state, record, checksum, reason, at FROM turns"


class _Moment(msgspec.Struct):
    opened_at: datetime


_moment = msgspec.json.Decoder(_Moment).decode


class Row(NamedTuple):
    """A turn in the journal."""

    id: str
    state: str
    # None where nothing is left of the turn but its name.
    record: bytes | None
    checksum: int
    # Why it was set aside, and when (ISO 8601).
    reason: str | None = None
    at: str | None = None

    @property
    def is_sound(self) -> bool:
        return self.checksum == _checksum(self.id, self.state, self.record)


def new_row(turn_id: str, state: str, record: bytes | None, reason: str | None = None) -> Row:
    """A row with its checksum; with a `reason` it is set aside now."""
    at = None if reason is None else datetime.now(UTC).isoformat(timespec="seconds")
    return Row(turn_id, state, record, _checksum(turn_id, state, record), reason, at)


def _checksum(turn_id: str, state: str, record: bytes | None) -> int:
    """The checksum of a row. SQLite finds damage to its own structure, but not a flipped digit of a
    record, which would be billed."""
    return crc32(record or b"", crc32(f"{turn_id} {state}".encode()))


class Table:
    """The turns of an open file, by id. Few statements: at each the thread may wait for the GIL."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        db.executescript(_COUNTING)

    def numbers(self) -> tuple[dict[str, int], int]:
        """Turns by state, and their bytes."""
        counts, num_bytes = self.db.execute(_NUMBERS).fetchone()
        return json.loads(counts), num_bytes

    def put(self, rows: Sequence[Row], over: str = _OVER_OPEN) -> None:
        """Write rows. A row that is there is replaced only where the condition `over` holds."""
        values = ", ".join(["(?, ?, ?, ?, ?, ?)"] * len(rows))
        command = f"INSERT INTO turns VALUES {values} {_REPLACE} {over}"  # noqa: S608
        self.db.execute(command, [*chain(*rows)])

    def unknown(self, turn_ids: Sequence[str]) -> list[str]:
        query = "SELECT value FROM json_each(?) WHERE value NOT IN (SELECT id FROM turns)"
        return [str(row[0]) for row in self.db.execute(query, (json.dumps(list(turn_ids)),))]

    def closed_tries(self) -> list[str]:
        """The ids of closed tries of batches' rows."""
        query = "SELECT id FROM turns WHERE state = ? AND substr(id, ?, 1) = ?"
        rows = self.db.execute(query, (CLOSED, MARK_PLACE + 1, MARK))
        return [str(row[0]) for row in rows]

    def remove(self, turn_ids: Sequence[str], *states: str) -> None:
        self.db.execute(_REMOVE, (json.dumps(list(turn_ids)), json.dumps(states)))

    def forget(self, turn_ids: Sequence[str]) -> None:
        """Remove turns that the ledger has, and count them by the day (UTC) on which they began."""
        records = self.db.execute(_FORGET, (json.dumps(list(turn_ids)),)).fetchall()
        days: Counter[int] = Counter()
        for (record,) in records:
            with suppress(msgspec.MsgspecError):  # a broken record is not counted
                opened_ms = int(_moment(record).opened_at.timestamp() * 1000)
                days[opened_ms // _DAY_MS * _DAY_MS] += 1
        self.db.executemany(_COUNT_DAY, days.items())

    def forgotten(self) -> dict[int, int]:
        return dict(self.db.execute("SELECT day_ms, number FROM forgotten").fetchall())

    def take_forgotten(self, days: Iterable[tuple[int, int]]) -> None:
        """Take another file's counts of forgotten turns. Of a day in both the larger one stays."""
        self.db.executemany(_TAKE_DAY, days)

    def set_aside(self, turn_ids: Sequence[str], reason: str) -> None:
        """Set turns aside. A turn that is set aside already stays as it is. A turn that is not here
        gets a row without a record."""
        for turn_id in turn_ids:
            query = "SELECT record FROM turns WHERE id = ?"
            (record,) = self.db.execute(query, (turn_id,)).fetchone() or (None,)
            self.put([new_row(turn_id, ASIDE, record, reason)], f"turns.state != '{ASIDE}'")

    def rows(self, state: str, limit: int) -> list[Row]:
        query = ROWS + " WHERE state = ? ORDER BY rowid LIMIT ?"
        return [Row(*row) for row in self.db.execute(query, (state, limit))]

    def ids(self, state: str, reason: str) -> list[str]:
        query = "SELECT id FROM turns WHERE state = ?1 AND ?2 IN ('', reason) ORDER BY id"
        return [str(row[0]) for row in self.db.execute(query, (state, reason))]
