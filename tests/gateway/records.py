"""Records of turns and engines' final counts, as tests start from them."""

from datetime import UTC, datetime
from typing import Any

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
