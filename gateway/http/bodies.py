"""Bounds on the bodies of requests: their time, the bytes of one, and those of all.

A slow body, one that is no JSON, and one that there is no room for, is refused where it is read, in
the dialect's envelope like every other failure.
"""

import asyncio
from typing import Any, NamedTuple

from litestar import Request
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.admission.rates import LARGE_BYTES, BodyBytes, LargeBodies
from gateway.base.errors import BodyTimeout, ClientGone, TooLarge, UnsupportedMedia
from gateway.http.speaking import header_of

BODY_BYTES_PER_SECOND = 16 * 1024
"""A body's deadline moves by a second for each this many bytes.

So a long body gets more time and a trickling one does not (the rule of Apache's
`RequestReadTimeout`).
"""
_MAX_DIGITS = 16


class BoundedRequest(Request[Any, Any, Any]):
    """Its body is a `_Body`. Litestar would make a mapping of all headers to read it."""

    async def body(self) -> bytes:
        """Raise UnsupportedMedia for anything but uncompressed JSON in UTF-8, or as `_Body`."""
        body: _Body = self.scope["state"]["body"]
        whole = await body.whole()
        if not whole:
            return whole
        kind, _, parameters = (header_of(self.scope, b"content-type") or "").partition(";")
        if kind.strip().lower() != "application/json":
            raise UnsupportedMedia
        for parameter in parameters.split(";"):
            name, _, value = parameter.partition("=")
            charset = value.strip().strip('"').lower()
            if name.strip().lower() == "charset" and charset not in ("utf-8", "utf8"):
                raise UnsupportedMedia("content-type: charset must be utf-8")
        encoding = header_of(self.scope, b"content-encoding")
        if encoding is not None and encoding.strip().lower() != "identity":
            raise UnsupportedMedia("content-encoding: compressed bodies are not supported")
        return whole


class BodyBounds(NamedTuple):
    """The bounds of request bodies."""

    # Of one body.
    most_bytes: int
    # Until a body's deadline.
    seconds: float
    bodies: BodyBytes
    # A large body beyond its workspace's rate is left in the socket for a while.
    large: LargeBodies


class BodyDeadline:
    """ASGI middleware: requests have a `_Body`."""

    def __init__(self, app: ASGIApp, bounds: BodyBounds) -> None:
        self.app = app
        self._bounds = bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = scope["state"]["body"] = _Body(scope, receive, self._bounds)
        try:
            await self.app(scope, receive, send)
        finally:
            body.give_back()
            del scope["state"]["body"]  # else all of a request is left to the collector


class _Body:
    """One body that is read. Its deadline runs from here on. It takes all the bytes that its head
    declares from `BodyBytes` when the first of them come."""

    def __init__(self, scope: Scope, receive: Receive, bounds: BodyBounds) -> None:
        self._scope = scope
        self._receive = receive
        self._bounds = bounds
        self._deadline = asyncio.get_running_loop().time() + bounds.seconds
        length = header_of(scope, b"content-length") or ""
        is_number = length.isdecimal() and len(length) < _MAX_DIGITS
        self._declared = int(length) if is_number else 0
        self._workspace = ""
        self._num_bytes = self._num_read = 0

    async def whole(self) -> bytes:
        """Read it. Raise TooLarge, BodyTimeout, ClientGone, or as `BodyBytes.take`."""
        pieces = list[bytes]()
        more = True
        if self._declared > self._bounds.most_bytes:
            raise TooLarge
        while more:
            try:
                async with asyncio.timeout_at(self._deadline):
                    message: Any = await self._receive()
            except TimeoutError:
                raise BodyTimeout from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            pieces.append(message["body"])
            more = message["more_body"]
            num_bytes = len(pieces[-1])
            if num_bytes:
                if self._num_read + num_bytes > self._bounds.most_bytes:
                    raise TooLarge
                waited = await self.grow(num_bytes, self._declared)
                self._deadline += num_bytes / BODY_BYTES_PER_SECOND + waited
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def grow(self, num_bytes: int, declared: int) -> float:
        """Count further bytes of `declared`. Return how long the rest was left in the socket. Raise
        RateLimited or Overloaded."""
        self._num_read += num_bytes
        before = self._num_bytes
        more = max(declared, self._num_read) - before
        if more <= 0:
            return 0.0
        workspace = getattr(self._scope.get("user"), "workspace", None) or ""
        self._bounds.bodies.take(workspace, more)
        self._workspace = workspace
        self._num_bytes += more
        if self._num_bytes <= LARGE_BYTES:
            return 0.0
        large = more if before > LARGE_BYTES else self._num_bytes
        return await self._bounds.large.wait(workspace, large)

    def give_back(self) -> None:
        if self._num_bytes:
            self._bounds.bodies.give_back(self._workspace, self._num_bytes)


async def brought_in(scope: Scope, num_bytes: int) -> None:
    """Count bytes that a request names instead of sending them, as if they had come in its body.
    They are held until the request is over. Raise RateLimited or Overloaded."""
    body: _Body = scope["state"]["body"]
    await body.grow(num_bytes, 0)
