"""The moment before which turns may have been deleted; their sums are kept longer."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    bindparam,
    case,
    cast,
    delete,
    func,
    literal,
    literal_column,
    select,
    text,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from gateway.base.errors import LedgerRefused, SampleData
from gateway.base.record import TurnRecord
from gateway.ledger import identity
from gateway.ledger.schema import (
    Base,
    HorizonRow,
    LatencyRollupRow,
    PrefixRow,
    ReasonRollupRow,
    TurnRollupRow,
    TurnRow,
)
from gateway.prices.price import PROMPT_BANDS


async def horizon_ms(connection: AsyncConnection) -> int:
    """The moment from which the turns are complete. 0 if none were deleted."""
    found = (await connection.execute(select(HorizonRow.turns_ms))).scalar_one_or_none()
    return found or 0


_ROW: ColumnElement[int] = literal_column(f"{TurnRow.__tablename__}.rowid")
_LAST = select(func.max(_ROW)).select_from(TurnRow)


def is_postgres(connection: AsyncConnection | Connection) -> bool:
    return connection.dialect.name == "postgresql"


def are_inserted(*, on_postgres: bool) -> ColumnElement[bool]:
    """Whether a turn is one of those that `inserted` was told."""
    if on_postgres:
        return TurnRow.id.in_(bindparam("turn_ids", expanding=True))
    return _ROW.between(bindparam("first_row"), bindparam("last_row"))


def inserted(connection: Connection, turn_ids: Sequence[str]) -> dict[str, Any]:
    """The parameters of `are_inserted`, for the turns that this transaction inserted last."""
    if is_postgres(connection):
        return {"turn_ids": turn_ids}
    last = connection.execute(_LAST).scalar_one()
    return {"first_row": last - len(turn_ids) + 1, "last_row": last}


FIVE_MINUTES_MS = 300_000
HOUR_MS = 3_600_000


class _Added(NamedTuple):
    """An inserted turn and the turns right before and after it, with the same prefix."""

    id: str
    workspace: str
    prefix: str
    opened_ms: int
    before: str | None
    after: str | None


Changes = Counter[tuple[str, str, str]]
"""By workspace, prefix and column, how much a sum grows."""


def gaps_in_order(connection: Connection, values: Mapping[str, Any]) -> tuple[Changes, list[str]]:
    """The gaps of turns that SQLite has just inserted in order, and the ids of the others.

    A prefix whose first new turn is not older than its last one before gets no turn between two
    others. This runs before the new turns are added to the prefixes. SQLite has a single writer, so
    nobody else adds any meanwhile. `values` are those of `inserted`.
    """
    changes: Changes = Counter()
    late: list[str] = []
    found: Any = connection.execute(_with_last(), values)
    for own, turns in groupby(found, key=lambda row: (row.workspace_id, row.prefix)):
        inserted = list(turns)
        moments = [turn.opened_ms for turn in inserted]
        last = inserted[0].last_ms
        if last is not None and moments[0] < last:
            late += [turn.id for turn in inserted]
            continue
        for before, after in pairwise(moments if last is None else [last, *moments]):
            _count(changes, own, after - before, 1)
    return changes, late


@cache
def _with_last() -> Any:
    """The query: each prefix's inserted turns in their order, with the moment of its last turn."""
    is_own = (PrefixRow.workspace_id == TurnRow.workspace_id) & (PrefixRow.prefix == TurnRow.prefix)
    return (
        select(
            TurnRow.id, TurnRow.workspace_id, TurnRow.prefix, TurnRow.opened_ms, PrefixRow.last_ms
        )
        .outerjoin(PrefixRow, is_own)
        .where(TurnRow.prefix.is_not(None), are_inserted(on_postgres=False))
        .order_by(TurnRow.workspace_id, TurnRow.prefix, TurnRow.opened_ms)
    )


