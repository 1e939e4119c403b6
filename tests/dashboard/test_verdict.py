"""The verdict on a request: one, and never against its own counts. Pure."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from dashboard.admin.shapes.turns import Turn, TurnDivergence
from dashboard.rows.verdict import verdict
from dashboard.ui.advice import ADVICE
from tests.dashboard.ledgers import turn as row_of


def turn(read: int = 0, written: int = 0, miss_reason: str | None = None) -> Turn:
    row: dict[str, Any] = row_of(
        1, datetime.now(UTC), read=read, write_5m=written, miss_reason=miss_reason
    )
    unknown = {"decode_seconds": None, "saved_nano": None, "dialect": None, "stop_reason": None}
    row |= unknown | {"workspace": "w", "stream": True}
    return msgspec.convert({k: v for k, v in row.items() if k != "opened_at"}, Turn)


def found(kind: str | None, shared: int) -> TurnDivergence:
    return TurnDivergence(turn="t", earlier="e", kind=kind, shared_tokens=shared, missed_tokens=9)


@pytest.mark.parametrize(
    ("judged", "compared", "title", "is_good", "shows_difference"),
    [
        (turn(read=100), None, "A hit", True, False),
        (turn(read=100), found("messages_changed", 100), "A hit", True, False),
        (turn(100, 50), found(None, 100), "A hit that grew", True, False),
        (turn(100, 50), found("messages_changed", 150), "A hit that grew", True, False),
        (turn(100, 50), found("system_changed", 99), "The system prompt", False, True),
        (turn(0, 50, "cold"), found("system_changed", 0), "The system prompt", False, True),
        (turn(0, 50, "cold"), found("messages_changed", 50), "First time seen", False, False),
        (turn(0, 50, "cold"), None, "First time seen", False, False),
        (turn(0, 50, "ttl_expired"), found("messages_changed", 9), "Came after", False, False),
        (turn(), None, "No miss", True, False),
    ],
)
def test_one_verdict(
    judged: Turn,
    compared: TurnDivergence | None,
    title: str,
    is_good: bool,
    shows_difference: bool,
) -> None:
    said = verdict(judged, compared)
    assert said.said.title.startswith(title)
    assert said.is_good is is_good
    assert (said.difference is not None) is shows_difference


def test_a_new_conversation_is_not_told_to_change_its_prompt() -> None:
    said = verdict(turn(100, 50), found("messages_changed", 100)).said
    assert (
        "another conversation" in said.change and said.change != ADVICE["messages_changed"].change
    )
