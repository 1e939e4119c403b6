"""The caller's request id in the log lines of a call, and the access log.

A gateway sends the id that its client got in `x-request-id`. Whatever is logged while the call is
served has it as `request_id`, in every task that the call begins.
"""

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from structlog.contextvars import bind_contextvars, get_contextvars

Application = Callable[[Any, Any, Any], Awaitable[None]]

HEADER = b"x-request-id"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.-]{1,64}")

log = structlog.get_logger()


def with_request_id(app: Application) -> Application:
    """Middleware. An id of other characters, or a longer one, is not taken."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == HEADER), b"")
            if _REQUEST_ID.fullmatch(given):
                bind_contextvars(request_id=given.decode())
        await app(scope, receive, send)

    return call


class AccessLog:
    """Around the whole application: a line for each call of the protocol that was answered.

    Probes and metrics have none. A line has the route, never a query or a body.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        began, status, num_bytes = time.monotonic(), 0, 0

        async def counting(message: Any) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counting)
        finally:
            # A call without an id is the gateway's own: polls and acknowledgements.
            if "request_id" in get_contextvars():
                log.info(
                    "call",
                    method=scope["method"],
                    route=str(scope.get("path_template") or "unknown"),
                    status=status,
                    bytes=num_bytes,
                    seconds=round(time.monotonic() - began, 6),
                )
