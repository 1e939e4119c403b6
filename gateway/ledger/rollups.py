"""Closed turns and the sums over them: each turn is inserted, and added to the sums, exactly once.

The drain's transaction adds only turns that it really inserted, so a repeated batch adds nothing.
Every sum is defined once, as one SQL expression over the turns. The same expression adds turns,
rebuilds the sums, and reads the parts of a range that no interval covers.

Sums by engine are over all keys. Those of short intervals are over all workspaces too. So their
number grows only with the engines.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cache, reduce
from itertools import chain, pairwise
from math import exp, log
from operator import add, attrgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from engine.protocol import MAX_BREAKPOINTS, WRITE_FIELDS, CacheUsage, InputUsage
from gateway.base.errors import LedgerRefused, SampleData
from gateway.base.record import TurnRecord
from gateway.ledger import epochs, identity
from gateway.ledger.checksums import checksum_of
from gateway.ledger.schema import (
    Base,
    EpochRow,
    HorizonRow,
    LatencyRollupRow,
    PrefixRow,
    ReasonRollupRow,
    TurnRollupRow,
    TurnRow,
    ended_in_error,
)
from gateway.prices.price import PROMPT_BANDS
from gateway.structs.usage import JUDGED_TTLS, NOT_DELIVERED

FIVE_MINUTES_MS = 300_000
HOUR_MS = 3_600_000
MINUTE_SECONDS = 60
FIVE_MINUTES_SECONDS = 300
HOUR_SECONDS = 3600
DAY_SECONDS = 86_400
PROMPT_EDGES = (1_000, 4_000, 16_000, 64_000, 200_000)
"""The upper edges of the prompt-length buckets, in tokens. The last bucket has no edge."""
_BIN_WIDTH = log(1.02)
"""The histogram's bins are 2 % wide, so a percentile is known to within 1 % of itself."""
_BIN_OF_ONE_SECOND = 1_000
_SHORTEST_SECONDS = 1e-6
_TOKENS = (*InputUsage.__struct_fields__, "output_tokens", "thinking_tokens")


def written_tokens(of: Any) -> Any:
    """The tokens written under all TTLs. `of` is a table, for an expression, or a row, for a
    number."""
    return reduce(add, (getattr(of, name) for name in WRITE_FIELDS.values()))


def prompt_tokens(of: Any) -> Any:
    """The tokens of the prompt. `of` is a table, for an expression, or a row, for a number."""
    return of.input_tokens + of.cache_read_tokens + written_tokens(of)


def _total(column: Any) -> sa.ColumnElement[int]:
    return sa.func.coalesce(sa.func.sum(column), 0)


def dimensions() -> dict[str, sa.ColumnElement[Any]]:
    """The dimensions of the sums, as expressions over one turn."""
    prompt = prompt_tokens(TurnRow)
    bands = [(prompt > band, band) for band in sorted(PROMPT_BANDS, reverse=True)]
    is_priced = TurnRow.cost_nano.is_not(None) & TurnRow.price.is_not(None)
    return {
        "workspace_id": TurnRow.workspace_id.expression,
        "key_id": TurnRow.key_id.expression,
        "engine": sa.func.coalesce(TurnRow.engine, ""),
        "model": TurnRow.model.expression,
        "price": sa.case((is_priced, TurnRow.price), else_=""),
        "prompt_above": sa.case(*bands, else_=0),
    }


def measures() -> dict[str, sa.ColumnElement[int]]:
    """The measures, as sums over many turns.

    Automatic reuse begins where a read ends. It covers what the turn writes first. The rest of the
    reuse is input that came out of memory (`automatic_input_tokens`).
    """
    reused = TurnRow.automatic_tokens - written_tokens(TurnRow)
    return {
        "requests": sa.func.count(),
        "requests_with_read": sa.func.count().filter(TurnRow.cache_read_tokens > 0),
        "errors": sa.func.count().filter(ended_in_error()),
        "unpriced": sa.func.count().filter(TurnRow.cost_nano.is_(None)),
        **{name: _total(getattr(TurnRow, name)) for name in _TOKENS},
        "automatic_input_tokens": _total(sa.case((reused > 0, reused), else_=0)),
        "cost_nano": _total(TurnRow.cost_nano),
        "cost_without_cache_nano": _total(TurnRow.cost_without_cache_nano),
        # The computed tokens and the time of turns whose prefill was timed.
        "prefill_tokens": _total(
            sa.case((TurnRow.prefill_seconds.is_not(None), TurnRow.computed_tokens), else_=0)
        ),
        "prefill_us": _total(sa.cast(sa.func.round(TurnRow.prefill_seconds * 1e6), sa.BigInteger)),
    }


