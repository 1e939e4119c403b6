"""The turn explorer: single turns, newest first, page by page."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, func, select, text, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.protocol import InputUsage
from gateway.ledger.database import Ledger
from gateway.ledger.reads.sums import Range
from gateway.ledger.rollups import prompt_tokens, written_tokens
from gateway.ledger.schema import IS_SAMPLED, EpochRow, TurnRow, ended_in_error
from gateway.structs.fleet import Epoch, Lost
from gateway.structs.usage import Sample, Turn, TurnMark, TurnPage


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFilter:
    """The filters of a page besides its range. None filters nothing."""

    # `error` is any error.
    outcome: str | None = None
    # `any` is any reason.
    miss_reason: str | None = None
    key_id: str | None = None
    prefix: str | None = None
    has_read: bool | None = None
    # The beginning of the user agent.
    client: str | None = None
    # The percentage of the prompt's tokens that were read, both bounds included. A turn without a
    # prompt passes neither bound.
    min_read_percent: int | None = None
    max_read_percent: int | None = None

    def indexed(self) -> list[ColumnElement[bool]]:
        """The conditions that an index covers, in the order of a page."""
        conditions: list[ColumnElement[bool]] = []
        if self.outcome == "error":
            conditions.append(ended_in_error())
        elif self.outcome:
            conditions.append(TurnRow.outcome == self.outcome)
        if self.miss_reason == "any":
            conditions.append(TurnRow.miss_reason.is_not(None))
        elif self.miss_reason:
            conditions.append(TurnRow.miss_reason == self.miss_reason)
        if self.prefix:
            conditions.append(TurnRow.prefix == self.prefix)
        return conditions

    def searched(self) -> list[ColumnElement[bool]]:
        """The conditions that no index covers: each turn must be looked at."""
        read_tokens = TurnRow.cache_read_tokens
        prompt = prompt_tokens(TurnRow)
        conditions: list[ColumnElement[bool]] = []
        if self.key_id:
            conditions.append(TurnRow.key_id == self.key_id)
        if self.has_read is not None:
            conditions.append(read_tokens > 0 if self.has_read else read_tokens == 0)
        if self.client:
            start = func.substr(TurnRow.user_agent, 1, len(self.client))
            conditions.append(start == self.client)
        if self.min_read_percent is not None or self.max_read_percent is not None:
            conditions.append(prompt > 0)
        if self.min_read_percent is not None:
            conditions.append(100 * read_tokens >= self.min_read_percent * prompt)
        if self.max_read_percent is not None:
            conditions.append(100 * read_tokens <= self.max_read_percent * prompt)
        return conditions


class Cursor(msgspec.Struct, frozen=True):
    """The last turn of a page, or the last turn that the page has looked at."""

    opened_ms: int
    id: str

    def __str__(self) -> str:
        return f"{self.opened_ms}.{self.id}"

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Read a cursor. Raise ValueError for a text that no page has returned."""
        opened, dot, turn_id = text.partition(".")
        if not (dot and turn_id and opened.isascii() and opened.isdigit() and len(opened) < 19):
            raise ValueError("not a cursor")
        return cls(int(opened), turn_id)


MAX_SEARCHED = 20_000
"""The most turns that one page looks at by conditions that no index covers. The next page goes on
behind them."""
REQUEST_PREFIX = "req_"
"""The beginning of HTTP requests' ids. Turns' ids begin with `msg_`."""
_RESPONSE_PREFIXES = "chatcmpl-", "cmpl-", "resp_"
"""The beginnings of turns' ids in OpenAI's dialects."""
_COLUMNS = [column for column in TurnRow.__table__.columns if column.name != "fingerprint"]


def _newest(columns: Sequence[Any], of: Range, limit: int) -> Select[Any]:
    """The newest turns of a range."""
    return (
        select(*columns)
        .where(
            TurnRow.opened_ms >= of.since_ms, TurnRow.opened_ms < of.until_ms, *of.filters(TurnRow)
        )
        .order_by(TurnRow.opened_ms.desc(), TurnRow.id.desc())
        .limit(limit)
    )