def gaps_among_others(connection: Connection, turn_ids: Sequence[str]) -> Changes:
    """The gaps of turns that this transaction has inserted. It has locked their prefixes."""
    changes: Changes = Counter()
    added = _added(connection, turn_ids)
    opened = {turn.id: turn.opened_ms for turn in added.values()}
    neighbours = {n for turn in added.values() for n in (turn.before, turn.after) if n is not None}
    if others := neighbours - opened.keys():
        query = select(TurnRow.id, TurnRow.opened_ms).where(TurnRow.id.in_(others))
        opened |= {row.id: row.opened_ms for row in connection.execute(query)}
    for turn in added.values():
        own = (turn.workspace, turn.prefix)
        _count_pair(changes, own, opened, (turn.before, turn.id), 1)
        if turn.after is None or turn.after in added:
            continue
        # `after` was there already. Its gap was counted to the nearest earlier turn that was there.
        earlier = turn.before
        while earlier is not None and earlier in added:
            earlier = added[earlier].before
        _count_pair(changes, own, opened, (turn.id, turn.after), 1)
        _count_pair(changes, own, opened, (earlier, turn.after), -1)
    return changes


@cache
def neighbours() -> Any:
    """The query. It is made once, since making it costs more than running it."""
    other = aliased(TurnRow)
    place = tuple_(TurnRow.opened_ms, TurnRow.id)
    # By the prefix's index alone. Without statistics SQLite might take the workspace's, and look at
    # each of its turns.
    near = select(other.id).where(
        func.coalesce(other.workspace_id, "") == TurnRow.workspace_id,
        other.prefix == TurnRow.prefix,
    )
    there = tuple_(other.opened_ms, other.id)
    before = near.where(there < place).order_by(other.opened_ms.desc(), other.id.desc()).limit(1)
    after = near.where(there > place).order_by(other.opened_ms, other.id).limit(1)
    return select(
        TurnRow.id,
        TurnRow.workspace_id,
        TurnRow.prefix,
        TurnRow.opened_ms,
        before.scalar_subquery().label("before"),
        after.scalar_subquery().label("after"),
    ).where(TurnRow.id.in_(bindparam("turn_ids", expanding=True)), TurnRow.prefix.is_not(None))


def _added(connection: Connection, turn_ids: Sequence[str]) -> dict[str, _Added]:
    rows: Any = connection.execute(neighbours(), {"turn_ids": turn_ids})
    return {row.id: _Added(*row) for row in rows}


def _count_pair(
    changes: Changes,
    own: tuple[str, str],
    opened: dict[str, int],
    pair: tuple[str | None, str],
    sign: int,
) -> None:
    first, second = pair
    if first is not None:
        _count(changes, own, opened[second] - opened[first], sign)


def _count(changes: Changes, own: tuple[str, str], gap: int, sign: int) -> None:
    if gap <= FIVE_MINUTES_MS:
        changes[(*own, "gaps_5m")] += sign
    elif gap <= HOUR_MS:
        changes[(*own, "gaps_1h")] += sign


def add_gaps(connection: Connection, changes: Changes) -> None:
    """Add the gaps to their prefixes, whose rows are there."""
    owners = sorted({(workspace, prefix) for workspace, prefix, _ in changes})
    if not owners:
        return
    statement = (
        update(PrefixRow)
        .where(
            PrefixRow.workspace_id == bindparam("of_workspace"),
            PrefixRow.prefix == bindparam("of_prefix"),
        )
        .values(
            gaps_5m=PrefixRow.gaps_5m + bindparam("more_5m"),
            gaps_1h=PrefixRow.gaps_1h + bindparam("more_1h"),
        )
    )
    rows = [
        {
            "of_workspace": workspace,
            "of_prefix": prefix,
            "more_5m": changes[(workspace, prefix, "gaps_5m")],
            "more_1h": changes[(workspace, prefix, "gaps_1h")],
        }
        for workspace, prefix in owners
    ]
    connection.execute(statement, rows)


HOUR_SECONDS = 3600
DAY_SECONDS = 86_400
WIDTHS_SECONDS = (HOUR_SECONDS, DAY_SECONDS)
# Upper edges of prompt-length buckets, in tokens; the last bucket has none.
PROMPT_EDGES = (1_000, 4_000, 16_000, 64_000, 200_000)
# Upper edges of the histogram's bins: from 1 ms in steps of √2, so that a percentile is known to
# within 19 % of itself. The last bin has none.
TTFT_EDGES_SECONDS = tuple(0.001 * 2 ** (step / 2) for step in range(35))