MEASURES = tuple(measures())


def prompt_bucket() -> sa.ColumnElement[int]:
    prompt = prompt_tokens(TurnRow)
    return sa.case(
        *((prompt <= edge, number) for number, edge in enumerate(PROMPT_EDGES)),
        else_=len(PROMPT_EDGES),
    )


def has_read() -> sa.ColumnElement[int]:
    return sa.case((TurnRow.cache_read_tokens > 0, 1), else_=0)


def ttft_bin() -> sa.ColumnElement[int]:
    """The bin of a turn's time to first token."""
    seconds = TurnRow.first_token_seconds
    bounded = sa.case((seconds > _SHORTEST_SECONDS, seconds), else_=_SHORTEST_SECONDS)
    bins_from_one_second = sa.func.round(sa.func.ln(bounded) / _BIN_WIDTH)
    return sa.cast(bins_from_one_second, sa.BigInteger) + _BIN_OF_ONE_SECOND


def seconds_of(number: int) -> float:
    """The middle of a bin, in seconds."""
    return exp((number - _BIN_OF_ONE_SECOND) * _BIN_WIDTH)


def _prefixes(where: sa.ColumnElement[bool]) -> Any:
    sums = measures()
    names = ("requests", "requests_with_read", "unpriced", *CacheUsage.__struct_fields__)
    names += ("cost_nano", "cost_without_cache_nano")
    return (
        sa.select(
            TurnRow.workspace_id,
            TurnRow.prefix,
            sa.func.max(TurnRow.model).label("model"),
            sa.func.min(TurnRow.model).label("least_model"),
            sa.func.max(TurnRow.prefix_ttl).label("ttl"),
            sa.func.max(sa.func.nullif(TurnRow.price, NOT_DELIVERED)).label("price"),
            sa.func.min(TurnRow.opened_ms).label("first_ms"),
            sa.func.max(TurnRow.opened_ms).label("last_ms"),
            *(sums[name].label(name) for name in names),
            sa.literal(0, sa.BigInteger).label("gaps_5m"),
            sa.literal(0, sa.BigInteger).label("gaps_1h"),
        )
        .where(TurnRow.prefix.is_not(None), where)
        .group_by(TurnRow.workspace_id, TurnRow.prefix)
    )


def _epochs(where: sa.ColumnElement[bool]) -> Any:
    """When each epoch's first and last turn began. Turns without an engine have no epoch."""
    keys = TurnRow.engine, TurnRow.epoch, TurnRow.model
    first_ms = sa.func.min(TurnRow.opened_ms).label("first_ms")
    last_ms = sa.func.max(TurnRow.opened_ms).label("last_ms")
    has_epoch = TurnRow.engine.is_not(None), TurnRow.epoch.is_not(None)
    return sa.select(*keys, first_ms, last_ms).where(*has_epoch, where).group_by(*keys)


