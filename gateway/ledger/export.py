"""Usage as CSV: a row for each interval and group, or for each turn.

Names come from clients, so cells that a spreadsheet would read as a formula are made plain text.
"""

import csv
import io
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.admin.structs.usage import Totals, Turn
from gateway.base.errors import InvalidRequest
from gateway.ledger.database import Ledger
from gateway.ledger.reads.sums import (
    Part,
    Range,
    parts_of,
    rows_of,
    totals_by,
    widen_to_days,
    widths_for,
)
from gateway.ledger.reads.turns import Cursor, TurnFilter, page_of
from gateway.ledger.rollups import DAY_SECONDS
from gateway.ledger.schema import TurnRollupRow

_KEYS = ("workspace_id", "key_id", "engine", "model", "price")
# What makes a cell a formula in some spreadsheet: at its beginning, and behind what begins another
# cell where the list separator is not a comma. The full-width forms count as the others do.
_FORMULA = re.compile("(^|[;\t\r\n])(?=[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20])")
_PAGE = 1000
EXPORT_SECONDS = 300.0
"""An export that takes longer is cut off, also if only its client is slow."""
_DAY_MS = DAY_SECONDS * 1000
_WEEK_MS = 7 * _DAY_MS
_SUMS = Totals.__struct_fields__


def safe_cell(value: object) -> object:
    """A text gets an apostrophe in front of what could begin a formula; numbers stay numbers."""
    return _FORMULA.sub(r"\1'", value) if isinstance(value, str) else value


def line(cells: Iterable[object]) -> str:
    written = io.StringIO()
    csv.writer(written).writerow(["" if cell is None else safe_cell(cell) for cell in cells])
    return written.getvalue()


async def check_rows(ledger: Ledger, of: Range, step_seconds: int | None, most: int) -> None:
    """Raise InvalidRequest for an export that reads more than `most` rows.

    `step_seconds` is the interval of the exported sums, None for single turns. No more rows than
    the bound are counted.
    """
    async with ledger.snapshot() as connection:
        parts = [Part(None, of.since_ms, of.until_ms)]
        if step_seconds is not None:
            of = await _with_turns(connection, await widen_to_days(connection, of))
            parts = parts_of(of.since_ms, of.until_ms, widths_for(step_seconds))
        left = most
        for part in parts:
            read = rows_of(of, part).limit(left + 1).subquery()
            left -= (await connection.execute(select(func.count()).select_from(read))).scalar_one()
            if left < 0:
                raise InvalidRequest(
                    f"since_ms, until_ms: the range has more than {most} rows to export; ask for a"
                    " shorter one"
                )


async def usage_lines(
    ledger: Ledger, of: Range, step_seconds: int, seconds: float = EXPORT_SECONDS
) -> AsyncIterator[str]:
    """One line for each interval, workspace, key, engine, model and price, the header first.

    All lines show one moment. One week at a time is in memory. Weeks before the first turn and
    after the last one cost nothing. Three years take 158 statements at most. Raise
    LedgerUnavailable after `seconds`.
    """
    yield line(
        ("starting_at", "workspace", "key", "engine", "model", "price", *_SUMS, "saved_nano")
    )
    async with ledger.snapshot(seconds) as connection:
        of = await _with_turns(connection, await widen_to_days(connection, of))
        for since in range(of.since_ms // _DAY_MS * _DAY_MS, of.until_ms, _WEEK_MS):
            part = replace(
                of, since_ms=max(since, of.since_ms), until_ms=min(since + _WEEK_MS, of.until_ms)
            )
            found = await totals_by(connection, part, _KEYS, step_seconds)
            for (start, *keys), totals in sorted(found.items()):
                sums = [getattr(totals, name) for name in _SUMS]
                yield line((moment(start), *keys, *sums, totals.saved_nano))


async def turn_lines(
    ledger: Ledger, of: Range, seconds: float = EXPORT_SECONDS
) -> AsyncIterator[str]:
    """The header and one line for each turn, the newest first. All lines show one moment.

    Raise LedgerUnavailable after `seconds`.
    """
    names = [name for name in Turn.__struct_fields__ if name != "opened_ms"]
    yield line(("opened_at", *names))
    after: Cursor | None = None
    async with ledger.snapshot(seconds) as connection:
        while True:
            found = await page_of(connection, of, TurnFilter(), _PAGE, after)
            for turn in found.turns:
                values: list[Any] = [getattr(turn, name) for name in names]
                yield line((moment(turn.opened_ms), *values))
            if found.next is None:
                return
            after = Cursor.parse(found.next)


async def _with_turns(connection: AsyncConnection, of: Range) -> Range:
    """The part of the range in which there are days with turns."""
    table = TurnRollupRow
    query = select(func.min(table.start_ms), func.max(table.start_ms)).where(
        table.width_seconds == DAY_SECONDS
    )
    first, last = tuple[Any, Any]((await connection.execute(query)).one())
    if first is None:
        return replace(of, until_ms=of.since_ms)
    return replace(of, since_ms=max(of.since_ms, first), until_ms=min(of.until_ms, last + _DAY_MS))


def moment(ms: int) -> str:
    """RFC 3339, UTC; whole seconds without a fraction."""
    kind = "seconds" if ms % 1000 == 0 else "milliseconds"
    written = datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec=kind)
    return written.replace("+00:00", "Z")
