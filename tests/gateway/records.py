"""Records of turns, engines' final counts, and what a ledger has."""

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from engine.protocol import FinalCounts
from gateway.base.record import TurnRecord


def turn_record(turn_id: str, **changes: Any) -> TurnRecord:
    values: dict[str, Any] = {
        "instance": "i",
        "workspace": "w",
        "key_id": "k",
        "model": "m",
        "stream": False,
        "opened_at": datetime(2026, 11, 21, tzinfo=UTC),
    }
    return TurnRecord(id=turn_id, **{**values, **changes})


def counts_of(request_id: str, **changes: Any) -> FinalCounts:
    values: dict[str, Any] = {"epoch": "e", "reason": "stop"}
    return FinalCounts(request_id=request_id, **{**values, **changes})


def ledger_rows(url: str) -> list[dict[str, Any]]:
    """All turns of a ledger, by its URL, in the order of their ids."""
    database = sa.create_engine(url.replace("sqlite+aiosqlite", "sqlite"))
    with database.connect() as connection:
        mappings = connection.execute(sa.text("SELECT * FROM turns ORDER BY id")).mappings()
        rows = [dict(row) for row in mappings]
    database.dispose()
    return rows