DIMENSIONS = ("workspace_id", "key_id", "engine", "model", "price", "prompt_above")
_TOKENS = (
    "input_tokens",
    "cache_read_tokens",
    "cache_write_5m_tokens",
    "cache_write_1h_tokens",
    "automatic_tokens",
    "computed_tokens",
    "output_tokens",
    "thinking_tokens",
)


def _total(column: Any) -> ColumnElement[int]:
    return func.coalesce(func.sum(column), 0)


def dimensions() -> dict[str, ColumnElement[Any]]:
    """The dimensions of the sums, as expressions over one turn."""
    prompt: Any = (
        TurnRow.input_tokens
        + TurnRow.cache_read_tokens
        + TurnRow.cache_write_5m_tokens
        + TurnRow.cache_write_1h_tokens
    )
    bands = [(prompt > band, band) for band in sorted(PROMPT_BANDS, reverse=True)]
    is_priced = TurnRow.cost_nano.is_not(None) & TurnRow.price.is_not(None)
    return {
        "workspace_id": TurnRow.workspace_id.expression,
        "key_id": TurnRow.key_id.expression,
        "engine": func.coalesce(TurnRow.engine, ""),
        "model": TurnRow.model.expression,
        "price": case((is_priced, TurnRow.price), else_=""),
        "prompt_above": case(*bands, else_=0),
    }


def _automatic_input() -> ColumnElement[int]:
    """The tokens of a turn's uncached input that were reused from memory all the same.

    Automatic reuse goes on where the read ends, so the tokens that are written come first.
    """
    written: Any = TurnRow.cache_write_5m_tokens + TurnRow.cache_write_1h_tokens
    reused: Any = TurnRow.automatic_tokens
    return case((reused > written, reused - written), else_=0)


def measures() -> dict[str, ColumnElement[int]]:
    """The measures, as sums over many turns."""
    return {
        "requests": func.count(),
        "requests_with_read": func.count().filter(TurnRow.cache_read_tokens > 0),
        "errors": func.count().filter(TurnRow.outcome.endswith("_error", autoescape=True)),
        "unpriced": func.count().filter(TurnRow.cost_nano.is_(None)),
        **{name: _total(getattr(TurnRow, name)) for name in _TOKENS},
        "automatic_input_tokens": _total(_automatic_input()),
        "cost_nano": _total(TurnRow.cost_nano),
        "cost_without_cache_nano": _total(TurnRow.cost_without_cache_nano),
        # The computed tokens and the time of turns whose prefill was timed.
        "prefill_tokens": _total(
            case((TurnRow.prefill_seconds.is_not(None), TurnRow.computed_tokens), else_=0)
        ),
        "prefill_us": _total(cast(func.round(TurnRow.prefill_seconds * 1e6), BigInteger)),
    }


MEASURES = tuple(measures())


def start_of(width_seconds: int) -> ColumnElement[int]:
    """The start, in milliseconds, of the interval that a turn began in."""
    step = width_seconds * 1000
    return TurnRow.opened_ms // step * step


def prompt_bucket() -> ColumnElement[int]:
    prompt: Any = (
        TurnRow.input_tokens
        + TurnRow.cache_read_tokens
        + TurnRow.cache_write_5m_tokens
        + TurnRow.cache_write_1h_tokens
    )
    return case(
        *((prompt <= edge, number) for number, edge in enumerate(PROMPT_EDGES)),
        else_=len(PROMPT_EDGES),
    )


def has_read() -> ColumnElement[int]:
    return case((TurnRow.cache_read_tokens > 0, 1), else_=0)


def ttft_bin(low: int = 0, high: int = len(TTFT_EDGES_SECONDS)) -> ColumnElement[int]:
    """The bin of a turn's time to first token.

    It is a balanced tree because it runs for every turn.
    """
    if low == high:
        return literal(low, BigInteger)
    middle = (low + high) // 2
    return case(
        (TurnRow.first_token_seconds <= TTFT_EDGES_SECONDS[middle], ttft_bin(low, middle)),
        else_=ttft_bin(middle + 1, high),
    )


