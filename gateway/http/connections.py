"""Bounds on a client's connection: the size and time of a request, and the time to read the answer.

uvicorn bounds none of this, and an ASGI application is called only after a whole head. So the
protocol (`guarded`) bounds heads and ends connections whose client has stopped reading. A
middleware (`BodyDeadline`) refuses a slow body, in the dialect's envelope like every other failure.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import httptools
from litestar.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.base.errors import (
    BodyTimeout,
    ClientGone,
    GatewayError,
    HeadTimeout,
    HeadTooLarge,
    InvalidRequest,
    Overloaded,
    TooLarge,
)
from gateway.http.admitted import Connections
from gateway.http.errors import reply_without_route
from gateway.limits.bodies import BodyBytes
from gateway.limits.large_bodies import LARGE_BYTES, LargeBodies, Wait

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
BODY_BYTES_PER_SECOND = 16 * 1024
"""A body's deadline moves by a second for each this many bytes.

So a long body gets more time and a trickling one does not (the rule of Apache's
`RequestReadTimeout`).
"""

_MAX_DIGITS = 16
_REASONS: dict[type[GatewayError], str] = {
    HeadTooLarge: "head_too_large",
    HeadTimeout: "head_timeout",
    Overloaded: "too_many",
}


class NoteRefusal(Protocol):
    def __call__(self, reason: str, request_id: str | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of a connection.

    `request_seconds` is the time for a head, and again for its body. `stall_seconds` is the time
    for a client to read waiting bytes. `refused` is called with the reason of every refusal that no
    route sees, and with the request's id where the client got one.
    """

    request_seconds: float
    stall_seconds: float
    refused: NoteRefusal
    connections: Connections