def _before(opened_ms: int, turn_id: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """The conditions of turns before this one. The first follows from the second: it is there
    because SQLite looks it up in the index."""
    place = tuple_(TurnRow.opened_ms, TurnRow.id)
    return TurnRow.opened_ms <= opened_ms, place < tuple_(opened_ms, turn_id)


async def page(
    ledger: Ledger, of: Range, filters: TurnFilter, limit: int, after: Cursor | None = None
) -> TurnPage:
    """One page of a range's turns, the newest first. Turns that arrive meanwhile shift no later
    page."""
    async with ledger.snapshot() as connection:
        return await page_of(connection, of, filters, limit, after)


async def page_of(
    connection: AsyncConnection,
    of: Range,
    filters: TurnFilter,
    limit: int,
    after: Cursor | None = None,
    max_searched: int = MAX_SEARCHED,
) -> TurnPage:
    """As `page`. It looks at `max_searched` turns at most by conditions that no index covers."""
    conditions = filters.indexed()
    if after is not None:
        conditions += _before(after.opened_ms, after.id)
    searched = filters.searched()
    last_searched = None
    if searched:
        last_searched = await _last_searched(connection, of, conditions, max_searched)
    query = _newest(_COLUMNS, of, limit + 1).where(*conditions, *searched)
    if last_searched is not None:
        place = tuple_(TurnRow.opened_ms, TurnRow.id)
        query = query.where(
            TurnRow.opened_ms >= last_searched.opened_ms,
            place >= tuple_(last_searched.opened_ms, last_searched.id),
        )
    rows = (await connection.execute(query)).all()
    turns = [_turn(row._mapping) for row in rows[:limit]]
    if len(rows) > limit:
        return TurnPage(turns=turns, next=str(Cursor(turns[-1].opened_ms, turns[-1].id)))
    if last_searched is not None:
        return TurnPage(turns=turns, next=str(last_searched), num_searched=max_searched)
    return TurnPage(turns=turns, next=None)


async def _last_searched(
    connection: AsyncConnection,
    of: Range,
    conditions: Sequence[ColumnElement[bool]],
    max_searched: int,
) -> Cursor | None:
    """The last of the newest `max_searched` turns; None where the range has no more turns."""
    place = (TurnRow.opened_ms, TurnRow.id)
    query = _newest(place, of, 2).where(*conditions).offset(max_searched - 1)
    rows = (await connection.execute(query)).all()
    return Cursor(*rows[0]) if len(rows) > 1 else None


async def earlier(ledger: Ledger, turn: Turn, limit: int) -> list[tuple[str, bytes]]:
    """Ids and fingerprints of the workspace's turns right before one, the newest first."""
    of = Range(since_ms=0, until_ms=turn.opened_ms + 1, workspace=turn.workspace)
    query = _newest((TurnRow.id, TurnRow.fingerprint), of, limit)
    query = query.where(*_before(turn.opened_ms, turn.id), TurnRow.fingerprint.is_not(None))
    return [(row.id, row.fingerprint) for row in await ledger.rows(query)]


MAX_AROUND = 5000


async def around(ledger: Ledger, turn: Turn, limit: int) -> list[tuple[str, bytes]]:
    """Ids and fingerprints of a turn and of its key's turns around it, in order of time: at most
    `limit` before it and as many after it.

    No index has the key. So on each side the nearest MAX_AROUND turns of the workspace are looked
    at.
    """
    place = tuple_(TurnRow.opened_ms, TurnRow.id)
    position = tuple_(turn.opened_ms, turn.id)
    order = TurnRow.opened_ms, TurnRow.id
    reverse = [column.desc() for column in order]
    near = select(TurnRow.id).where(TurnRow.workspace_id == turn.workspace).limit(MAX_AROUND)
    before = near.where(TurnRow.opened_ms <= turn.opened_ms, place <= position).order_by(*reverse)
    after = near.where(TurnRow.opened_ms >= turn.opened_ms, place > position).order_by(*order)
    fingerprints: list[tuple[str, bytes]] = []
    async with ledger.snapshot() as connection:
        for side, by, max_rows in ((before, reverse, limit + 1), (after, order, limit)):
            rows = await connection.execute(
                select(TurnRow.id, TurnRow.fingerprint)
                .where(TurnRow.id.in_(side), TurnRow.key_id == turn.key_id)
                .where(TurnRow.fingerprint.is_not(None))
                .order_by(*by)
                .limit(max_rows)
            )
            fingerprints = [*fingerprints[::-1], *((row.id, row.fingerprint) for row in rows)]
    return fingerprints


async def with_ids(ledger: Ledger, ids: Sequence[str]) -> list[Turn]:
    """These turns, in order of time."""
    query = select(*_COLUMNS).where(TurnRow.id.in_(ids)).order_by(TurnRow.opened_ms, TurnRow.id)
    return [_turn(row._mapping) for row in await ledger.rows(query)]


async def first_ms(ledger: Ledger, workspace: str | None) -> int | None:
    """When the first turn began, of one workspace or of all."""
    query = select(func.min(TurnRow.opened_ms))
    if workspace is not None:
        query = query.where(TurnRow.workspace_id == workspace)
    ((number,),) = await ledger.rows(query)
    return None if number is None else int(number)


async def one(ledger: Ledger, turn_id: str, workspace: str | None = None) -> Turn | None:
    """A turn by its id in any dialect's form, or by the `req_…` of its response.

    With a `workspace` only its turns are looked at.
    """
    for prefix in _RESPONSE_PREFIXES:
        if turn_id.startswith(prefix):
            turn_id = f"msg_{turn_id.removeprefix(prefix)}"
    is_request = turn_id.startswith(REQUEST_PREFIX)
    column = TurnRow.http_request_id if is_request else TurnRow.id
    query = select(*_COLUMNS).where(column == turn_id).limit(1)
    if workspace is not None:
        query = query.where(TurnRow.workspace_id == workspace)
    return next((_turn(row._mapping) for row in await ledger.rows(query)), None)


def _turn(row: Any) -> Turn:
    values = {name: row[name] for name in Turn.__struct_fields__ if name in row}
    cost = row["cost_nano"]
    without_cache = row["cost_without_cache_nano"]
    saved = None if cost is None or without_cache is None else without_cache - cost
    values["marks"] = msgspec.convert(row["marks"], list[TurnMark] | None)
    return Turn(**values, workspace=row["workspace_id"], saved_nano=saved)


PAGE_TURNS = 4000
_SEARCHED_TURNS = 1000
_OBSERVED = (
    TurnRow.id,
    TurnRow.opened_ms,
    TurnRow.workspace_id,
    TurnRow.key_id,
    TurnRow.model,
    TurnRow.engine,
    TurnRow.dialect,
    TurnRow.price,
    *(getattr(TurnRow, name) for name in InputUsage.__struct_fields__),
    TurnRow.output_tokens,
    TurnRow.first_token_seconds,
    TurnRow.queue_seconds,
    TurnRow.prefill_seconds,
    TurnRow.decode_seconds,
    TurnRow.fingerprint,
)


async def observed(
    ledger: Ledger, of: Range, key: str | None, limit: int
) -> AsyncIterator[Sequence[Any]]:
    """The turns whose answer began, the newest first, at most `limit` in all, page by page."""
    after: tuple[int, str] | None = None
    while limit > 0:
        query = _newest(_OBSERVED, of, min(limit, PAGE_TURNS)).where(
            TurnRow.fingerprint.is_not(None), TurnRow.first_token_seconds.is_not(None)
        )
        if key is not None:
            query = query.where(TurnRow.key_id == key)
        if after is not None:
            query = query.where(*_before(*after))
        rows = await ledger.rows(query)
        if rows:
            yield rows
        if len(rows) < min(limit, PAGE_TURNS):
            return
        limit -= len(rows)
        after = rows[-1].opened_ms, rows[-1].id


async def newest_writers(ledger: Ledger, of: Range, workspace: str, limit: int) -> list[str]:
    """The ids of a workspace's newest turns that wrote, among its newest 1,000 of the range."""
    columns = TurnRow.id, TurnRow.opened_ms, written_tokens(TurnRow).label("written")
    newest = _newest(columns, replace(of, workspace=workspace), _SEARCHED_TURNS).subquery().c
    query = select(newest.id).where(newest.written > 0).limit(limit)
    rows = await ledger.rows(query.order_by(newest.opened_ms.desc(), newest.id.desc()))
    return [row.id for row in rows]


async def samples(ledger: Ledger, of: Range, limit: int) -> list[Sample]:
    """The answered turns of the range in order of time; of more than `limit` turns a sample.

    The sample has the turns whose ids end in the lowest digits. The end of an id is random (80
    bits), so it tells nothing of the turn, and two reads of a range sample the same turns.
    """
    within = (
        TurnRow.opened_ms >= of.since_ms,
        TurnRow.opened_ms < of.until_ms,
        *of.filters(TurnRow),
    )
    order = func.substr(TurnRow.id, 31), func.substr(TurnRow.id, 27, 4), TurnRow.id
    lowest = select(TurnRow.id).where(*within).order_by(*order).limit(limit)
    async with ledger.snapshot() as connection:
        # A large range has enough turns with the lowest digits, and a partial index has only those.
        ids = (await connection.execute(lowest.where(text(IS_SAMPLED)))).scalars().all()
        if len(ids) < limit:
            ids = (await connection.execute(lowest)).scalars().all()
        query = select(*_COLUMNS).where(TurnRow.id.in_(ids))
        rows = await connection.execute(query.where(TurnRow.first_token_seconds.is_not(None)))
    return sorted((_sample(row) for row in rows), key=lambda sample: (sample.opened_ms, sample.id))


def _sample(row: Any) -> Sample:
    engine_seconds = None
    if row.queue_seconds is not None and row.prefill_seconds is not None:
        engine_seconds = row.queue_seconds + row.prefill_seconds
    first_token_seconds = row.first_token_seconds
    values = row._mapping
    return Sample(
        **{name: values[name] for name in Sample.__struct_fields__ if name in values},
        prompt_tokens=prompt_tokens(row),
        overhead_seconds=None
        if engine_seconds is None
        else max(first_token_seconds - engine_seconds, 0.0),
        delivered_tokens=row.cache_read_tokens + row.automatic_tokens,
    )


async def epochs(ledger: Ledger, of: Range, limit: int = 50) -> list[Epoch]:
    """The engines' restarts in the range, the newest first, at most `limit` of each engine.

    The turns that missed because of one are those of all workspaces.
    """
    key = (EpochRow.engine, EpochRow.epoch)
    began_ms = func.min(EpochRow.first_ms)
    spans = select(*key, began_ms, func.max(EpochRow.last_ms)).group_by(*key)
    spans = spans.order_by(EpochRow.engine, began_ms).where(
        EpochRow.last_ms >= of.since_ms, EpochRow.first_ms < of.until_ms, *of.filters(EpochRow)
    )
    sums = func.count(), func.coalesce(func.sum(written_tokens(TurnRow)), 0)
    # Few turns have this reason. Grouping by expressions keeps the database on the reason's index.
    lost_by = func.coalesce(TurnRow.engine, ""), func.coalesce(TurnRow.epoch, "")
    within = TurnRow.opened_ms >= of.since_ms, TurnRow.opened_ms < of.until_ms
    missed = select(*lost_by, *sums).where(TurnRow.miss_reason == "engine_restart", *within)
    epochs: dict[str, list[Epoch]] = {}
    async with ledger.snapshot() as connection:
        rows: Sequence[Any] = (await connection.execute(spans)).all()
        counted = await connection.execute(missed.group_by(*lost_by))
        lost = {
            (engine, epoch): Lost(requests=requests, written_tokens=int(tokens))
            for engine, epoch, requests, tokens in counted
        }
    for (last_engine, _, _, last_ms), (engine, epoch, first_ms, _) in pairwise(rows):
        if engine == last_engine and first_ms >= of.since_ms:
            loss = lost.get((engine, epoch), Lost(requests=0, written_tokens=0))
            moments = {"last_ms": last_ms, "first_ms": first_ms}
            restart = Epoch(engine=engine, epoch=epoch, lost=loss, **moments)
            epochs.setdefault(engine, []).append(restart)
    newest: list[Epoch] = []
    for restarts in epochs.values():
        newest += restarts[-limit:]
    return sorted(newest, key=lambda epoch: (-epoch.first_ms, epoch.engine))
