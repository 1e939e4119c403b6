"""What the admin API asks of the ledger. Each number has one definition, written beside it."""

from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, func, select

from gateway.ledger.database import Ledger
from gateway.ledger.models import TurnRow

_MAX_POINTS = 60
_BUCKETS_SECONDS = (5, 10, 30, 60, 300, 900, 3600, 10800, 86400)


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over turns. `saved_nano` = without cache − actual; `unpriced` turns are in neither."""

    requests: int = 0
    requests_with_read: int = 0
    errors: int = 0
    unpriced: int = 0
    input_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_5m_tokens: int = 0
    cache_write_1h_tokens: int = 0
    automatic_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    cost_nano: int = 0
    cost_without_cache_nano: int = 0

    @property
    def saved_nano(self) -> int:
        """What the same tokens would have cost without a cache, less what they cost."""
        return self.cost_without_cache_nano - self.cost_nano

    @property
    def prompt_tokens(self) -> int:
        return (
            self.input_tokens
            + self.cache_read_tokens
            + self.cache_write_5m_tokens
            + self.cache_write_1h_tokens
        )


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """One interval, from `start_ms` on; `is_partial` where the interval is not over."""

    start_ms: int
    is_partial: bool
    totals: Totals
    saved_nano: int


@dataclass(frozen=True, slots=True)
class Series:
    bucket_seconds: int
    buckets: list[Bucket]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the turns table."""

    id: str
    opened_ms: int
    workspace: str
    model: str
    engine: str | None
    stream: bool
    outcome: str
    miss_reason: str | None
    num_removed: int
    input_tokens: int
    cache_read_tokens: int
    cache_write_5m_tokens: int
    cache_write_1h_tokens: int
    automatic_tokens: int
    output_tokens: int
    first_token_seconds: float | None
    duration_seconds: float | None
    price: str | None
    cost_nano: int | None
    saved_nano: int | None


class Queries:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def totals(self, since_ms: int) -> Totals:
        async with self._ledger.transaction() as connection:
            row = (await connection.execute(_sums(since_ms))).one()
        return _totals(row._mapping)

    async def series(self, since_ms: int, now_ms: int) -> Series:
        """Equal intervals aligned to the epoch; intervals without turns are there, with zeros."""
        width = bucket_seconds((now_ms - since_ms) // 1000)
        step = width * 1000
        bucket = (TurnRow.opened_ms // step).label("bucket")
        query = _sums(since_ms).add_columns(bucket).group_by(bucket)
        async with self._ledger.transaction() as connection:
            rows = (await connection.execute(query)).all()
        found = {int(row.bucket): _totals(row._mapping) for row in rows}
        buckets = [
            Bucket(
                start_ms=number * step,
                is_partial=number * step < since_ms or (number + 1) * step > now_ms,
                totals=(totals := found.get(number, Totals())),
                saved_nano=totals.saved_nano,
            )
            for number in range(since_ms // step, now_ms // step + 1)
        ]
        return Series(width, buckets)

    async def miss_reasons(self, since_ms: int) -> dict[str, int]:
        query = (
            select(TurnRow.miss_reason, func.count())
            .where(TurnRow.opened_ms >= since_ms, TurnRow.miss_reason.is_not(None))
            .group_by(TurnRow.miss_reason)
        )
        async with self._ledger.transaction() as connection:
            return {str(reason): n for reason, n in (await connection.execute(query)).all()}

    async def turns(self, limit: int) -> list[Turn]:
        """The newest turns first."""
        columns = [column for column in TurnRow.__table__.columns if column.name != "fingerprint"]
        query = select(*columns).order_by(TurnRow.opened_ms.desc()).limit(limit)
        async with self._ledger.transaction() as connection:
            rows = (await connection.execute(query)).all()
        return [_turn(row._mapping) for row in rows]

    async def fingerprint(self, turn_id: str, workspace: str | None = None) -> bytes | None:
        """A turn's packed fingerprint; only that workspace's, where one is given."""
        query = select(TurnRow.fingerprint).where(TurnRow.id == turn_id)
        if workspace is not None:
            query = query.where(TurnRow.workspace_id == workspace)
        async with self._ledger.transaction() as connection:
            found: bytes | None = (await connection.execute(query)).scalar_one_or_none()
            return found


def bucket_seconds(seconds: int) -> int:
    """The narrowest round width that gives at most about sixty points."""
    for width in _BUCKETS_SECONDS:
        if seconds <= width * _MAX_POINTS:
            return width
    return _BUCKETS_SECONDS[-1]


def _sums(since_ms: int) -> Select[Any]:
    def total(column: Any) -> ColumnElement[int]:
        return func.coalesce(func.sum(column), 0)

    columns: list[ColumnElement[Any]] = [
        func.count().label("requests"),
        func.count().filter(TurnRow.cache_read_tokens > 0).label("requests_with_read"),
        func.count().filter(TurnRow.outcome.endswith("_error", autoescape=True)).label("errors"),
        func.count().filter(TurnRow.price.is_(None)).label("unpriced"),
        *(
            total(getattr(TurnRow, name)).label(name)
            for name in Totals.__struct_fields__
            if name.endswith(("_tokens", "_nano"))
        ),
    ]
    return select(*columns).where(TurnRow.opened_ms >= since_ms)


def _totals(row: Any) -> Totals:
    return Totals(**{name: int(row[name]) for name in Totals.__struct_fields__})


def _turn(row: Any) -> Turn:
    values = {name: row[name] for name in Turn.__struct_fields__ if name in row}
    cost, without_cache = row["cost_nano"], row["cost_without_cache_nano"]
    saved = None if cost is None or without_cache is None else without_cache - cost
    return Turn(**values, workspace=row["workspace_id"], saved_nano=saved)