def guarded(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """The protocol for uvicorn's `http` setting."""

    class Guarded(_GuardedProtocol):
        bounds = limits

    return Guarded


class _GuardedProtocol(HttpToolsProtocol):
    """Bounds on the head of a request, on what follows its body, and on unread responses."""

    bounds: ConnectionLimits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_admitted = True
        # Bytes since the last complete part: of a head, of trailers, or of nothing.
        self._loose_bytes = 0
        self._is_in_body = False
        self._refusal: GatewayError | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._head: asyncio.TimerHandle | None = self._later(self._head_is_late)
        self._is_admitted = self.bounds.connections.enter(
            self, self.client[0] if self.client else ""
        )
        if not self._is_admitted:
            self._refuse(Overloaded("too many connections", retry_after=1))

    @property
    def is_idle(self) -> bool:
        has_request = self.cycle is not None and not self.cycle.response_complete
        return not (has_request or self._is_in_body)

    def evict(self) -> None:
        """Another connection needs its place."""
        self.bounds.refused("made_way")
        self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["prove"] = partial(self.bounds.connections.prove, self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_head()
        self._disarm_stall()
        self.bounds.connections.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_admitted:
            return
        self._loose_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._loose_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge())
        elif self._loose_bytes and not self._is_in_body and self._head is None:
            self._head = self._later(self._head_is_late)

    def on_headers_complete(self) -> None:
        self._disarm_head()
        self._is_in_body = True
        size = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.headers) > MAX_HEADERS or size + len(self.url) > MAX_HEAD_BYTES:
            self._refusal = HeadTooLarge()
            raise httptools.HttpParserError  # uvicorn answers with `send_400_response`
        super().on_headers_complete()
        # Trailers arrive as headers too. A list of their own keeps them out of the request's
        # headers.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        self._loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if len(self.headers) > MAX_HEADERS:
            self._refusal = HeadTooLarge()
            raise httptools.HttpParserError
        self._loose_bytes, self._is_in_body = 0, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_body:
            # The answer did not wait for the body. The rest is read and dropped, until the
            # deadline.
            self._later(self._still_in_body)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._disarm_stall()
        self._stall = self.loop.call_later(self.bounds.stall_seconds, self._reader_is_late)

    def resume_writing(self) -> None:
        self._disarm_stall()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or InvalidRequest("the request is not valid HTTP"))

    def _later(self, late: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(self.bounds.request_seconds, late)

    def _disarm_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _disarm_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _head_is_late(self) -> None:
        self._head = None
        if self._loose_bytes:
            self._refuse(HeadTimeout())
        else:
            self.transport.close()

    def _still_in_body(self) -> None:
        if self._is_in_body and not self.transport.is_closing():
            self.transport.close()

    def _reader_is_late(self) -> None:
        """The client does not read, so the turn ends as if the client had hung up."""
        self.bounds.refused("stalled_reader")
        self.transport.abort()

    def _refuse(self, failure: GatewayError) -> None:
        """Answer on the bare connection and close it, unless a response has begun."""
        reason, made = _REASONS.get(type(failure), "malformed"), None
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            url = getattr(self, "url", b"").decode("latin-1")
            made, headers, body = reply_without_route(failure, url)
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            # The other dialect's 529 is no status that a proxy knows.
            status = STATUS_LINE[503 if isinstance(failure, Overloaded) else failure.status]
            self.transport.write(status + head.encode() + b"\r\n" + body)
        self.bounds.refused(reason, made)
        self.transport.close()


class Bodies:
    """Reads whole bodies, with the bounds of `BodyDeadline`. `max_bytes` bounds one body."""

    def __init__(
        self, request_seconds: float, bodies: BodyBytes, large: LargeBodies, max_bytes: int
    ) -> None:
        self._seconds = request_seconds
        self._bodies = bodies
        self._large = large
        self._max_bytes = max_bytes

    @contextmanager
    def reading(self, scope: Scope) -> Iterator["Reading"]:
        """The body of one request. Its bytes count until the context ends."""
        taken = _Taken(self._bodies, self._large)
        try:
            yield Reading(scope, taken, self._seconds, self._max_bytes)
        finally:
            taken.give_back()


class Reading:
    """One body that is to be read. Its deadline runs from here on."""

    def __init__(self, scope: Scope, taken: "_Taken", seconds: float, max_bytes: int) -> None:
        self._scope = scope
        self._taken = taken
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._max_bytes = max_bytes

    async def whole(self, receive: Receive) -> bytes:
        """Raise BodyTimeout, ClientGone, TooLarge, or as `BodyBytes.take`."""
        declared = _declared_bytes(self._scope)
        if declared > self._max_bytes:
            raise TooLarge
        workspace = getattr(self._scope.get("user"), "workspace", None) or ""
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout_at(self._deadline) as deadline:
                while True:
                    message: Any = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    if piece := message.get("body", b""):
                        pieces.append(piece)
                        wait = self._taken.grow(workspace, len(piece), declared)
                        if self._taken.num_read > self._max_bytes:
                            raise TooLarge
                        if wait.seconds:
                            deadline.reschedule(None)
                            await asyncio.sleep(wait.seconds)
                        if wait.refusal is not None:
                            raise wait.refusal
                        self._deadline += len(piece) / BODY_BYTES_PER_SECOND + wait.seconds
                    if not message.get("more_body", False):
                        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
                    deadline.reschedule(self._deadline)
        except TimeoutError:
            raise BodyTimeout from None


class BodyDeadline:
    """ASGI middleware: a body that does not come in time is a BodyTimeout where it is read, and one
    that there is no room for is refused there. Its bytes count until its request is over. A large
    one beyond its workspace's rate is left in the socket for a while."""

    def __init__(
        self, app: ASGIApp, request_seconds: float, bodies: BodyBytes, large: LargeBodies
    ) -> None:
        self.app = app
        self._seconds = request_seconds
        self._bodies = bodies
        self._large = large

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = asyncio.get_running_loop().time() + self._seconds
        is_whole = False
        declared, taken = _declared_bytes(scope), _Taken(self._bodies, self._large)

        async def receive_in_time() -> Any:
            nonlocal deadline, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message: Any = await receive()
            except TimeoutError:
                raise BodyTimeout from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            if num_bytes := len(message.get("body", b"")):
                workspace = getattr(scope.get("user"), "workspace", None) or ""
                wait = taken.grow(workspace, num_bytes, declared)
                if wait.seconds:
                    await asyncio.sleep(wait.seconds)
                if wait.refusal is not None:
                    raise wait.refusal
                deadline += num_bytes / BODY_BYTES_PER_SECOND + wait.seconds
            is_whole = not message.get("more_body", False)
            return message

        try:
            await self.app(scope, receive_in_time, send)
        finally:
            taken.give_back()


class _Taken:
    """The bytes of one body in `BodyBytes`: all that its head declares when the first come."""

    def __init__(self, bodies: BodyBytes, large: LargeBodies) -> None:
        self._bodies = bodies
        self._large = large
        self._workspace = ""
        self._num_bytes = self.num_read = 0

    def grow(self, workspace: str, num_bytes: int, declared: int) -> Wait:
        """Raise as `BodyBytes.take`. Return how long to leave the rest in the socket."""
        self.num_read += num_bytes
        before = self._num_bytes
        more = max(declared, self.num_read) - before
        if more <= 0:
            return Wait()
        self._bodies.take(workspace, more)
        self._workspace = workspace
        self._num_bytes += more
        if self._num_bytes <= LARGE_BYTES:
            return Wait()
        uncounted = more if before > LARGE_BYTES else self._num_bytes
        return self._large.take(workspace, uncounted)

    def give_back(self) -> None:
        if self._num_bytes:
            self._bodies.give_back(self._workspace, self._num_bytes)


def _declared_bytes(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < _MAX_DIGITS:
            return int(value)
    return 0
