"""Bounds on a client's connection: the size and time of a request, and the time to read the answer.

uvicorn bounds none of this, and an ASGI application is called only after a whole head. Bodies are
bounded where they are read (`bodies.py`). A request that is wrong is refused behind the answers to
those before it. What its head must say is in `framing.py`.
"""

import asyncio
from dataclasses import dataclass
from typing import NoReturn, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from gateway.base.errors import (
    GatewayError,
    HeadTimeout,
    HeadTooLarge,
    InvalidRequest,
    Overloaded,
)
from gateway.http.admitted import Connections
from gateway.http.errors import reply_without_route
from gateway.http.framing import check_head, target_of

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_PIPELINED = 8
"""Requests that may wait on a connection for the answer to the one before them."""

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
    bounds: ConnectionLimits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn's own parser takes what comes behind `connection: close` for a request.
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        # The request that is answered. uvicorn's `cycle` is the one that came last.
        self._answered: RequestResponseCycle | None = None
        # Bytes since the last complete part: of a head, of trailers, or of nothing.
        self._loose_bytes = self._head_bytes = 0
        self._is_in_body = False
        # Nothing that comes from now on is a request.
        self._is_deaf = False
        self._failure: GatewayError | None = None
        # A refusal that waits for the answers before it.
        self._pending: GatewayError | None = None
        # For a head, or for the rest of a body whose request has its answer.
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._arm()
        address = self.client[0] if self.client else ""
        if not self.bounds.connections.enter(self, address):
            self._refuse(Overloaded("too many connections", retry_after=1))

    def evict(self) -> None:
        """Another connection needs its place."""
        self.bounds.refused("made_way")
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.resume_writing()
        self.bounds.connections.leave(self)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._loose_bytes += len(data)
        if self._is_deaf:
            if self._loose_bytes > MAX_HEAD_BYTES:
                self.transport.close()
            return
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._is_deaf or self.transport.is_closing():
            return
        if self._loose_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge())
        elif self._loose_bytes and not self._is_in_body and self._deadline is None:
            self._arm()

    def _feed(self, data: bytes) -> None:
        """Parse. A wish for another protocol is ignored (RFC 9110, 7.8).

        Java's default client asks so in every first request (`Upgrade: h2c`), and httptools takes
        the body for the other protocol's. So such a head is parsed again without its wish.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                lines = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1"]
                lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
                self.parser = httptools.HttpRequestParser(self)
                data = b"\r\n".join([*lines, b"", data[upgrade.args[0] :]])

    # httptools calls these. An exception in one is an HttpParserError of `feed_data`.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self.scope["state"]["show_key"] = self._show_key

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value) + 4
        is_long = self._head_bytes + len(self.url) > MAX_HEAD_BYTES
        if is_long or len(self.headers) > MAX_HEADERS:
            self._fail(HeadTooLarge())

    def on_headers_complete(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if self._is_upgrade():
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(Overloaded("too much is sent at once on a connection"))
        try:
            check_head(method, version, self.headers)
            self.url, host = target_of(method, self.url)
        except InvalidRequest as refusal:
            self._fail(refusal)
        if host is not None:
            self.headers[:] = [(b"host", host), *(h for h in self.headers if h[0] != b"host")]
        self._disarm()
        super().on_headers_complete()
        self._is_in_body, self._head_bytes = True, 0
        # Trailers arrive as headers too. A list of their own keeps them out of the request's.
        self.headers = []
        if not self.pipeline:
            self._answered = self.cycle

    def on_body(self, body: bytes) -> None:
        self._loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade():
            return
        self._loose_bytes, self._is_in_body = 0, False
        self._disarm()
        self._is_deaf = not self.cycle.keep_alive  # RFC 9112, 9.6
        super().on_message_complete()

    # uvicorn calls these.

    def on_response_complete(self) -> None:
        if self._pending is not None and len(self.pipeline) <= self._is_in_body:
            self._say(self._pending)
            return
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if self._is_in_body and not self.pipeline and self.cycle.response_complete:
            self._arm()  # the answer did not wait for the body; the rest is read and dropped

    def send_400_response(self, msg: str) -> None:
        if not self._is_deaf:
            self._refuse(self._failure or InvalidRequest("the request is not valid HTTP"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self.bounds.stall_seconds, self._reader_is_late)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def _is_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _show_key(self, is_valid: bool) -> None:
        connections = self.bounds.connections
        (connections.prove if is_valid else connections.doubt)(self)

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self.bounds.request_seconds, self._is_late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        self._deadline = None
        if self._loose_bytes and not self._is_in_body:
            self._refuse(HeadTimeout())
        else:
            self.transport.close()

    def _reader_is_late(self) -> None:
        """The client does not read, so the turn ends as if the client had hung up."""
        self.bounds.refused("stalled_reader")
        self.transport.abort()

    def _fail(self, failure: GatewayError) -> NoReturn:
        self._failure = failure
        raise httptools.HttpParserError

    def _refuse(self, failure: GatewayError) -> None:
        """Answer and close, behind the answers that come before."""
        self._is_deaf = True
        self._disarm()
        answered = self._answered
        if answered is None or (answered.response_complete and not self._is_in_body):
            self._say(failure)
        elif self._is_in_body and not self.pipeline:  # of the request that is answered
            self._say(None if answered.response_started else failure)
        else:
            self._pending = failure

    def _say(self, failure: GatewayError | None) -> None:
        made = None
        if failure is not None:
            url = self.url.decode("latin-1")
            made, headers, body = reply_without_route(failure, url)
            for name, value in self.server_state.default_headers:
                headers[name.decode()] = value.decode()
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            # The other dialect's 529 is no status that a proxy knows.
            status = STATUS_LINE[503 if isinstance(failure, Overloaded) else failure.status]
            self.transport.write(status + head.encode() + b"\r\n" + body)
        reason = "malformed" if failure is None else _REASONS.get(type(failure), "malformed")
        self.bounds.refused(reason, made)
        self.transport.close()