def _upsert(on_postgres: bool, table: type[Base], source: Any) -> Any:
    """Add the rows of `source` to those of the table. Counts are added up. A text or a moment
    becomes the largest or the smallest of the two.

    All writers use one order of rows, so that no two deadlock.
    """
    insert = postgresql.insert if on_postgres else sqlite.insert
    target = table.__table__
    keys = [column.name for column in target.primary_key]
    names = [column.name for column in source.selected_columns]
    statement = insert(table).from_select(names, source.order_by(*map(sa.text, keys)))
    changes: dict[str, Any] = {}
    for name in names:
        if name in keys:
            continue
        stored = target.c[name]
        added = statement.excluded[name]
        if name in ("model", "ttl", "price"):
            changes[name] = sa.case((added > sa.func.coalesce(stored, ""), added), else_=stored)
        elif name == "least_model":
            least = sa.func.coalesce(stored, target.c.model)
            changes[name] = sa.case((added < least, added), else_=least)
        elif name == "first_ms":
            changes[name] = sa.case((added < stored, added), else_=stored)
        elif name == "last_ms":
            changes[name] = sa.case((added > stored, added), else_=stored)
        else:
            changes[name] = stored + added
    return statement.on_conflict_do_update(index_elements=keys, set_=changes)


IntervalTable = type[TurnRollupRow] | type[ReasonRollupRow] | type[LatencyRollupRow]
_LONG = (DAY_SECONDS, HOUR_SECONDS)
WIDTHS_SECONDS: dict[IntervalTable, tuple[tuple[int, ...], tuple[int, ...]]] = {
    TurnRollupRow: ((*_LONG, MINUTE_SECONDS), (*_LONG, FIVE_MINUTES_SECONDS)),
    ReasonRollupRow: ((*_LONG, MINUTE_SECONDS), _LONG),
    LatencyRollupRow: ((*_LONG, FIVE_MINUTES_SECONDS), (DAY_SECONDS,)),
}
"""The lengths of intervals, the longest first. Sums over all engines have one list, and sums by
engine have another. Sums of intervals shorter than an hour are deleted with their turns."""


def interval_sums(where: sa.ColumnElement[bool]) -> dict[IntervalTable, Any]:
    """The select of each table's rows, over the turns that pass `where`.

    The turns are read once for each table and summed over its shortest interval. The rows are sums
    of these sums.
    """
    keys = {name: dimensions()[name] for name in ("workspace_id", "engine", "model")}
    bins = {"prompt_bucket": prompt_bucket(), "has_read": has_read(), "bin": ttft_bin()}
    count = {"requests": sa.func.count()}
    is_timed = TurnRow.first_token_seconds.is_not(None)
    return {
        TurnRollupRow: _interval_rows(TurnRollupRow, dimensions(), measures(), where),
        ReasonRollupRow: _interval_rows(ReasonRollupRow, keys, count, where, reasons()),
        LatencyRollupRow: _interval_rows(LatencyRollupRow, keys | bins, count, where & is_timed),
    }


def _interval_rows(
    table: IntervalTable,
    keys: dict[str, Any],
    sums: dict[str, Any],
    where: sa.ColumnElement[bool],
    kinds: dict[str, Any] | None = None,
) -> Any:
    """The rows of one table. Each column of `kinds` makes rows of its own, over the turns in which
    it has a value."""
    widths = [
        (by_engine, width)
        for by_engine, widths_of_rows in enumerate(WIDTHS_SECONDS[table])
        for width in widths_of_rows
    ]
    kinds = kinds or {}
    start = _start(TurnRow.opened_ms, min(width for _, width in widths))
    short = _grouped({"start_ms": start} | keys | kinds, sums).where(where).cte("short")
    totals = {name: sa.func.sum(short.c[name]) for name in sums}
    selects = []
    for by_engine, width in widths:
        blank = ["engine"]
        if by_engine:
            blank = ["key_id", "workspace_id"] if width < HOUR_SECONDS else ["key_id"]
        columns = {
            "by_engine": sa.literal(by_engine),
            "width_seconds": sa.literal(width),
            "start_ms": _start(short.c.start_ms, width),
            **{name: sa.literal("", sa.Text) if name in blank else short.c[name] for name in keys},
        }
        for kind in kinds:
            value = short.c[kind]
            kind_columns = {"kind": sa.literal(kind), "value": value}
            selects.append(_grouped(columns | kind_columns, totals).where(value.is_not(None)))
        if not kinds:
            selects.append(_grouped(columns, totals))
    return sa.union_all(*selects)


