"""The answers of calls that run turns: a whole body, or a stream.

Litestar's own responses do the same. They make headers and cookies of many kinds first, and a
stream takes two tasks of anyio.
"""

from collections.abc import AsyncGenerator
from typing import Any

from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from gateway.base.errors import ClientGone
from gateway.http.half_closed import FILLER
from gateway.http.held_head import HOLD_HEAD
from gateway.http.presence import while_received

_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Whole(ASGIResponse):
    """A body of JSON with status 200."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(self.body)),
        ]
        if (hold_head := scope["state"].get(HOLD_HEAD)) is not None:
            hold_head()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


class Streamed(ASGIResponse):
    """A body that is sent as it is made. `items` are closed behind it, in whatever way it ends."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        items: AsyncGenerator[Any, None],
        media_type: str,
        filler: bytes,
    ) -> None:
        """`filler` is what a probe of the connection may put between two pieces."""
        self._events = events
        self._items = items
        self._media_type = media_type
        self._filler = filler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        media_type = self._media_type.encode()
        if media_type.startswith(b"text/"):
            media_type += b"; charset=utf-8"
        headers = [(b"content-type", media_type), *_STREAM_HEADERS]
        scope["state"][FILLER] = self._filler
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await while_received(scope, receive, self._send(send))
        except ClientGone:
            pass
        finally:
            await self._events.aclose()
            await self._items.aclose()

    async def _send(self, send: Send) -> None:
        async for piece in self._events:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
