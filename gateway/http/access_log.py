"""The access log: a line for each HTTP response, and one for each turn when it is charged.

Off by default (HOLDFAST_ACCESS_LOG).
"""

from collections.abc import Callable
from typing import Any

from gateway.base.logs import get_logger
from gateway.base.record import TurnRecord
from gateway.prompt.ask import Principal

_TURN_FIELDS = (
    *("workspace", "model", "engine", "attempt", "outcome", "status", "error", "miss_reason"),
    *("input_tokens", "cache_read_tokens", "output_tokens", "first_token_seconds"),
)


def note_response(scope: Any, told: dict[str, Any]) -> None:
    user = scope.get("user")
    workspace = user.workspace if isinstance(user, Principal) else None
    get_logger("access").info("response", **told, workspace=workspace)


def logged(charged: Callable[[TurnRecord], None], is_on: bool) -> Callable[[TurnRecord], None]:
    """A function that calls `charged`, and then logs the turn if the access log is on."""
    if not is_on:
        return charged
    log = get_logger("access")

    def charge(record: TurnRecord) -> None:
        charged(record)
        log.info(
            "turn",
            turn=record.id,
            request_id=record.http_request_id,
            cache_write_tokens=record.written_tokens,
            seconds=record.duration_seconds,
            **{name: getattr(record, name) for name in _TURN_FIELDS},
        )

    return charge