def _grouped(columns: dict[str, Any], sums: dict[str, Any]) -> sa.Select[Any]:
    """The sums, grouped by the columns."""
    labelled = [column.label(name) for name, column in (columns | sums).items()]
    # `GROUP BY 3, 4, …`: the database might take a label for a column of the same name.
    ordinals = (
        sa.text(str(number))
        for number, column in enumerate(columns.values(), 1)
        if not isinstance(column, sa.BindParameter)
    )
    return sa.select(*labelled).group_by(*ordinals)


def _start(ms: Any, width_seconds: int) -> sa.ColumnElement[int]:
    """The beginning of the interval in which a moment lies."""
    step = width_seconds * 1000
    bucket: sa.ColumnElement[int] = ms // step * step
    return bucket


def intervals(
    table: IntervalTable, since_ms: int, until_ms: int, *, is_short: bool | None = None
) -> sa.ColumnElement[bool]:
    """The condition of rows whose intervals begin in [since, until). With `is_short` True these are
    only intervals shorter than an hour, and with False only the others.

    The condition names the key's columns up to the start, so that the key's index serves.
    """
    all_widths = set(chain.from_iterable(WIDTHS_SECONDS[table]))
    widths = [width for width in all_widths if is_short in (None, width < HOUR_SECONDS)]
    is_within = (table.start_ms >= since_ms) & (table.start_ms < until_ms)
    return table.by_engine.in_((0, 1)) & table.width_seconds.in_(widths) & is_within


MARK_KINDS = tuple(f"mark{number}" for number in range(1, MAX_BREAKPOINTS + 1))
MIXED = "mixed"
"""The kind of the reasons of deleted turns for which nobody knows whether they read something."""


def reasons() -> dict[str, sa.ColumnElement[Any]]:
    """A turn's reasons, by their kind.

    A turn that read something and has a miss reason missed in part. Its reason has a kind of its
    own. Each marker that was not read has a reason, so the sum over `MARK_KINDS` is the number of
    such markers.
    """
    reason = TurnRow.miss_reason.expression
    has_read = TurnRow.cache_read_tokens > 0
    return {
        "miss": sa.case((~has_read, reason)),
        "part": sa.case((has_read, reason)),
        "outcome": TurnRow.outcome.expression,
        **{kind: TurnRow.marks[n, "missed"].as_string() for n, kind in enumerate(MARK_KINDS)},
    }


def _additions(on_postgres: bool, where: sa.ColumnElement[bool]) -> list[Any]:
    return [_upsert(on_postgres, table, sums) for table, sums in interval_sums(where).items()]


def is_postgres(connection: AsyncConnection | sa.Connection) -> bool:
    return connection.dialect.name == "postgresql"


def _are_new(turn_id: Any, on_postgres: bool) -> sa.ColumnElement[bool]:
    """Whether the turn is among those of the parameter `turn_ids`, a JSON array of any length."""
    ids: Any = sa.bindparam("turn_ids", type_=sa.Text)
    if on_postgres:
        ids = sa.func.json_array_elements_text(sa.cast(ids, postgresql.JSON)).column_valued()
    else:
        ids = sa.func.json_each(ids).table_valued("value").c.value
    is_among: sa.ColumnElement[bool] = turn_id.in_(sa.select(ids))
    return is_among


