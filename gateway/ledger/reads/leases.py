"""What became of leases in a range of time. The ledger tells it, also of engines that are gone.

A lease that ended while its engine lived is in a row of `lease_ends`. Any other lease of an epoch
is still held, or ended with the engine's process. What is known of the engine decides:

- The engine answers in that epoch: its leases are held.
- The engine is silent: nothing is known of its leases since it was last heard.
- The engine has a newer epoch: the old process is gone. The leases that the store brought back are
  held by the new one. The others are lost.
- The engine is in no fleet: its leases are lost with it.

Where no gateway ran while a process ended, its leases are not known either: they may have lived to
their ends.
"""

import functools
import operator
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from engine.protocol.reports import LEASE_ENDS
from gateway.base.rounding import round_up
from gateway.ledger.database import Ledger
from gateway.ledger.epochs import LEASE_WIDTHS_SECONDS, MINUTE_SECONDS
from gateway.ledger.reads.sums import Range, parts_of, widen_to_days
from gateway.ledger.schema import EpochReportRow, LeaseEndRow
from gateway.structs.fleet import LeasesKept

SEEN_MS = 60_000
"""Where a newer epoch began so soon after the old one was last heard, a gateway was running."""
_MINUTE_MS = MINUTE_SECONDS * 1000

Answering = Mapping[str, str | None]
"""By the name of each engine of the fleet, the epoch in which it answers; None while it is
silent."""


@dataclass(slots=True)
class LeaseFates:
    """What became of one engine's leases, as numbers of them."""

    # The leases that ended, by how they ended; `expired` is one way.
    ended: Counter[str] = field(default_factory=Counter)
    # The leases of which nothing is known, and the first moment since which that is so.
    not_known: int = 0
    since_ms: int | None = None
    # The leases that live now.
    held: int = 0


async def leases_kept(ledger: Ledger, of: Range, answering: Answering) -> LeasesKept:
    """What became of leases in the range, of all workspaces, on the range's engine or on all."""
    ended = Counter[str]()
    not_known = 0
    held = 0
    moments = list[int]()
    for fates in (await lease_fates(ledger, of, answering)).values():
        ended.update(fates.ended)
        not_known += fates.not_known
        held += fates.held
        if fates.since_ms is not None:
            moments.append(fates.since_ms)
    expired = ended.pop("expired", 0)
    released = ended.pop("released", 0)
    return LeasesKept(
        since_ms=of.since_ms,
        until_ms=of.until_ms,
        expired=expired,
        released=released,
        lost={reason: count for reason, count in ended.items() if count},
        not_known=not_known,
        not_known_since_ms=min(moments, default=None),
        held=held,
    )


async def lease_fates(ledger: Ledger, of: Range, answering: Answering) -> dict[str, LeaseFates]:
    """What became of leases in the range, by engine."""
    fates = defaultdict[str, LeaseFates](LeaseFates)
    async with ledger.snapshot() as connection:
        wide = await widen_to_days(connection, of)
        for query in _ends(wide):
            for engine, reason, leases in await connection.execute(query):
                fates[engine].ended[reason] += int(leases)
        epochs = _epochs()
        if of.engine is not None:
            epochs = epochs.where(epochs.selected_columns.engine == of.engine)
        rows = (await connection.execute(epochs)).mappings().all()
    for row in rows:
        _take(fates[row["engine"]], row, of, answering)
    return dict(fates)


def _take(fates: LeaseFates, row: Mapping[str, Any], of: Range, answering: Answering) -> None:
    """Add those leases of one epoch whose end its engine did not report."""
    untold = row["granted"] - sum(row[reason] for reason in LEASE_ENDS)
    if untold <= 0:
        return
    engine = row["engine"]
    heard_ms = row["last_ms"]
    is_in_range = of.since_ms <= heard_ms < of.until_ms
    if row["next_ms"] is not None:
        num_gone = untold - min(untold, row["next_restored"])
        was_seen = row["silent_ms"] is not None or row["next_ms"] - heard_ms <= SEEN_MS
        if not is_in_range:
            return
        if not was_seen:
            _forget(fates, num_gone, heard_ms)
            return
        num_in_store = min(num_gone, row["next_lost"])
        fates.ended["store_lost"] += num_in_store
        fates.ended["restart"] += num_gone - num_in_store
    elif engine not in answering:
        if is_in_range:
            fates.ended["engine_lost"] += untold
    elif answering[engine] == row["epoch"]:
        fates.held += untold
    elif heard_ms < of.until_ms:
        # The silence lasts, so it is also in ranges that begin later.
        _forget(fates, untold, heard_ms)


def _forget(fates: LeaseFates, leases: int, since_ms: int) -> None:
    """Nothing is known of these leases from that moment on."""
    if leases:
        fates.not_known += leases
        fates.since_ms = since_ms if fates.since_ms is None else min(fates.since_ms, since_ms)


def _ends(of: Range) -> list[Any]:
    """The ends of the range, in whole minutes."""
    since = of.since_ms // _MINUTE_MS * _MINUTE_MS
    until = round_up(of.until_ms, _MINUTE_MS)
    table = LeaseEndRow
    queries = []
    for part in parts_of(since, until, LEASE_WIDTHS_SECONDS):
        query = sa.select(table.engine, table.reason, sa.func.sum(table.leases))
        query = query.group_by(table.engine, table.reason)
        query = query.where(
            table.width_seconds == part.width_seconds,
            table.start_ms >= part.since_ms,
            table.start_ms < part.until_ms,
        )
        queries.append(query if of.engine is None else query.where(table.engine == of.engine))
    return queries


@functools.cache
def _epochs() -> sa.Select[Any]:
    """Every epoch with leases whose end it did not report, and what the next epoch reported. Each
    gateway asks this every few seconds, so the statement is made once."""
    table = EpochReportRow
    order: dict[str, Any] = {
        "partition_by": table.engine,
        "order_by": (table.first_ms, table.epoch),
    }

    def following(column: Any, name: str) -> Any:
        return sa.func.lead(column).over(**order).label(name)

    ends = [getattr(table, reason) for reason in LEASE_ENDS]
    num_ended = functools.reduce(operator.add, ends)
    epochs = sa.select(
        table.engine,
        table.epoch,
        table.last_ms,
        table.silent_ms,
        table.granted,
        *ends,
        following(table.first_ms, "next_ms"),
        following(table.restored_leases, "next_restored"),
        following(table.lost_leases, "next_lost"),
        (table.granted - num_ended).label("untold"),
    ).subquery()
    return sa.select(*epochs.c).where(epochs.c.untold > 0)