def reasons(width_seconds: int, *where: ColumnElement[bool]) -> Iterator[Any]:
    """Two selects, one of each kind, in the columns of `reason_rollups`."""
    found = dimensions()
    for kind, column in (("miss", TurnRow.miss_reason), ("outcome", TurnRow.outcome)):
        keys: list[Any] = [
            start_of(width_seconds).label("start_ms"),
            found["workspace_id"].label("workspace_id"),
            found["engine"].label("engine"),
            TurnRow.model.label("model"),
            column.label("value"),
        ]
        yield (
            select(
                literal(width_seconds, BigInteger).label("width_seconds"),
                literal(kind).label("kind"),
                *keys,
                func.count().label("requests"),
            )
            .where(column.is_not(None), *where)
            .group_by(*(text(key.name) for key in keys))
        )


def _turn_sums(width_seconds: int, where: ColumnElement[bool]) -> Any:
    keys: list[Any] = [
        start_of(width_seconds).label("start_ms"),
        *(column.label(name) for name, column in dimensions().items()),
    ]
    sums = [column.label(name) for name, column in measures().items()]
    width = literal(width_seconds, BigInteger).label("width_seconds")
    return select(width, *keys, *sums).where(where).group_by(*_ordinals(2, len(keys)))


def _latencies(where: ColumnElement[bool]) -> Any:
    keys: list[Any] = [
        start_of(DAY_SECONDS).label("start_ms"),
        TurnRow.workspace_id.label("workspace_id"),
        func.coalesce(TurnRow.engine, "").label("engine"),
        TurnRow.model.label("model"),
        prompt_bucket().label("prompt_bucket"),
        has_read().label("has_read"),
        ttft_bin().label("bin"),
    ]
    return (
        select(*keys, func.count().label("requests"))
        .where(TurnRow.first_token_seconds.is_not(None), where)
        .group_by(*_ordinals(1, len(keys)))
    )


def _ordinals(first: int, count: int) -> list[Any]:
    """`GROUP BY 2, 3, …`: a label could be taken for a column of the same name."""
    return [text(str(number)) for number in range(first, first + count)]


def _prefixes(where: ColumnElement[bool]) -> Any:
    sums = measures()
    names = (
        "requests",
        "requests_with_read",
        "unpriced",
        "cache_read_tokens",
        "cache_write_5m_tokens",
        "cache_write_1h_tokens",
        "cost_nano",
        "cost_without_cache_nano",
    )
    return (
        select(
            TurnRow.workspace_id,
            TurnRow.prefix,
            func.max(TurnRow.model).label("model"),
            func.max(TurnRow.prefix_ttl).label("ttl"),
            func.max(TurnRow.price).label("price"),
            func.min(TurnRow.opened_ms).label("first_ms"),
            func.max(TurnRow.opened_ms).label("last_ms"),
            *(sums[name].label(name) for name in names),
            literal(0, BigInteger).label("gaps_5m"),
            literal(0, BigInteger).label("gaps_1h"),
        )
        .where(TurnRow.prefix.is_not(None), where)
        .group_by(TurnRow.workspace_id, TurnRow.prefix)
    )


def _upsert(on_postgres: bool, table: type[Base], source: Any) -> Any:
    """Add `source` to the table. All writers use one order, so that no two deadlock."""
    insert = postgresql.insert if on_postgres else sqlite.insert
    target = table.__table__
    keys = [column.name for column in target.primary_key]
    names = [column.name for column in source.selected_columns]
    statement = insert(table).from_select(names, source.order_by(*map(text, keys)))
    new = statement.excluded
    changes: dict[str, Any] = {}
    for name in names:
        old = target.c[name]
        if name in ("model", "ttl", "price"):
            changes[name] = case((new[name] > func.coalesce(old, ""), new[name]), else_=old)
        elif name == "last_ms":
            changes[name] = case((new[name] > old, new[name]), else_=old)
        elif name == "first_ms":
            changes[name] = case((new[name] < old, new[name]), else_=old)
        elif name not in keys:
            changes[name] = old + new[name]
    changes = {name: change for name, change in changes.items() if name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=changes)


IntervalTable = type[TurnRollupRow] | type[ReasonRollupRow] | type[LatencyRollupRow]