@cache
def gap_changes(on_postgres: bool) -> Any:
    """How much each prefix's counts of gaps grow by the new turns. The turns may come in any order.

    A new turn adds the gap to the turn before it. If there is a turn after it, that turn's gap
    changes: the new gap is added and the former one is taken off.
    """
    other = aliased(TurnRow)
    place = sa.tuple_(TurnRow.opened_ms, TurnRow.id)
    other_place = sa.tuple_(other.opened_ms, other.id)
    backwards = other.opened_ms.desc(), other.id.desc()
    # `coalesce` keeps the database on the prefix's index. Without statistics SQLite might take the
    # workspace's index, and look at each turn of the workspace.
    near = sa.select(other.opened_ms).where(
        sa.func.coalesce(other.workspace_id, "") == TurnRow.workspace_id,
        other.prefix == TurnRow.prefix,
    )
    is_new = _are_new(other.id, on_postgres)
    previous_ms = near.where(other_place < place).order_by(*backwards).limit(1).scalar_subquery()
    old_ms = near.with_only_columns(sa.case((is_new, sa.null()), else_=other.opened_ms))
    later = old_ms.where(other_place > place).order_by(other.opened_ms, other.id)
    next_ms = later.limit(1).scalar_subquery()
    earlier = near.where(other_place < place, sa.not_(is_new)).order_by(*backwards).limit(1)
    gaps = (
        sa.select(
            TurnRow.workspace_id,
            TurnRow.prefix,
            (TurnRow.opened_ms - previous_ms).label("added"),
            (next_ms - TurnRow.opened_ms).label("next"),
            sa.case((next_ms.is_not(None), next_ms - earlier.scalar_subquery())).label("former"),
        )
        .where(TurnRow.prefix.is_not(None), _are_new(TurnRow.id, on_postgres))
        # PostgreSQL merges no query with an offset, so each gap is looked up once, not six times.
        .offset(0)
        .subquery()
    )

    def growth(above: int, up_to: int) -> sa.ColumnElement[int]:
        """How much the count of gaps grows. The gaps are in (above, up_to], in milliseconds."""

        def counted(gap: sa.ColumnElement[int], sign: int) -> sa.ColumnElement[int]:
            return sa.case((gap.between(above + 1, up_to), sign), else_=0)

        return sa.func.sum(
            counted(gaps.c.added, 1) + counted(gaps.c.next, 1) + counted(gaps.c.former, -1)
        )

    return (
        sa.select(
            gaps.c.workspace_id,
            gaps.c.prefix,
            growth(-1, FIVE_MINUTES_MS).label("more_5m"),
            growth(FIVE_MINUTES_MS, HOUR_MS).label("more_1h"),
        )
        .group_by(gaps.c.workspace_id, gaps.c.prefix)
        .subquery()
    )


def _with_gaps(changes: Any) -> Any:
    """Add `more_5m` and `more_1h` of each prefix to its counts of gaps."""
    row = PrefixRow
    of_prefix = row.workspace_id == changes.c.workspace_id, row.prefix == changes.c.prefix
    more = {
        f"gaps_{ttl}": getattr(row, f"gaps_{ttl}") + changes.c[f"more_{ttl}"] for ttl in JUDGED_TTLS
    }
    return sa.update(row).where(*of_prefix).values(more)


@cache
def _adding(on_postgres: bool) -> list[Any]:
    """The statements of every drain. They are made once, since making them costs more than running
    them.

    The prefixes' statement locks their rows, so that the second of two writers sees the first one's
    turns.
    """
    where = _are_new(TurnRow.id, on_postgres)
    gaps = _with_gaps(gap_changes(on_postgres))
    prefixes = _upsert(on_postgres, PrefixRow, _prefixes(where))
    epochs = _upsert(on_postgres, EpochRow, _epochs(where))
    return [*_additions(on_postgres, where), epochs, prefixes, gaps]


async def rebuild_interval(connection: AsyncConnection, since_ms: int, until_ms: int) -> None:
    """Replace the sums of whole days by sums of the turns that are there. Writers wait meanwhile,
    and their turns are added afterwards."""
    await _lock(connection, *WIDTHS_SECONDS)
    for table in WIDTHS_SECONDS:
        await connection.execute(sa.delete(table).where(intervals(table, since_ms, until_ms)))
    where = (TurnRow.opened_ms >= since_ms) & (TurnRow.opened_ms < until_ms)
    for statement in _additions(is_postgres(connection), where):
        await connection.execute(statement)


WHOLE = (EpochRow, PrefixRow)
"""The tables of sums without intervals, in the order in which turns are added to them. The same
order everywhere keeps writers from a deadlock."""


