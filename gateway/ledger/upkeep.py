"""Long work on the ledger, safe beside a gateway that serves: sums, retention, and usage as CSV.

Callers pass a ledger with long deadlines (`with_ledger`). Deleted turns remain in the sums. Turns
from before the *horizon* may have been deleted. So sums of earlier days are never rebuilt, and
ranges that begin earlier are read in whole days.
"""

import asyncio
import csv
import io
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import delete, func, insert, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.protocol.reports import PrefillSums
from gateway.base.epochs import EpochReport
from gateway.base.errors import InvalidRequest
from gateway.base.record import TurnRecord
from gateway.base.rounding import round_up
from gateway.ledger import identity, rollups, schema
from gateway.ledger.access import DEFAULT_WORKSPACE
from gateway.ledger.database import Ledger
from gateway.ledger.epochs import LEASE_WIDTHS_SECONDS, MINUTE_SECONDS, record_epochs
from gateway.ledger.reads import sums
from gateway.ledger.reads.turns import Cursor, TurnFilter, page_of
from gateway.structs.usage import Totals, Turn

_DAY_MS = rollups.DAY_SECONDS * 1000
_BATCH = 2000
_PAUSE_SECONDS = 0.05
"""Others can write between two batches: SQLite has a single writer."""


class Deleted(NamedTuple):
    """How many rows a retention run deleted."""

    turns: int
    rollups: int


async def rebuild(ledger: Ledger) -> int:
    """Make all sums anew from the turns, day by day; return the number of days.

    Days that begin before the horizon stay as they are. Prefixes and epochs are summed over the
    turns that remain.
    """
    async with ledger.transaction() as connection:
        moments = []
        for column in (schema.TurnRow.opened_ms, schema.TurnRollupRow.start_ms):
            ends = select(func.min(column), func.max(column))
            moments += [ms for ms in (await connection.execute(ends)).one() if ms is not None]
        first_whole_day = round_up(await rollups.horizon_ms(connection), _DAY_MS)
        days: list[tuple[int, int]] = []
        if moments:
            since_ms = max(min(moments), first_whole_day)
            days = list(rollups.days(since_ms, max(moments) + 1))
    for since, until in days:
        async with ledger.transaction() as connection:
            await rollups.rebuild_interval(connection, since, until)
        await asyncio.sleep(_PAUSE_SECONDS)
    async with ledger.transaction() as connection:
        await rollups.rebuild_whole(connection)
    return len(days)


async def retain(ledger: Ledger, turns_ms: int, rollups_ms: int, month_ms: int) -> Deleted:
    """Delete turns that began before `turns_ms`, and sums from before `rollups_ms`.

    `rollups_ms` must not be later than `turns_ms`. Both are cut to whole UTC days.

    Sums since `month_ms`, the beginning of the calendar month, stay: spend limits need them.
    """
    assert rollups_ms <= turns_ms
    rollups_ms = min(rollups_ms, month_ms) // _DAY_MS * _DAY_MS
    turns_ms = turns_ms // _DAY_MS * _DAY_MS
    await _move_horizon(ledger, turns_ms)
    num_turns = await _delete_turns(ledger, turns_ms)
    num_rollups = await _delete_intervals(ledger, turns_ms, rollups_ms)
    num_rollups += await _delete_lease_ends(ledger, turns_ms, rollups_ms)
    for table in (*rollups.WHOLE, schema.EpochReportRow):
        async with ledger.transaction() as connection:
            deletion = delete(table).where(table.last_ms < rollups_ms)
            num_rollups += (await connection.execute(deletion)).rowcount
    return Deleted(num_turns, num_rollups)


async def _move_horizon(ledger: Ledger, turns_ms: int) -> None:
    # The horizon moves before turns are deleted, so that no reader takes the rest for all turns.
    insert = postgresql.insert if ledger.is_postgres else sqlite.insert
    statement = insert(schema.HorizonRow).values(id=1, turns_ms=turns_ms)
    statement = statement.on_conflict_do_update(
        index_elements=["id"],
        set_={"turns_ms": statement.excluded.turns_ms},
        where=statement.excluded.turns_ms > schema.HorizonRow.turns_ms,  # it never moves back
    )
    await ledger.run(statement)


async def _delete_turns(ledger: Ledger, turns_ms: int) -> int:
    """Delete turns, contents and refusals from before `turns_ms`. Return the number of turns."""
    num_turns = 0
    batch = select(schema.TurnRow.id).where(schema.TurnRow.opened_ms < turns_ms).limit(_BATCH)
    while True:
        async with ledger.transaction() as connection:
            deletion = await connection.execute(
                delete(schema.TurnRow).where(schema.TurnRow.id.in_(batch))
            )
        if not deletion.rowcount:
            break
        num_turns += deletion.rowcount
        await asyncio.sleep(_PAUSE_SECONDS)
    await ledger.run(delete(schema.TurnContentRow).where(schema.TurnContentRow.at_ms < turns_ms))
    await ledger.run(delete(schema.RefusalRow).where(schema.RefusalRow.minute_ms < turns_ms))
    return num_turns


