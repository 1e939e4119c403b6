"""Prefixes that were sent more than once: whether their writes paid off, and the better TTL."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import func, or_, select, text, tuple_, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.protocol import TTLS, WRITE_FIELDS, Ttl, class_of
from gateway.ledger.database import Ledger
from gateway.ledger.reads.sums import Range
from gateway.ledger.rollups import written_tokens
from gateway.ledger.schema import PrefixRow, TurnRow
from gateway.prices.price import PriceSheets, cost_with_ttl
from gateway.prompt.fingerprint import unpack
from gateway.structs.usage import PrefixLook, PrefixReport

_LOOKS = 100
"""The most parts of one statement."""
_BATCH = 500
"""The most parameters of one statement."""


async def _reports(
    connection: AsyncConnection, rows: Sequence[Any], prices: PriceSheets
) -> list[PrefixReport]:
    """The prefixes, each with what its last request tells."""
    # By the prefix's index alone, as `rollups.gap_changes`.
    newest = (
        select(TurnRow.id)
        .where(
            TurnRow.prefix == PrefixRow.prefix,
            func.coalesce(TurnRow.workspace_id, "") == PrefixRow.workspace_id,
        )
        .order_by(TurnRow.opened_ms.desc(), TurnRow.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    key = tuple_(PrefixRow.workspace_id, PrefixRow.prefix)
    looks = {}
    for start in range(0, len(rows), _BATCH):
        keys = [(row["workspace_id"], row["prefix"]) for row in rows[start : start + _BATCH]]
        ids = (await connection.execute(select(newest).where(key.in_(keys)))).scalars().all()
        query = select(TurnRow.__table__).where(
            TurnRow.id.in_([turn_id for turn_id in ids if turn_id])
        )
        turns = (await connection.execute(query)).all()
        read_looks = await asyncio.to_thread(list, map(_look, turns))
        for turn, look in zip(turns, read_looks, strict=True):
            looks[turn.workspace_id, turn.prefix] = look
    return [_report(row, prices, looks) for row in rows]


def _look(row: Any) -> PrefixLook:
    tools = None
    system = None
    messages = None
    whole = None if row.fingerprint is None else unpack(row.fingerprint)
    points = [] if whole is None else whole.points
    # How many whole segments the prefix has.
    ends = (
        point.segment + (point.characters is None)
        for point in points
        if point.digest.hex() == row.prefix
    )
    end = next(ends, None)
    if whole is not None and end is not None:
        tools = min(end, whole.num_tools)
        system = min(end - tools, whole.num_system)
        messages = end - tools - system
    return PrefixLook(
        last_turn=row.id,
        last_ms=row.opened_ms,
        model=row.model,
        tokens=row.cache_read_tokens + written_tokens(row),
        ttl=row.prefix_ttl,
        user_agent=row.user_agent,
        name=row.name,
        num_tools=tools,
        num_system=system,
        num_messages=messages,
        content=row.content,
    )


async def prefixes(
    ledger: Ledger, of: Range, prices: PriceSheets, limit: int
) -> list[PrefixReport]:
    """The `limit` most used prefixes of those that were last used in the range.

    Every workspace's most used one is chosen before any second one, and so on. The engine filter
    does not apply.
    """
    query = select(*PrefixRow.__table__.columns).where(
        text("requests > 1"), PrefixRow.last_ms >= of.since_ms, PrefixRow.last_ms < of.until_ms
    )
    # A prefix that was too short to be held was never written or read.
    query = query.where(PrefixRow.cache_read_tokens + written_tokens(PrefixRow) > 0)
    if of.model is not None:
        query = query.where(or_(PrefixRow.model == of.model, PrefixRow.least_model == of.model))
    query = query.order_by(PrefixRow.requests.desc(), PrefixRow.prefix.desc()).limit(limit)
    workspaces = select(PrefixRow.workspace_id).where(text("requests > 1")).distinct()
    if of.workspace is not None:
        workspaces = workspaces.where(PrefixRow.workspace_id == of.workspace)
    async with ledger.snapshot() as connection:
        # Each workspace's most used ones: the index has them in that order.
        ranked: list[tuple[int, int, str, Any]] = []
        for workspace in (await connection.execute(workspaces)).scalars().all():
            of_workspace = await connection.execute(
                query.where(PrefixRow.workspace_id == workspace)
            )
            rows = of_workspace.mappings().all()
            ranked += [(rank, -row["requests"], workspace, row) for rank, row in enumerate(rows)]
        ranked.sort(key=lambda candidate: candidate[:3])
        reports = await _reports(connection, [row for *_, row in ranked[:limit]], prices)
    return sorted(reports, key=lambda report: (-report.requests, report.workspace, report.prefix))


async def named(
    ledger: Ledger, keys: Collection[tuple[str, str]], prices: PriceSheets
) -> dict[tuple[str, str], PrefixReport]:
    """Those of these prefixes that the ledger knows, by workspace and prefix."""
    names = sorted({prefix for _, prefix in keys})
    reports = {}
    async with ledger.snapshot() as connection:
        for start in range(0, len(names), _BATCH):
            query = select(*PrefixRow.__table__.columns).where(
                PrefixRow.workspace_id.in_(sorted({workspace for workspace, _ in keys})),
                PrefixRow.prefix.in_(names[start : start + _BATCH]),
            )
            rows = (await connection.execute(query)).mappings().all()
            for report in await _reports(connection, rows, prices):
                reports[report.workspace, report.prefix] = report
    return {key: report for key, report in reports.items() if key in keys}


_SEARCHED_TURNS = 20


async def writers(ledger: Ledger, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The key id of each prefix's newest turn that wrote, among its newest 20."""
    key_ids = dict[tuple[str, str], str]()
    prefixes = sorted(keys)
    columns = TurnRow.workspace_id, TurnRow.prefix, TurnRow.key_id, TurnRow.opened_ms, TurnRow.id
    async with ledger.snapshot() as connection:
        for start in range(0, len(prefixes), _LOOKS):
            parts = []
            for workspace, prefix in prefixes[start : start + _LOOKS]:
                of_prefix = TurnRow.prefix == prefix, TurnRow.workspace_id == workspace
                turns = select(*columns, written_tokens(TurnRow).label("written")).where(*of_prefix)
                turns = turns.order_by(TurnRow.opened_ms.desc(), TurnRow.id.desc())
                newest = turns.limit(_SEARCHED_TURNS).subquery().c
                writer = select(newest.workspace_id, newest.prefix, newest.key_id)
                writer = writer.where(newest.written > 0).limit(1)
                writer = writer.order_by(newest.opened_ms.desc(), newest.id.desc())
                parts.append(select(writer.subquery()))
            for row in await connection.execute(union_all(*parts)):
                key_ids[row.workspace_id, row.prefix] = row.key_id
    return key_ids