async def rebuild_whole(connection: AsyncConnection) -> None:
    """Replace the sums of all prefixes and epochs by sums of the turns that are there."""
    await _lock(connection, *WHOLE)
    prefix_key = (TurnRow.workspace_id, TurnRow.prefix)
    on_postgres = is_postgres(connection)
    place = (TurnRow.opened_ms, TurnRow.id)
    previous_ms = sa.func.lag(TurnRow.opened_ms).over(partition_by=prefix_key, order_by=place)
    gap = (TurnRow.opened_ms - previous_ms).label("gap")
    gaps = sa.select(*prefix_key, gap).where(TurnRow.prefix.is_not(None)).subquery()
    keys = gaps.c.workspace_id, gaps.c.prefix
    counts = sa.select(
        *keys,
        sa.func.count().filter(gaps.c.gap <= FIVE_MINUTES_MS).label("more_5m"),
        sa.func.count().filter(gaps.c.gap > FIVE_MINUTES_MS).label("more_1h"),
    )
    counts = counts.where(gaps.c.gap <= HOUR_MS).group_by(*keys)
    everything = sa.literal(1) == 1
    for table, sums in zip(WHOLE, (_epochs(everything), _prefixes(everything)), strict=True):
        await connection.execute(sa.delete(table))
        await connection.execute(_upsert(on_postgres, table, sums))
    await connection.execute(_with_gaps(counts.subquery()))


async def horizon_ms(connection: AsyncConnection) -> int:
    """The moment since which no turn was deleted, in Unix ms; 0 where none was ever deleted."""
    horizon = (await connection.execute(sa.select(HorizonRow.turns_ms))).scalar_one_or_none()
    return horizon or 0


async def _lock(connection: AsyncConnection, *tables: type[Base]) -> None:
    """Lock the tables against other writers. SQLite has a single writer, from the first changing
    statement on."""
    if is_postgres(connection):
        names = ", ".join(table.__tablename__ for table in tables)
        await connection.execute(sa.text(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE"))


def days(since_ms: int, until_ms: int) -> Iterable[tuple[int, int]]:
    """The whole UTC days that a range touches, as [since, until) in milliseconds."""
    day = DAY_SECONDS * 1000
    starts = range(since_ms // day * day, until_ms + day, day)
    return (pair for pair in pairwise(starts) if pair[0] < until_ms)


_INSERTS = {
    kind.dialect.name: kind.insert(TurnRow).on_conflict_do_nothing().returning(TurnRow.id)
    for kind in (postgresql, sqlite)
}


def insert_closed(connection: sa.Connection, records: Sequence[TurnRecord]) -> None:
    """Insert the closed turns that are not there yet, and add them to the sums.

    Raise LedgerRefused for a value that the database can't hold, and SampleData where the database
    holds sample data.
    """
    rows = {record.id: row_of(record) for record in reversed(records)}
    sorted_rows = [rows[turn_id] for turn_id in sorted(rows)]
    try:
        insert = _INSERTS[connection.dialect.name]
        new_ids = connection.execute(insert, sorted_rows).scalars().all()
    except (IntegrityError, OverflowError, ValueError) as error:
        raise LedgerRefused from error
    # The insert waits for a command that fills the database with samples. So the check follows it.
    if identity.has_sample_mark(connection):
        raise SampleData
    if new_ids:
        values = {"turn_ids": json.dumps(new_ids)}
        for statement in _adding(is_postgres(connection)):
            connection.execute(statement, values)
    epochs.record_granted(connection, records)


_RENAMED = {
    "workspace_id": "workspace",
    "cost_nano": "cost",
    "cost_without_cache_nano": "cost_without_cache",
}
_COLUMNS = [
    column.name
    for column in TurnRow.__table__.columns
    if column.name not in ("opened_ms", "checksum")
]
_fields_of = attrgetter(*(_RENAMED.get(name, name) for name in _COLUMNS))


def row_of(record: TurnRecord) -> dict[str, Any]:
    """The columns of a turn: the fields of its record, some under another name."""
    row: dict[str, Any] = dict(zip(_COLUMNS, _fields_of(record), strict=True))
    row["opened_ms"] = int(record.opened_at.timestamp() * 1000)
    row["checksum"] = checksum_of(row)
    return row
