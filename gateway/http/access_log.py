"""The access log: a line for each HTTP response, and one for each turn when it is charged.

Off by default (HOLDFAST_ACCESS_LOG). A line has the route's template, never a path or a query:
Google's clients put their key there.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.base.logs import get_logger
from gateway.base.record import TurnRecord
from gateway.prompt.ask import Principal

_TURN_FIELDS = (
    *("workspace", "model", "engine", "attempt", "outcome", "status", "error", "miss_reason"),
    *("input_tokens", "cache_read_tokens", "output_tokens", "first_token_seconds"),
)

Application = Callable[[Any, Any, Any], Awaitable[None]]


class AccessLog:
    """Wraps the whole application, because it answers errors outside of its own middleware."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._log = get_logger("access")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, num_bytes = time.monotonic(), 0, 0

        async def counting(message: Any) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                num_bytes += len(message["body"])
            await send(message)

        try:
            await self._app(scope, receive, counting)
        finally:
            user = scope.get("user")
            self._log.info(
                "response",
                method=scope["method"],
                route=str(scope.get("path_template") or "unknown"),
                status=status,
                bytes=num_bytes,
                seconds=round(time.monotonic() - began, 6),
                workspace=user.workspace if isinstance(user, Principal) else None,
            )


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