def interval_sums(where: ColumnElement[bool]) -> dict[IntervalTable, Any]:
    """By table, the select of its rows over the turns that `where` leaves."""
    return {
        TurnRollupRow: union_all(*(_turn_sums(width, where) for width in WIDTHS_SECONDS)),
        ReasonRollupRow: union_all(
            *(part for width in WIDTHS_SECONDS for part in reasons(width, where))
        ),
        LatencyRollupRow: _latencies(where),
    }


def _additions(on_postgres: bool, where: ColumnElement[bool]) -> list[Any]:
    return [_upsert(on_postgres, table, sums) for table, sums in interval_sums(where).items()]


@cache
def _adding(on_postgres: bool) -> list[Any]:
    """The statements of every drain.

    They are made once, since making them costs more than running them.

    The last one locks the prefixes' rows, so that of two writers the second sees the first one's
    turns when it looks for neighbours.
    """
    where = are_inserted(on_postgres=on_postgres)
    prefixes = _upsert(on_postgres, PrefixRow, _prefixes(where))
    return [*_additions(on_postgres, where), prefixes]


def add_turns(connection: Connection, turn_ids: Sequence[str]) -> None:
    """Add turns that this transaction has just inserted."""
    if not turn_ids:
        return
    values, changes, others = inserted(connection, turn_ids), Changes(), turn_ids
    on_postgres = is_postgres(connection)
    if not on_postgres:
        changes, others = gaps_in_order(connection, values)
    for statement in _adding(on_postgres):
        connection.execute(statement, values)
    if others:
        changes.update(gaps_among_others(connection, others))
    add_gaps(connection, changes)


async def rebuild_interval(connection: AsyncConnection, since_ms: int, until_ms: int) -> None:
    """Replace the sums of whole days by those of the turns that are there.

    Writers wait meanwhile. Turns that they have inserted but not yet added are not seen here. The
    writers add them when they go on.
    """
    await _lock(connection, TurnRollupRow, ReasonRollupRow, LatencyRollupRow)
    for table in (TurnRollupRow, ReasonRollupRow, LatencyRollupRow):
        within = (table.start_ms >= since_ms) & (table.start_ms < until_ms)
        await connection.execute(delete(table).where(within))
    where = (TurnRow.opened_ms >= since_ms) & (TurnRow.opened_ms < until_ms)
    for statement in _additions(is_postgres(connection), where):
        await connection.execute(statement)


async def rebuild_prefixes(connection: AsyncConnection) -> None:
    """Replace the sums of all prefixes by those of the turns that are there."""
    await _lock(connection, PrefixRow)
    await connection.execute(delete(PrefixRow))
    await connection.execute(
        _upsert(is_postgres(connection), PrefixRow, _prefixes(literal(1) == 1))
    )
    counts = gap_counts()
    is_own = (PrefixRow.workspace_id == counts.c.workspace_id) & (
        PrefixRow.prefix == counts.c.prefix
    )
    await connection.execute(
        update(PrefixRow).where(is_own).values(gaps_5m=counts.c.gaps_5m, gaps_1h=counts.c.gaps_1h)
    )


def prefix_sums() -> Any:
    """The select of the prefixes' rows over all turns."""
    counts = gap_counts()
    rest = _prefixes(literal(1) == 1).subquery()
    is_own = (rest.c.workspace_id == counts.c.workspace_id) & (rest.c.prefix == counts.c.prefix)
    columns = [
        func.coalesce(counts.c[column.name], 0).label(column.name)
        if column.name in ("gaps_5m", "gaps_1h")
        else column
        for column in rest.c
    ]
    return select(*columns).select_from(rest.outerjoin(counts, is_own))


def gap_counts() -> Any:
    """By prefix, the turns that came within five minutes and within an hour after another."""
    own = (TurnRow.workspace_id, TurnRow.prefix)
    before = func.lag(TurnRow.opened_ms).over(
        partition_by=own, order_by=(TurnRow.opened_ms, TurnRow.id)
    )
    gaps = (
        select(*own, (TurnRow.opened_ms - before).label("gap"))
        .where(TurnRow.prefix.is_not(None))
        .subquery()
    )
    return (
        select(
            gaps.c.workspace_id,
            gaps.c.prefix,
            func.count().filter(gaps.c.gap <= FIVE_MINUTES_MS).label("gaps_5m"),
            func.count().filter(gaps.c.gap > FIVE_MINUTES_MS).label("gaps_1h"),
        )
        .where(gaps.c.gap <= HOUR_MS)
        .group_by(gaps.c.workspace_id, gaps.c.prefix)
        .subquery()
    )