async def _delete_intervals(ledger: Ledger, turns_ms: int, rollups_ms: int) -> int:
    """Delete sums of intervals, day by day. Those shorter than an hour go with their turns."""
    num_deleted = 0
    for table, is_short in product(rollups.WIDTHS_SECONDS, (True, False)):
        end_ms = turns_ms if is_short else rollups_ms
        expired = rollups.intervals(table, 0, end_ms, is_short=is_short)
        ((first_ms,),) = await ledger.rows(select(func.min(table.start_ms)).where(expired))
        if first_ms is None:
            continue
        for since, until in rollups.days(first_ms, end_ms):
            within = rollups.intervals(table, since, until, is_short=is_short)
            async with ledger.transaction() as connection:
                num_deleted += (await connection.execute(delete(table).where(within))).rowcount
            await asyncio.sleep(_PAUSE_SECONDS)
    return num_deleted


async def _delete_lease_ends(ledger: Ledger, turns_ms: int, rollups_ms: int) -> int:
    """Delete ends of leases. Those by minute go with their turns."""
    num_deleted = 0
    ends = schema.LeaseEndRow
    for width in LEASE_WIDTHS_SECONDS:
        end_ms = turns_ms if width == MINUTE_SECONDS else rollups_ms
        expired = (ends.width_seconds == width) & (ends.start_ms < end_ms)
        async with ledger.transaction() as connection:
            num_deleted += (await connection.execute(delete(ends).where(expired))).rowcount
    return num_deleted


_ROWS = 1000
_EPOCH_REPORTS = 50
MADE_UP = "made up"
"""The kind of the engines in sample data."""
Row = Mapping[str, Any]


async def claim(
    ledger: Ledger, now: datetime, workspaces: Sequence[Row], keys: Sequence[Row]
) -> None:
    """Mark an empty database as one of sample data, and make its workspaces and keys from columns
    by name. Raise InvalidRequest where the database is not empty."""
    async with ledger.transaction() as connection:
        await identity.count_change(connection)
        if ledger.is_postgres:
            # No other transaction inserts a turn before this one commits. Then it sees the mark.
            await connection.execute(text("LOCK TABLE turns IN SHARE ROW EXCLUSIVE MODE"))
        if await identity.is_sample(connection):
            raise InvalidRequest("the database holds sample data already")
        workspace = schema.WorkspaceRow.id
        workspaces_made = select(workspace).where(workspace != DEFAULT_WORKSPACE)
        turns = select(schema.TurnRow.id)
        sums_of_turns = select(schema.TurnRollupRow.start_ms)
        for query in (turns, sums_of_turns, workspaces_made):
            if (await connection.execute(query.limit(1))).first() is not None:
                raise InvalidRequest(
                    "the database is not empty: sample data is never mixed with real data"
                )
        await identity.mark_sample(connection, now)
        await connection.execute(insert(schema.WorkspaceRow), workspaces)
        await connection.execute(insert(schema.ApiKeyRow), keys)


async def fill(
    ledger: Ledger,
    records: Iterable[TurnRecord],
    epoch_reports: Callable[[], Iterable[EpochReport]] = tuple,
) -> int:
    """Insert made-up turns into a claimed database and sum them up. Return their number.

    `epoch_reports` is called once all turns are there. It reports what became of their leases.
    """
    total = 0
    epochs = dict[tuple[str, str], EpochReport]()
    observed = map(partial(_observe, epochs), records)
    inserts = map(rollups.row_of, observed)
    while rows := list(islice(inserts, _ROWS)):
        async with ledger.transaction() as connection:
            if not await identity.is_sample(connection):
                raise InvalidRequest("the database is not marked as one of sample data")
            await connection.execute(insert(schema.TurnRow), rows)
        total += len(rows)
    reports = iter([*epochs.values(), *epoch_reports()])
    while some := list(islice(reports, _EPOCH_REPORTS)):
        async with ledger.transaction() as connection:
            await record_epochs(connection, some)
    await rebuild(ledger)
    await ledger.analyze()
    return total


def _observe(epochs: dict[tuple[str, str], EpochReport], record: TurnRecord) -> TurnRecord:
    """Add a made-up turn's prefill to the report of its engine's epoch; return the turn."""
    if record.engine is None or record.epoch is None or record.prefill_seconds is None:
        return record
    opened_ms = int(record.opened_at.timestamp() * 1000)
    report = epochs.setdefault(
        (record.engine, record.epoch),
        EpochReport(
            engine=record.engine,
            epoch=record.epoch,
            model=record.engine_model or record.model,
            device="",
            kind=MADE_UP,
            first_ms=opened_ms,
            heard_ms=opened_ms,
            prefill_times=PrefillSums(),
        ),
    )
    assert report.prefill_times is not None
    report.prefill_times.observe(record.computed_tokens, 0, record.prefill_seconds)
    return record


_KEYS = ("workspace_id", "key_id", "model", "price")
# Each of these characters makes a cell a formula in some spreadsheet, and so do the full-width
# forms. It does so at a cell's beginning, and behind a character that begins another cell where the
# list separator is no comma.
_FORMULA = re.compile("(^|[;\t\r\n])(?=[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20])")
_PAGE = 1000
EXPORT_SECONDS = 300.0
"""The longest time of an export, which is then cut off, even if only its client is slow."""
_WEEK_MS = 7 * _DAY_MS
_SUMS = Totals.__struct_fields__


