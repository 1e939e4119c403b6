"""Bounds on the bodies of requests: their time, and their bytes in all.

A slow body, and one that there is no room for, is refused where it is read, in the dialect's
envelope like every other failure. Litestar bounds the size of one body.
"""

import asyncio
from typing import Any

from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.admission.rates import LARGE_BYTES, BodyBytes, LargeBodies
from gateway.base.errors import BodyTimeout, ClientGone

BODY_BYTES_PER_SECOND = 16 * 1024
"""A body's deadline moves by a second for each this many bytes.

So a long body gets more time and a trickling one does not (the rule of Apache's
`RequestReadTimeout`).
"""
_MAX_DIGITS = 16


class BodyDeadline:
    """ASGI middleware: an application reads its body through a `_Body`.

    A large body beyond its workspace's rate is left in the socket for a while.
    """

    def __init__(
        self, app: ASGIApp, request_seconds: float, bodies: BodyBytes, large: LargeBodies
    ) -> None:
        self.app = app
        self._seconds = request_seconds
        self._bodies = bodies
        self._large = large

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(scope, receive, self._seconds, self._bodies, self._large)
        scope.setdefault("state", {})["body"] = body
        try:
            await self.app(scope, body.receive, send)
        finally:
            body.give_back()


class _Body:
    """One body that is read. Its deadline runs from here on.

    It takes all the bytes that its head declares from `BodyBytes` when the first of them come.
    """

    def __init__(
        self, scope: Scope, receive: Receive, seconds: float, bodies: BodyBytes, large: LargeBodies
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._bodies = bodies
        self._large = large
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._declared = 0
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and len(value) < _MAX_DIGITS:
                self._declared = int(value)
        self._is_whole = False
        self._workspace = ""
        self._num_bytes = self._num_read = 0

    async def receive(self) -> Any:
        """The next ASGI message. What comes behind the whole body is passed on.

        Raise BodyTimeout, ClientGone, or as `BodyBytes.take`.
        """
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message: Any = await self._receive()
        except TimeoutError:
            raise BodyTimeout from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        if num_bytes := len(message.get("body", b"")):
            waited = await self.grow(num_bytes, self._declared)
            self._deadline += num_bytes / BODY_BYTES_PER_SECOND + waited
        self._is_whole = not message.get("more_body", False)
        return message

    async def grow(self, num_bytes: int, declared: int) -> float:
        """Count further bytes of `declared`. Return how long the rest was left in the socket.

        Raise RateLimited or Overloaded.
        """
        self._num_read += num_bytes
        before = self._num_bytes
        more = max(declared, self._num_read) - before
        if more <= 0:
            return 0.0
        workspace = getattr(self._scope.get("user"), "workspace", None) or ""
        self._bodies.take(workspace, more)
        self._workspace = workspace
        self._num_bytes += more
        if self._num_bytes <= LARGE_BYTES:
            return 0.0
        seconds, refusal = self._large.take(
            workspace, more if before > LARGE_BYTES else self._num_bytes
        )
        await asyncio.sleep(seconds)
        if refusal is not None:
            raise refusal
        return seconds

    def give_back(self) -> None:
        if self._num_bytes:
            self._bodies.give_back(self._workspace, self._num_bytes)


async def brought_in(scope: Scope, num_bytes: int) -> None:
    """Count bytes that a request names instead of sending them, as if they had come in its body.

    They are held until the request is over. Raise RateLimited or Overloaded.
    """
    body: _Body = scope["state"]["body"]
    await body.grow(num_bytes, 0)