async def _lock(connection: AsyncConnection, *tables: type[Base]) -> None:
    """Lock the tables. SQLite has a single writer anyway, from the first changing statement on."""
    if is_postgres(connection):
        names = ", ".join(table.__tablename__ for table in tables)
        await connection.execute(text(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE"))


def days(since_ms: int, until_ms: int) -> Iterable[tuple[int, int]]:
    """The whole UTC days that a range touches, as [since, until) in milliseconds."""
    day = DAY_SECONDS * 1000
    starts = range(since_ms // day * day, until_ms + day, day)
    return (pair for pair in pairwise(starts) if pair[0] < until_ms)


_INSERTS = {
    kind.dialect.name: kind.insert(TurnRow).on_conflict_do_nothing().returning(TurnRow.id)
    for kind in (postgresql, sqlite)
}


def insert_closed(connection: Connection, records: Sequence[TurnRecord]) -> None:
    """Insert closed turns that are not there yet, and add them to the sums.

    Raise LedgerRefused for a value that the database can't hold, and SampleData if it holds sample
    data.
    """
    rows = {record.id: row_of(record) for record in reversed(records)}
    ordered = [rows[turn_id] for turn_id in sorted(rows)]
    try:
        inserted = _insert(connection, ordered)
    except (IntegrityError, OverflowError, ValueError) as error:
        raise LedgerRefused from error
    # The check comes after the insert, which waits for a command that fills the database with
    # samples.
    if identity.has_sample_mark(connection):
        raise SampleData
    add_turns(connection, inserted)


def _insert(connection: Connection, rows: list[dict[str, Any]]) -> Sequence[str]:
    """Insert the rows that are not there yet, and return their ids.

    It is the first statement of its transaction. A batch that was inserted before is rare. So for
    SQLite the rows go in by one prepared statement, which tells only their number. Where some were
    there already the transaction begins again, with the statement that tells which were not.
    """
    if connection.dialect.name == "sqlite":
        statement = _sqlite_insert()
        done = connection.exec_driver_sql(statement.text, statement.values_of(rows))
        if done.rowcount == len(rows):
            return [row["id"] for row in rows]
        connection.rollback()
    return connection.execute(_INSERTS[connection.dialect.name], rows).scalars().all()


class _RowInsert(NamedTuple):
    """An insert of one row, and what makes a row's values those of the driver."""

    text: str
    names: list[str]
    processors: Sequence[tuple[str, Callable[[Any], Any]]]

    def values_of(self, rows: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
        ordered = itemgetter(*self.names)
        return [
            ordered({**row, **{name: process(row[name]) for name, process in self.processors}})
            for row in rows
        ]


@cache
def _sqlite_insert() -> _RowInsert:
    """SQLAlchemy would make the text of each batch anew, and SQLite parse it."""
    dialect, columns = sqlite.dialect(), TurnRow.__table__.columns
    compiled = sqlite.insert(TurnRow).on_conflict_do_nothing().compile(dialect=dialect)
    found = {
        column.name: column.type.dialect_impl(dialect).bind_processor(dialect) for column in columns
    }
    processors = [(name, process) for name, process in found.items() if process is not None]
    return _RowInsert(str(compiled), list(compiled.positiontup or ()), processors)


_RENAMED = {
    "workspace_id": "workspace",
    "cost_nano": "cost",
    "cost_without_cache_nano": "cost_without_cache",
}
_FIELDS = [
    (column.name, attrgetter(_RENAMED.get(column.name, column.name)))
    for column in TurnRow.__table__.columns
    if column.name != "opened_ms"
]


def row_of(record: TurnRecord) -> dict[str, Any]:
    """The columns of a turn: the fields of its record, some under another name."""
    row: dict[str, Any] = {name: field(record) for name, field in _FIELDS}
    row["opened_ms"] = int(record.opened_at.timestamp() * 1000)
    return row