def line(cells: Iterable[object]) -> str:
    """One line of CSV. A text gets an apostrophe before each character that could begin a
    formula."""
    output = io.StringIO()
    texts = ("" if cell is None else cell for cell in cells)
    safe = (_FORMULA.sub(r"\1'", cell) if isinstance(cell, str) else cell for cell in texts)
    csv.writer(output).writerow(safe)
    return output.getvalue()


async def check_rows(
    ledger: Ledger, of: sums.Range, step_seconds: int | None, max_rows: int
) -> None:
    """Raise InvalidRequest for an export that reads more than `max_rows` rows.

    `step_seconds` is the interval of the exported sums; None exports single turns. The count stops
    at the bound. Sums of one engine are refused too, since sums by key are over all engines.
    """
    async with ledger.snapshot() as connection:
        parts = [sums.Part(None, of.since_ms, of.until_ms)]
        if step_seconds is not None:
            of = await _with_turns(connection, await sums.widen_to_days(connection, of))
            parts = sums.parts_of(
                of.since_ms, of.until_ms, sums.widths_for(of, _KEYS, step_seconds)
            )
        room = max_rows
        for part in parts:
            rows = sums.rows_of(of, part).limit(room + 1).subquery()
            room -= (await connection.execute(select(func.count()).select_from(rows))).scalar_one()
            if room < 0:
                raise InvalidRequest(
                    f"since_ms, until_ms: the range has more than {max_rows} rows to export; ask"
                    " for a shorter one"
                )


async def turns_since_ms(ledger: Ledger, of: sums.Range) -> int | None:
    """The moment in Unix ms since which the range still has its single turns; None where no turn of
    the range was deleted."""
    async with ledger.snapshot() as connection:
        horizon = await rollups.horizon_ms(connection)
    return horizon if of.since_ms < horizon else None


async def usage_lines(
    ledger: Ledger, of: sums.Range, step_seconds: int, seconds: float = EXPORT_SECONDS
) -> AsyncIterator[str]:
    """The header, and one line for each interval, workspace, key, model and price.

    All lines show the database at one moment. One week at a time is in memory. Raise
    LedgerUnavailable after `seconds`.
    """
    yield line(("starting_at", "workspace", "key", "model", "price", *_SUMS, "saved_nano"))
    async with ledger.snapshot(seconds) as connection:
        of = await _with_turns(connection, await sums.widen_to_days(connection, of))
        for since in range(of.since_ms // _DAY_MS * _DAY_MS, of.until_ms, _WEEK_MS):
            part = replace(
                of, since_ms=max(since, of.since_ms), until_ms=min(since + _WEEK_MS, of.until_ms)
            )
            totals_by_group = await sums.totals_by(connection, part, _KEYS, step_seconds)
            for (start, *keys), totals in sorted(totals_by_group.items()):
                counts = [getattr(totals, name) for name in _SUMS]
                yield line((moment(start), *keys, *counts, totals.saved_nano))


async def turn_lines(
    ledger: Ledger, of: sums.Range, seconds: float = EXPORT_SECONDS
) -> AsyncIterator[str]:
    """The header and one line for each turn, the newest first. All lines show the database at one
    moment. Raise LedgerUnavailable after `seconds`."""
    names = [name for name in Turn.__struct_fields__ if name != "opened_ms"]
    yield line(("opened_at", *names))
    after: Cursor | None = None
    async with ledger.snapshot(seconds) as connection:
        while True:
            page = await page_of(connection, of, TurnFilter(), _PAGE, after)
            for turn in page.turns:
                values: list[Any] = [_cell(getattr(turn, name)) for name in names]
                yield line((moment(turn.opened_ms), *values))
            if page.next is None:
                return
            after = Cursor.parse(page.next)


def _cell(value: object) -> object:
    """The value as it is exported: a list as JSON, and others as they are."""
    return msgspec.json.encode(value).decode() if isinstance(value, list) else value


async def _with_turns(connection: AsyncConnection, of: sums.Range) -> sums.Range:
    """The part of the range in which there are days with turns."""
    table = schema.TurnRollupRow
    query = select(func.min(table.start_ms), func.max(table.start_ms)).where(
        table.by_engine == 0, table.width_seconds == rollups.DAY_SECONDS
    )
    first_ms, last_ms = tuple[Any, Any]((await connection.execute(query)).one())
    if first_ms is None:
        return replace(of, until_ms=of.since_ms)
    return replace(
        of, since_ms=max(of.since_ms, first_ms), until_ms=min(of.until_ms, last_ms + _DAY_MS)
    )


def moment(ms: int) -> str:
    """The moment in RFC 3339 and UTC. Whole seconds have no fraction."""
    kind = "seconds" if ms % 1000 == 0 else "milliseconds"
    timestamp = datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec=kind)
    return timestamp.replace("+00:00", "Z")
