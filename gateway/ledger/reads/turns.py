"""The turn explorer: single turns, newest first, page by page."""

from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.database import Ledger
from gateway.ledger.reads.ranges import Range
from gateway.ledger.schema import TurnRow


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the turns table. `saved_nano` is None where the model has no price."""

    id: str
    opened_ms: int
    workspace: str
    key_id: str
    model: str
    engine: str | None
    dialect: str | None
    stream: bool
    outcome: str
    stop_reason: str | None
    miss_reason: str | None
    num_removed: int
    input_tokens: int
    cache_read_tokens: int
    cache_write_5m_tokens: int
    cache_write_1h_tokens: int
    automatic_tokens: int
    computed_tokens: int
    output_tokens: int
    thinking_tokens: int
    first_token_seconds: float | None
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    available_tokens: int | None
    captured_tokens: int | None
    duration_seconds: float | None
    prefix: str | None
    prefix_ttl: str | None
    price: str | None
    cost_nano: int | None
    saved_nano: int | None
    http_request_id: str | None
    user_agent: str | None
    name: str | None
    status: int | None
    error: str | None


class TurnPage(msgspec.Struct, frozen=True, kw_only=True):
    """`next` is the cursor of the following page; None on the last page."""

    turns: list[Turn]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFilter:
    """The filters of a page besides its range. None filters nothing.

    `outcome` `error` is any error, `miss_reason` `any` is any reason.
    """

    outcome: str | None = None
    miss_reason: str | None = None
    key_id: str | None = None
    prefix: str | None = None
    has_read: bool | None = None


class Cursor(msgspec.Struct, frozen=True):
    """The last turn of a page."""

    opened_ms: int
    id: str

    def __str__(self) -> str:
        return f"{self.opened_ms}.{self.id}"

    @classmethod
    def parse(cls, written: str) -> "Cursor":
        """Read a cursor. Raise ValueError for a text that no page has returned."""
        opened, dot, turn_id = written.partition(".")
        if not (dot and turn_id and opened.isascii() and opened.isdigit() and len(opened) < 19):
            raise ValueError("not a cursor")
        return cls(int(opened), turn_id)


REQUEST_PREFIX = "req_"
"""How the ids of HTTP requests begin; those of turns begin with `msg_`."""
_COLUMNS = [column for column in TurnRow.__table__.columns if column.name != "fingerprint"]


async def page(
    ledger: Ledger, of: Range, which: TurnFilter, limit: int, after: Cursor | None = None
) -> TurnPage:
    """One page of a range's turns, the newest first.

    Turns that arrive meanwhile shift no later page.
    """
    async with ledger.snapshot() as connection:
        return await page_of(connection, of, which, limit, after)


async def page_of(
    connection: AsyncConnection,
    of: Range,
    which: TurnFilter,
    limit: int,
    after: Cursor | None = None,
) -> TurnPage:
    wanted = {
        "outcome": which.outcome,
        "miss_reason": which.miss_reason,
        "key_id": which.key_id,
        "prefix": which.prefix,
    }
    if which.outcome == "error":
        del wanted["outcome"]
    if which.miss_reason == "any":
        del wanted["miss_reason"]
    query = (
        select(*_COLUMNS)
        .where(TurnRow.opened_ms >= of.since_ms, TurnRow.opened_ms < of.until_ms)
        .where(*of.filters(TurnRow))
        .where(*(getattr(TurnRow, name) == value for name, value in wanted.items() if value))
        .order_by(TurnRow.opened_ms.desc(), TurnRow.id.desc())
        .limit(limit + 1)
    )
    if which.outcome == "error":
        query = query.where(TurnRow.outcome.endswith("_error", autoescape=True))
    if which.miss_reason == "any":
        query = query.where(TurnRow.miss_reason.is_not(None))
    if which.has_read is not None:
        read = TurnRow.cache_read_tokens
        query = query.where(read > 0 if which.has_read else read == 0)
    if after is not None:
        # The first condition follows from the second; SQLite looks it up in the index.
        query = query.where(
            TurnRow.opened_ms <= after.opened_ms,
            tuple_(TurnRow.opened_ms, TurnRow.id) < (after.opened_ms, after.id),
        )
    rows = (await connection.execute(query)).all()
    turns = [_turn(row._mapping) for row in rows[:limit]]
    more = len(rows) > limit
    return TurnPage(
        turns=turns, next=str(Cursor(turns[-1].opened_ms, turns[-1].id)) if more else None
    )


async def earlier(ledger: Ledger, turn: Turn, limit: int) -> list[tuple[str, bytes]]:
    """Ids and fingerprints of the workspace's turns right before one, the newest first."""
    place = (turn.opened_ms, turn.id)
    query = (
        select(TurnRow.id, TurnRow.fingerprint)
        .where(TurnRow.workspace_id == turn.workspace, TurnRow.opened_ms <= turn.opened_ms)
        .where(tuple_(TurnRow.opened_ms, TurnRow.id) < place, TurnRow.fingerprint.is_not(None))
        .order_by(TurnRow.opened_ms.desc(), TurnRow.id.desc())
        .limit(limit)
    )
    async with ledger.snapshot() as connection:
        return [(row.id, row.fingerprint) for row in await connection.execute(query)]


async def one(ledger: Ledger, turn_id: str, workspace: str | None = None) -> Turn | None:
    """A turn by its id, or by the `req_…` of its response; only one of `workspace` if given."""
    is_request = turn_id.startswith(REQUEST_PREFIX)
    column = TurnRow.http_request_id if is_request else TurnRow.id
    query = select(*_COLUMNS).where(column == turn_id).limit(1)
    if workspace is not None:
        query = query.where(TurnRow.workspace_id == workspace)
    async with ledger.snapshot() as connection:
        row = (await connection.execute(query)).one_or_none()
    return None if row is None else _turn(row._mapping)


def _turn(row: Any) -> Turn:
    values = {name: row[name] for name in Turn.__struct_fields__ if name in row}
    cost, without_cache = row["cost_nano"], row["cost_without_cache_nano"]
    saved = None if cost is None or without_cache is None else without_cache - cost
    return Turn(**values, workspace=row["workspace_id"], saved_nano=saved)
