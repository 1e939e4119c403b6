"""Bounds on a client's connection: the size and time of a request, and the time to read the answer.

uvicorn bounds none of this, and an ASGI application is called only after a whole head. So the
protocol (`guarded`) bounds heads and ends connections whose client has stopped reading. Bodies are
bounded where they are read (`bodies.py`). A request that is wrong is refused behind the answers to
those before it, and a client that has ended its side still gets them (`half_closed.py`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
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
from gateway.http.bodies import HAS_COME
from gateway.http.errors import reply_without_route
from gateway.http.framing import check_head, target_of
from gateway.http.half_closed import CONTINUE, FILLER, HalfClosed
from gateway.http.held_head import HOLD_HEAD, hold_head
from gateway.http.old_http import Unchunked
from gateway.http.parser import RequestParser
from gateway.http.presence import WHEN_GONE

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_PIPELINED = 8
"""Requests that may wait on a connection for the answer to the one before them.

One packet of 256 KiB may bring 14,000 short requests, and each is made ready on the event loop.
"""
FREE_PIECES = 1024
LEAST_PIECE_BYTES = 16
"""A body may come in so many pieces of any size; beyond that they have so many bytes on average.

A chunk of one byte costs the event loop as much as one of a thousand.
"""

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
    parser: RequestParser  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.is_repeated = False
        self.parser = RequestParser(self)
        self._is_admitted = True
        # The request that is answered. uvicorn knows the one that came last.
        self._answered: RequestResponseCycle = None  # type: ignore[assignment]
        # Bytes since the last complete part: of a head, of trailers, or of nothing.
        self._loose_bytes = 0
        self._is_in_body = False
        self._pieces: list[bytes] = []
        self._num_pieces = self._body_bytes = 0
        self._refusal: GatewayError | None = None
        # A refusal that waits for the answers before it.
        self._last_words: GatewayError | None = None
        # Nothing that comes from now on is a request.
        self._is_deaf = False
        self._half_closed: HalfClosed | None = None
        self._stall: asyncio.TimerHandle | None = None
        # For the rest of a body whose request has its answer.
        self._rest: asyncio.TimerHandle | None = None
        self._is_gone = False
        self._when_gone: list[Callable[[], object]] = []
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
        state = self.scope["state"]
        state["prove"], state[WHEN_GONE] = self._prove, self.when_gone
        state[HAS_COME] = self._has_come

    def _prove(self) -> None:
        self.bounds.connections.prove(self)

    def when_gone(self, tell: Callable[[], object]) -> Callable[[], None]:
        """Call `tell` once the client has left, or now if it has. The result takes that back."""
        if self._is_gone or (self._half_closed is not None and self._is_beyond_probes):
            tell()
            return lambda: None
        # Behind a long body reading is paused, and then nobody would see the connection's end.
        self.flow.resume_reading()
        self._when_gone.append(tell)
        return partial(self._when_gone.remove, tell)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_head()
        self._disarm_stall()
        self._disarm_rest()
        if self._half_closed is not None:
            self._half_closed.cancel()
        self.bounds.connections.leave(self)
        answered = self._answered
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)
        self._is_gone = True
        for tell in tuple(self._when_gone):
            tell()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open, for answers that are still to be sent."""
        if self._is_in_body and self.pipeline:
            self._drop_last()
        if self.is_idle or self._is_in_body or self.transport.is_closing():
            return False
        if self._half_closed is None:
            self._is_deaf = True
            self._disarm_head()
            self.cycle.keep_alive = False
            self._half_closed = HalfClosed(self.transport, self.loop, self._probe)
            if self._is_beyond_probes:
                for tell in tuple(self._when_gone):
                    tell()
        return True

    @property
    def _is_beyond_probes(self) -> bool:
        """Whether nothing may be sent now to a client that has ended its side."""
        answered = self._answered
        return (
            answered is not None
            and not answered.response_started
            and answered.scope["http_version"] == "1.0"
        )

    def _probe(self) -> bytes:
        """Bytes that mean nothing to the client where its answer stands; none if there are none."""
        answered = self._answered
        if answered is None or answered.response_complete or self._is_beyond_probes:
            return b""
        if not answered.response_started:
            return CONTINUE
        filler: bytes = answered.scope["state"].get(FILLER, b"")
        if filler and answered.chunked_encoding:
            return b"%x\r\n%b\r\n" % (len(filler), filler)
        return filler

    def data_received(self, data: bytes) -> None:
        if not self._is_admitted:
            return
        self._loose_bytes += len(data)
        if self._is_deaf:
            if self._loose_bytes > MAX_HEAD_BYTES:
                self.transport.close()
            return
        super().data_received(data)
        if self._is_deaf or self.transport.is_closing():
            return
        try:
            self._pass_body_on()
        except httptools.HttpParserError:
            return self.send_400_response("")
        if self._loose_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge())
        elif self._loose_bytes and not self._is_in_body and self._head is None:
            self._head = self._later(self._head_is_late)

    def on_headers_complete(self) -> None:
        if self.parser.is_to_repeat:
            self.is_repeated = True
            return
        self._disarm_head()
        self._num_pieces = self._body_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse_pipelined()
        size = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.headers) > MAX_HEADERS or size + len(self.url) > MAX_HEAD_BYTES:
            self._refusal = HeadTooLarge()
            raise httptools.HttpParserError  # uvicorn answers with `send_400_response`
        method, version = self.parser.get_method(), self.parser.get_http_version()
        try:
            check_head(method, version, self.headers)
            self.url, host = target_of(method, self.url)
        except InvalidRequest as refusal:
            self._refusal = refusal
            raise httptools.HttpParserError from None
        if host is not None:
            self.headers[:] = [(b"host", host), *(h for h in self.headers if h[0] != b"host")]
        if version == "1.0":
            self.expect_100_continue = False  # RFC 9110, 10.1.1
        super().on_headers_complete()
        self._is_in_body = True
        # Trailers arrive as headers too. A list of their own keeps them out of the request's
        # headers.
        self.headers = []
        if self.pipeline:
            # uvicorn stops reading here. Then nobody would see that the client of the answer before
            # has left.
            self.flow.resume_reading()

    def _has_come(self) -> bool:
        """Whether the body of the request that is answered is there, whole."""
        return not self._answered.more_body

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        cycle.scope["state"][HOLD_HEAD] = partial(hold_head, cycle)
        if cycle.scope["http_version"] == "1.0":
            app = Unchunked(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """What came in one packet is joined once: uvicorn copies all that waits for each piece."""
        self._loose_bytes = 0
        self._pieces.append(body)
        self._num_pieces += 1
        self._body_bytes += len(body)
        if self._num_pieces > FREE_PIECES + self._body_bytes // LEAST_PIECE_BYTES:
            self._refusal = InvalidRequest(
                f"the body comes in more than {FREE_PIECES:,} chunks of less than "
                f"{LEAST_PIECE_BYTES} bytes on average"
            )
            raise httptools.HttpParserError

    def _pass_body_on(self) -> None:
        if not self._pieces:
            return
        body = b"".join(self._pieces)
        self._pieces.clear()
        if self.pipeline and len(self.cycle.body) + len(body) > HIGH_WATER_LIMIT:
            self._refuse_pipelined()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.is_repeated:
            return
        self._pass_body_on()
        if len(self.headers) > MAX_HEADERS:
            self._refusal = HeadTooLarge()
            raise httptools.HttpParserError
        self._loose_bytes, self._is_in_body = 0, False
        self._disarm_rest()
        if not self.cycle.keep_alive:
            self._is_deaf = True  # RFC 9112, 9.6
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_body and self.cycle.response_complete:
            # The answer did not wait for the body. The rest is read and dropped, until the
            # deadline.
            self._rest = self._later(self._rest_is_late)
        is_last = self.cycle.response_complete and not self.pipeline
        if is_last and self._last_words is not None and not self.transport.is_closing():
            self._say(self._last_words, is_heard=True)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._disarm_stall()
        self._stall = self.loop.call_later(self.bounds.stall_seconds, self._reader_is_late)

    def resume_writing(self) -> None:
        self._disarm_stall()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        if not self._is_deaf:
            self._refuse(self._refusal or InvalidRequest("the request is not valid HTTP"))

    def _refuse_pipelined(self) -> NoReturn:
        self._refusal = Overloaded("too much is sent at once on a connection")
        raise httptools.HttpParserError  # uvicorn answers with `send_400_response`

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

    def _disarm_rest(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _rest_is_late(self) -> None:
        self._rest = None
        self.transport.close()

    def _reader_is_late(self) -> None:
        """The client does not read, so the turn ends as if the client had hung up."""
        self.bounds.refused("stalled_reader")
        self.transport.abort()

    def _refuse(self, failure: GatewayError) -> None:
        """Answer on the bare connection and close it, behind the answers that come before."""
        self._is_deaf = True
        self._disarm_head()
        if self._is_in_body and self.pipeline:
            self._drop_last()
        if self._is_in_body:
            self._say(failure, is_heard=not self.cycle.response_started)
        elif self.is_idle or isinstance(failure, Overloaded):
            self._say(failure, is_heard=self.is_idle)
        else:
            self._last_words = failure

    def _drop_last(self) -> None:
        """Forget the last request, whose body never comes whole. It waits behind another one."""
        self.pipeline.popleft()
        self.cycle = self.pipeline[0][0] if self.pipeline else self._answered
        self._is_in_body = False

    def _say(self, failure: GatewayError, *, is_heard: bool) -> None:
        reason, made = _REASONS.get(type(failure), "malformed"), None
        if is_heard:
            url = getattr(self, "url", b"").decode("latin-1")
            made, headers, body = reply_without_route(failure, url)
            for name, value in self.server_state.default_headers:
                headers[name.decode()] = value.decode()
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            # The other dialect's 529 is no status that a proxy knows.
            status = STATUS_LINE[503 if isinstance(failure, Overloaded) else failure.status]
            self.transport.write(status + head.encode() + b"\r\n" + body)
        self.bounds.refused(reason, made)
        self.transport.close()