class PrefixUse(NamedTuple):
    """The newest turn whose deepest marker stood at a prefix."""

    prefix: str
    model: str
    engine: str
    epoch: str
    # In UTC.
    opened_at: datetime
    # The TTL of the marker.
    seconds: float


async def last_use(ledger: Ledger, workspace: str, prefixes: Sequence[str]) -> PrefixUse | None:
    """The newest turn of the workspace with one of these prefixes that an engine began to answer.
    From its beginning on the prefix was held for the marker's TTL."""
    columns = (
        TurnRow.prefix,
        TurnRow.prefix_ttl,
        TurnRow.engine_model,
        TurnRow.engine,
        TurnRow.epoch,
        TurnRow.opened_at,
    )
    parts = []
    for prefix in prefixes:
        newest = select(*columns).where(TurnRow.prefix == prefix, TurnRow.epoch.is_not(None))
        # By the prefix's index alone, as `rollups.gap_changes`.
        of_workspace = func.coalesce(TurnRow.workspace_id, "") == workspace
        newest = newest.where(of_workspace, TurnRow.engine.is_not(None))
        newest = newest.order_by(TurnRow.opened_ms.desc(), TurnRow.id.desc()).limit(1)
        parts.append(select(newest.subquery()))
    rows = await ledger.rows(union_all(*parts)) if parts else []
    row = max(rows, key=lambda turn: turn.opened_at, default=None)
    if row is None:
        return None
    seconds = TTLS[class_of(row.prefix_ttl or "5m")].seconds
    model = row.engine_model or ""
    return PrefixUse(row.prefix, model, row.engine, row.epoch, row.opened_at, seconds)


def _report(
    row: Any, prices: PriceSheets, looks: Mapping[tuple[str, str], PrefixLook]
) -> PrefixReport:
    values = {name: row[name] for name in PrefixReport.__struct_fields__ if name in row}
    look = looks.get((row["workspace_id"], row["prefix"]))
    if look is not None:
        values |= {"model": look.model, "ttl": look.ttl or row["ttl"]}
    models = sorted({row["model"], row["least_model"] or row["model"]})
    saved = None if row["unpriced"] else row["cost_without_cache_nano"] - row["cost_nano"]
    # The price of its last sheet; None where that sheet is gone.
    price = prices.with_id(row["price"] or "") if len(models) == 1 else None
    costs = dict[Ttl, int]()
    min_reads = None
    if price is not None:
        rates = price.rates
        count = row["requests"]
        marked = row["cache_read_tokens"] + sum(row[name] for name in WRITE_FIELDS.values())
        in_time: dict[Ttl, int] = {"5m": row["gaps_5m"], "1h": row["gaps_5m"] + row["gaps_1h"]}
        if not row["unpriced"]:
            for ttl, within in in_time.items():
                costs[ttl] = cost_with_ttl(rates, ttl, marked // count, count, within)
        premium = rates.write(class_of(values["ttl"] or "5m")) - rates.input
        discount = rates.input - rates.read
        min_reads = premium // discount + 1 if discount > 0 else None
    cost = costs.get(values["ttl"])
    cheapest = min(costs, key=lambda ttl: costs[ttl], default=None)
    better = None if cost is None else cheapest
    return PrefixReport(
        **values,
        workspace=row["workspace_id"],
        models=models,
        saved_nano=saved,
        is_paid_back=None if saved is None else saved > 0,
        nano_with_5m=costs.get("5m"),
        nano_with_1h=costs.get("1h"),
        better_ttl=better,
        better_ttl_saves_nano=None if cost is None or better is None else cost - costs[better],
        reads_to_pay_back=min_reads,
        look=look,
    )
