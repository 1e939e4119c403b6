"""What engines' epochs told, put down once however many gateways tell it.

Counters of an epoch only grow. Of each the largest that any gateway has seen is kept, and what it
has grown by is added to the interval in which that was seen. So the ends of leases add up over any
intervals, and each lease ends in one of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.protocol.reports import LEASE_ENDS, PrefillSums
from gateway.base.epochs import EpochReport
from gateway.base.record import TurnRecord
from gateway.ledger.schema import EpochReportRow, LeaseEndRow

MINUTE_SECONDS = 60
LEASE_WIDTHS_SECONDS = (86_400, 3_600, MINUTE_SECONDS)
"""The intervals' lengths, the longest first. Those of minutes go with their turns."""
Row = Mapping[str, Any]
_GROWING = ("granted", *LEASE_ENDS, "restored_leases", "lost_leases")


async def record_epochs(connection: AsyncConnection, reports: Sequence[EpochReport]) -> None:
    """Take reports in. All writers use one order, so that no two deadlock."""
    for report in sorted(reports, key=lambda report: (report.engine, report.epoch)):
        row = await _row_of(connection, report)
        ended = {reason: report.ended.get(reason, 0) - row[reason] for reason in LEASE_ENDS}
        rows = [
            {
                "width_seconds": width,
                "start_ms": report.heard_ms // (width * 1000) * width * 1000,
                "engine": report.engine,
                "reason": reason,
                "leases": leases,
            }
            for reason, leases in ended.items()
            if leases > 0
            for width in LEASE_WIDTHS_SECONDS
        ]
        if rows:
            await connection.execute(_ends(connection.dialect.name), rows)
        of_epoch = EpochReportRow.engine == report.engine, EpochReportRow.epoch == report.epoch
        await connection.execute(
            sa.update(EpochReportRow).where(*of_epoch).values(_changed(row, report))
        )


async def _row_of(connection: AsyncConnection, report: EpochReport) -> Row:
    """The epoch's row, made where there was none, and locked until the transaction ends."""
    table = EpochReportRow
    blank = dict.fromkeys(_GROWING, 0) | {
        "engine": report.engine,
        "epoch": report.epoch,
        "model": report.model,
        "device": report.device,
        "kind": report.kind,
        "first_ms": report.first_ms,
        "last_ms": report.heard_ms,
    }
    insert = _insert(connection.dialect.name)(table).on_conflict_do_nothing()
    await connection.execute(insert, [blank])
    query = sa.select(*table.__table__.columns).with_for_update()
    query = query.where(table.engine == report.engine, table.epoch == report.epoch)
    return dict((await connection.execute(query)).mappings().one())


def _changed(row: Row, report: EpochReport) -> dict[str, Any]:
    """The row's columns with the report."""
    ends = report.ended | {
        "granted": report.granted,
        "restored_leases": report.restored_leases,
        "lost_leases": report.lost_leases,
    }
    changed: dict[str, Any] = {name: max(row[name], ends.get(name, 0)) for name in _GROWING}
    changed["model"] = report.model
    changed["device"] = report.device
    changed["kind"] = report.kind
    changed["first_ms"] = min(row["first_ms"], report.first_ms)
    changed["last_ms"] = max(row["last_ms"], report.heard_ms)
    # What one gateway can't reach another may have heard since.
    silent = report.silent_ms if report.silent_ms is not None else row["silent_ms"]
    if silent is not None and silent < changed["last_ms"]:
        silent = None
    changed["silent_ms"] = silent
    changed["prefill_times"] = row["prefill_times"]
    times = report.prefill_times
    if times is not None and times.observations > observed(row["prefill_times"]).observations:
        changed["prefill_times"] = msgspec.json.encode(times).decode()
    return changed


def observed(times: str | None) -> PrefillSums:
    """The sums that a row has; none where its engine told none."""
    return PrefillSums() if times is None else msgspec.json.decode(times, type=PrefillSums)


def record_granted(connection: sa.Connection, records: Sequence[TurnRecord]) -> None:
    """Take in how many leases the epochs of these turns had granted. A gateway and an engine that
    were killed together told no more than their turns."""
    most: dict[tuple[str, str], TurnRecord] = {}
    for record in records:
        if not record.leases_granted or record.engine is None or record.epoch is None:
            continue
        key = record.engine, record.epoch
        if key not in most or most[key].leases_granted < record.leases_granted:
            most[key] = record
    if not most:
        return
    rows = [
        dict.fromkeys(_GROWING, 0)
        | {
            "engine": engine,
            "epoch": epoch,
            "model": record.engine_model or record.model,
            "device": "",
            "kind": "",
            "first_ms": int(record.opened_at.timestamp() * 1000),
            "last_ms": int(record.opened_at.timestamp() * 1000),
            "granted": record.leases_granted,
        }
        for (engine, epoch), record in sorted(most.items())
    ]
    insert = _insert(connection.dialect.name)(EpochReportRow)
    new = insert.excluded
    keys = [column.name for column in EpochReportRow.__table__.primary_key]
    grown = insert.on_conflict_do_update(
        index_elements=keys,
        set_={"granted": new.granted},
        where=new.granted > EpochReportRow.granted,
    )
    connection.execute(grown, rows)


def _insert(dialect: str) -> Any:
    return postgresql.insert if dialect == "postgresql" else sqlite.insert


def _ends(dialect: str) -> Any:
    """Add leases to their intervals."""
    insert = _insert(dialect)(LeaseEndRow)
    keys = [column.name for column in LeaseEndRow.__table__.primary_key]
    return insert.on_conflict_do_update(
        index_elements=keys, set_={"leases": LeaseEndRow.leases + insert.excluded.leases}
    )
