"""What engines report of their epochs. However many gateways hear a report, it counts once.

Counters of an epoch only grow. The ledger keeps the largest value that any gateway has seen. The
growth is added to the interval in which it was seen. So each lease ends in one interval, and the
ends add up over any intervals.
"""

from collections.abc import Mapping, Sequence
from functools import cache
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
"""The intervals' lengths, the longest first. Rows of minutes are deleted with their turns."""
Row = Mapping[str, Any]
_GROWING = ("granted", *LEASE_ENDS, "restored_leases", "lost_leases")


async def record_epochs(connection: AsyncConnection, reports: Sequence[EpochReport]) -> None:
    """Add reports to the rows. All writers use one order, so that no two deadlock."""
    for report in sorted(reports, key=lambda report: (report.engine, report.epoch)):
        row = await _row_of(connection, report)
        new_ends = {reason: report.ended.get(reason, 0) - row[reason] for reason in LEASE_ENDS}
        rows = [
            {
                "width_seconds": width,
                "start_ms": report.heard_ms // (width * 1000) * width * 1000,
                "engine": report.engine,
                "reason": reason,
                "leases": leases,
            }
            for reason, leases in new_ends.items()
            if leases > 0
            for width in LEASE_WIDTHS_SECONDS
        ]
        if rows:
            await connection.execute(_ends(connection.dialect.name), rows)
        of_epoch = EpochReportRow.engine == report.engine, EpochReportRow.epoch == report.epoch
        await connection.execute(
            sa.update(EpochReportRow).where(*of_epoch).values(_with_report(row, report))
        )


async def _row_of(connection: AsyncConnection, report: EpochReport) -> Row:
    """The epoch's row, locked until the transaction ends. A missing one is made."""
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


def _with_report(row: Row, report: EpochReport) -> dict[str, Any]:
    """The row's columns with the report taken in."""
    ends = report.ended | {
        "granted": report.granted,
        "restored_leases": report.restored_leases,
        "lost_leases": report.lost_leases,
    }
    columns: dict[str, Any] = {name: max(row[name], ends.get(name, 0)) for name in _GROWING}
    columns["model"] = report.model
    columns["device"] = report.device
    columns["kind"] = report.kind
    columns["first_ms"] = min(row["first_ms"], report.first_ms)
    columns["last_ms"] = max(row["last_ms"], report.heard_ms)
    # Another gateway may have heard the engine since this one could not reach it.
    silent = report.silent_ms if report.silent_ms is not None else row["silent_ms"]
    if silent is not None and silent < columns["last_ms"]:
        silent = None
    columns["silent_ms"] = silent
    columns["prefill_times"] = row["prefill_times"]
    times = report.prefill_times
    if times is not None and times.observations > observed(row["prefill_times"]).observations:
        columns["prefill_times"] = msgspec.json.encode(times).decode()
    return columns


def observed(times: str | None) -> PrefillSums:
    """The sums of a row. They are empty where the engine reported none."""
    return PrefillSums() if times is None else msgspec.json.decode(times, type=PrefillSums)


def record_granted(connection: sa.Connection, records: Sequence[TurnRecord]) -> None:
    """Record how many leases the epochs of these turns had granted.

    Where a gateway and an engine were killed together, nothing but the turns tells it.
    """
    largest: dict[tuple[str, str], TurnRecord] = {}
    for record in records:
        if not record.leases_granted or record.engine is None or record.epoch is None:
            continue
        key = record.engine, record.epoch
        if key not in largest or largest[key].leases_granted < record.leases_granted:
            largest[key] = record
    if not largest:
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
        for (engine, epoch), record in sorted(largest.items())
    ]
    connection.execute(_grants(connection.dialect.name), rows)


@cache
def _grants(dialect: str) -> Any:
    """The statement that raises what epochs had granted."""
    insert = _insert(dialect)(EpochReportRow)
    granted = insert.excluded.granted
    keys = [column.name for column in EpochReportRow.__table__.primary_key]
    return insert.on_conflict_do_update(
        index_elements=keys,
        set_={"granted": granted},
        where=granted > EpochReportRow.granted,
    )


def _insert(dialect: str) -> Any:
    return postgresql.insert if dialect == "postgresql" else sqlite.insert


@cache
def _ends(dialect: str) -> Any:
    """The statement that adds leases to their intervals."""
    insert = _insert(dialect)(LeaseEndRow)
    keys = [column.name for column in LeaseEndRow.__table__.primary_key]
    return insert.on_conflict_do_update(
        index_elements=keys, set_={"leases": LeaseEndRow.leases + insert.excluded.leases}
    )
