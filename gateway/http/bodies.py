"""Bounds on the bodies of requests: their time, the bytes of one, and those of all.

A body that is slow, that is not JSON, or that there is no room for is refused where it is read. The
refusal is in the dialect's envelope, like every other failure.
"""

import asyncio
from typing import Any, NamedTuple

from litestar import Request
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.admission.rates import LARGE_BYTES, BodyBytes, LargeBodies
from gateway.base.errors import BodyTimeout, ClientGone, TooLarge, UnsupportedMedia
from gateway.http.speaking import header_of

BODY_BYTES_PER_SECOND = 16 * 1024
"""A body's deadline moves by a second each time that this many bytes have come.

So a long body gets more time than a trickling one (the rule of Apache's `RequestReadTimeout`).
"""
_MAX_DIGITS = 16


class BoundedRequest(Request[Any, Any, Any]):
    """A request whose body is a `_Body`. Litestar's own would make a mapping of all headers."""

    async def body(self) -> bytes:
        """Raise UnsupportedMedia for anything but uncompressed JSON in UTF-8, or an error of
        `_Body`."""
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

    # The most bytes of one body.
    most_bytes: int
    # The time until an empty body's deadline.
    seconds: float
    # The bytes of all bodies.
    bodies: BodyBytes
    # The rate of large bodies. A body beyond its workspace's rate stays in the socket for a while.
    large: LargeBodies


class BodyDeadline:
    """ASGI middleware that gives each request a `_Body`."""

    def __init__(self, app: ASGIApp, bounds: BodyBounds) -> None:
        self.app = app
        self._bounds = bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(scope, receive, self._bounds)
        scope["state"]["body"] = body
        try:
            await self.app(scope, receive, send)
        finally:
            body.give_back()
            del scope["state"]["body"]  # a cycle would leave the request to the garbage collector


class _Body:
    """The body of one request. The time until its deadline runs from when it is made.

    When its first bytes come, it takes all the bytes that its head declares from `BodyBytes`.
    """

    def __init__(self, scope: Scope, receive: Receive, bounds: BodyBounds) -> None:
        self._scope = scope
        self._receive = receive
        self._bounds = bounds
        self._deadline = asyncio.get_running_loop().time() + bounds.seconds
        length = header_of(scope, b"content-length") or ""
        is_number = length.isdecimal() and len(length) < _MAX_DIGITS
        self._declared = int(length) if is_number else 0
        self._workspace = ""
        # The bytes that were taken from `BodyBytes`, and those that were read.
        self._num_bytes = 0
        self._num_read = 0

    async def whole(self) -> bytes:
        """Read the body. Raise TooLarge, BodyTimeout, ClientGone, or an error of
        `BodyBytes.take`."""
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
                wait_seconds = await self.grow(num_bytes, self._declared)
                self._deadline += num_bytes / BODY_BYTES_PER_SECOND + wait_seconds
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def grow(self, num_bytes: int, declared: int) -> float:
        """Count further bytes of a body with `declared` bytes. Return for how many seconds the rest
        was left in the socket. Raise RateLimited or Overloaded."""
        self._num_read += num_bytes
        num_before = self._num_bytes
        num_more = max(declared, self._num_read) - num_before
        if num_more <= 0:
            return 0.0
        workspace = getattr(self._scope.get("user"), "workspace", None) or ""
        self._bounds.bodies.take(workspace, num_more)
        self._workspace = workspace
        self._num_bytes += num_more
        if self._num_bytes <= LARGE_BYTES:
            return 0.0
        num_large = num_more if num_before > LARGE_BYTES else self._num_bytes
        return await self._bounds.large.wait(workspace, num_large)

    def give_back(self) -> None:
        if self._num_bytes:
            self._bounds.bodies.give_back(self._workspace, self._num_bytes)


async def brought_in(scope: Scope, num_bytes: int) -> None:
    """Count stored bytes that a request names, as if they had come in its body. They are held until
    the request is over. Raise RateLimited or Overloaded."""
    body: _Body = scope["state"]["body"]
    await body.grow(num_bytes, 0)
