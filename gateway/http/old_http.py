"""Answers to clients of HTTP/1.0: a body without a length ends with the connection.

uvicorn sends it in chunks, which HTTP/1.0 does not know (RFC 9112, 6.1).
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Unchunked:
    """An application whose answers have no transfer coding."""

    def __init__(self, app: Any, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._has_length = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def unchunked(message: Any) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                self._has_length = b"content-length" in names
            if not self._has_length:
                self._cycle.chunked_encoding = False
                # uvicorn compares what is sent with a length.
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, unchunked)
