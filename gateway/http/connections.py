"""Bounds on clients' connections: how many may stay, and the size and time of a request.

uvicorn bounds none of this, and an ASGI application is called only after a whole head. Bodies are
bounded where they are read (`bodies.py`). A wrong request is refused after the requests before it
were answered.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from engine.places import Places
from engine.reading import FRAMING_TOLD, MAX_HEAD_BYTES, MAX_PIPELINED, SteadyProtocol
from gateway.base.errors import GatewayError, HeadTimeout, HeadTooLarge, InvalidRequest, Overloaded
from gateway.http.errors import reply_without_route

# RFC 3986, 3.2.2, and a port: a name, an IPv4 address or an IPv6 address in brackets; or nothing.
_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?\Z")
_ABSOLUTE = re.compile(rb"https?://([^/?]*)(/?)(.*)\Z", re.IGNORECASE)
SERVER = "*"
"""The target of an OPTIONS request that asks about the server, and not about a path."""


def check_head(
    method: bytes, version: str, target: bytes, headers: list[tuple[bytes, bytes]]
) -> bytes:
    """The path that a head asks for, with its query. Raise InvalidRequest for a head that must not
    be served. The target is a path, or a URL whose host replaces the header (RFC 9112, 3.2.2). A
    URL without a path has the path `/`; in an OPTIONS request it stands for the SERVER (3.2.4).
    Names of headers are in lower case. `version` is that of HTTP, such as `1.1`."""
    if version not in ("1.0", "1.1"):
        raise InvalidRequest("HTTP/1.1 and HTTP/1.0 are served, and no other version")
    if method == b"CONNECT":
        raise InvalidRequest("CONNECT: this is no proxy")
    names = [name for name, _ in headers]
    values = dict(headers)
    host = values.get(b"host")
    coding = values.get(b"transfer-encoding")
    if names.count(b"host") > 1:
        raise InvalidRequest("host: must be there once")
    if host is None and version != "1.0":
        raise InvalidRequest("host: header is required")
    if host is not None and not _HOST.match(host.strip()):
        raise InvalidRequest("host: must be a name or an address, with a port or without")
    if coding is not None and version == "1.0":
        raise InvalidRequest("transfer-encoding: HTTP/1.0 has none")
    is_twice = names.count(b"transfer-encoding") > 1
    if coding is not None and (is_twice or coding.strip().lower() != b"chunked"):
        raise InvalidRequest("transfer-encoding: must be chunked, once, and nothing else")
    if target.startswith(b"/"):
        return target
    if target == SERVER.encode():
        if method != b"OPTIONS":
            raise InvalidRequest("*: only OPTIONS may ask for it")
        return target
    absolute = _ABSOLUTE.match(target)
    if absolute is None or not absolute[1] or not _HOST.match(absolute[1]):
        raise InvalidRequest("the request target must be a path, or an http(s) URL without a user")
    host, slash, rest = absolute.groups()
    headers[:] = [(b"host", host), *(header for header in headers if header[0] != b"host")]
    return SERVER.encode() if method == b"OPTIONS" and not (slash or rest) else b"/" + rest


class TooManyConnections(Overloaded):
    def __init__(self) -> None:
        super().__init__("too many connections", retry_after=1)


_REASONS: dict[type[GatewayError], str] = {
    HeadTooLarge: "head_too_large",
    HeadTimeout: "head_timeout",
    Overloaded: "too_many",
    TooManyConnections: "too_many",
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of a connection."""

    # The time for a head, and again for its body.
    request_seconds: float
    # The time for a client to read waiting bytes.
    stall_seconds: float
    # Called with the reason of every refusal that no route sees, and with the request's id where
    # the client got one.
    refused: Callable[[str, str | None], None]
    places: Places


class GuardedProtocol(SteadyProtocol):
    """uvicorn's `http` setting is a partial of this class, with `bounds` as the first argument."""

    def __init__(self, bounds: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self.bounds = bounds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn's own parser takes what comes behind `connection: close` for a request.
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        # The request that is answered. uvicorn's `cycle` is the one that came last.
        self._answered: RequestResponseCycle | None = None
        self._is_in_body = False
        # Whether bytes that come from now on are no longer read as requests.
        self._is_deaf = False
        self._failure: GatewayError | None = None
        # A refusal that waits for the answers before it.
        self._pending: GatewayError | None = None
        # Ends the time for a head.
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        # Called when the client hangs up while a request of it is answered.
        self._on_leave: Callable[[], None] | None = None
        self.is_lost = False
        self._arm()
        address = self.client[0] if self.client else ""
        if not self.bounds.places.enter(self, address, len(self.connections)):
            self._refuse(TooManyConnections())

    def evict(self) -> None:
        """Close this connection, because another one needs its place. A request whose answer has
        not begun is answered with TooManyConnections, and its turn ends as if the client had hung
        up. A new connection gets that answer too, because its first request may be on its way."""
        answered = self._answered
        is_answered = answered is not None and answered.response_complete
        is_answering = answered is not None and answered.response_started and not is_answered
        if is_answered and not self.loose_bytes and not self._is_in_body:
            self.bounds.refused("made_way", None)
            self.transport.close()
        elif is_answering or self.transport.is_closing():
            self._cut_off("made_way")
        else:
            self._is_deaf = True
            self._disarm()
            self._say(TooManyConnections(), "made_way")

    def _cut_off(self, reason: str) -> None:
        self.bounds.refused(reason, None)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._disarm()
        self.resume_writing()
        self.bounds.places.leave(self, self.transport)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        if self._on_leave is not None:
            self._on_leave()
            self._on_leave = None
        self._answered = None
        super().connection_lost(exc)

    def watch(self, on_leave: Callable[[], None] | None) -> None:
        """Call `on_leave` if the client hangs up, until there is another watch or none. The body
        must have been read: a task that waits for the next message costs more than the answer."""
        self._on_leave = on_leave
        if on_leave is None:
            return
        if self.transport.is_closing():
            self._on_leave = on_leave()
        else:
            self.flow.resume_reading()  # else nobody notices that the client has left

    def feed(self, data: bytes) -> None:
        if self._is_deaf:
            if self.loose_bytes > MAX_HEAD_BYTES:
                self.transport.close()
            return
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        try:
            while True:
                try:
                    self.parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    # A wish for another protocol is ignored (RFC 9110, 7.8). Java's default client
                    # asks so in every first request (`Upgrade: h2c`), and httptools takes the body
                    # for the other protocol's. So the head is parsed again without its wish.
                    lines = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1"]
                    kept = [header for header in self.headers if header[0] != b"upgrade"]
                    lines += [b"%b: %b" % header for header in kept]
                    self.parser = httptools.HttpRequestParser(self)
                    data = b"\r\n".join([*lines, b"", data[upgrade.args[0] :]])
        except httptools.HttpParserError:
            self.send_400_response("")
        if not self.loose_bytes or self._is_deaf or self.transport.is_closing():
            return
        if self.loose_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge())
        elif not self._is_in_body and self._deadline is None:
            self._arm()

    def refuse_framing(self) -> None:
        self._refuse(InvalidRequest(FRAMING_TOLD))

    def refuse_headers(self) -> NoReturn:
        self._fail(HeadTooLarge())

    @property
    def is_in_last_body(self) -> bool:
        """Whether the body of the request that is answered is still coming. The answer is then the
        connection's last, because nobody will read the rest."""
        return self._is_in_body and not self.pipeline

    # httptools calls these. An exception in one is an HttpParserError of `feed_data`.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def on_headers_complete(self) -> None:
        method = self.parser.get_method()
        version = self.parser.get_http_version()
        if self._is_upgrade():
            return
        # A name and a value have four bytes beside them.
        num_bytes = sum(map(len, chain.from_iterable(self.headers))) + 4 * len(self.headers)
        if num_bytes + len(self.url) > MAX_HEAD_BYTES:
            self._fail(HeadTooLarge())
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(Overloaded("too much is sent at once on a connection"))
        try:
            self.url = check_head(method, version, self.url, self.headers)
        except InvalidRequest as refusal:
            self._fail(refusal)
        self._disarm()
        super().on_headers_complete()
        if self._on_leave is not None:
            self.flow.resume_reading()  # a request behind the watched one has paused it
        self._is_in_body = True
        if not self.pipeline:
            self._answered = self.cycle

    def on_message_complete(self) -> None:
        if self._is_upgrade():
            return
        self._is_in_body = False
        self._disarm()
        self._is_deaf = not self.cycle.keep_alive  # RFC 9112, 9.6
        super().on_message_complete()

    # uvicorn calls these.

    def on_response_complete(self) -> None:
        if self.transport.is_closing():
            super().on_response_complete()
            return
        if self._pending is not None and len(self.pipeline) <= self._is_in_body:
            self._say(self._pending)
            return
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        is_last = self.is_in_last_body and self.cycle.response_complete
        super().on_response_complete()
        if is_last:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if not self._is_deaf:
            self._refuse(self._failure or InvalidRequest("the request is not valid HTTP"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(
            self.bounds.stall_seconds, self._cut_off, "stalled_reader"
        )

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def _is_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _arm(self) -> None:
        def is_late() -> None:
            self._deadline = None
            if self.loose_bytes and not self._is_in_body:
                self._refuse(HeadTimeout())
            else:
                self.transport.close()

        self._deadline = self.loop.call_later(self.bounds.request_seconds, is_late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

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
        elif self.is_in_last_body:
            self._say(None if answered.response_started else failure)
        else:
            self._pending = failure
            self.flow.resume_reading()  # else nobody notices that the client has left

    def _say(self, failure: GatewayError | None, reason: str | None = None) -> None:
        request_id = None
        if failure is not None:
            url = self.url.decode("latin-1")
            request_id, headers, body = reply_without_route(failure, url)
            for name, value in self.server_state.default_headers:
                headers[name.decode()] = value.decode()
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            # Proxies do not know the status 529, which is Anthropic's own.
            status = STATUS_LINE[503 if isinstance(failure, Overloaded) else failure.status]
            self.transport.write(status + head.encode() + b"\r\n" + body)
        if reason is None:
            reason = "malformed" if failure is None else _REASONS.get(type(failure), "malformed")
        self.bounds.refused(reason, request_id)
        self.lingering.has_more = True
        self.transport.close()
        self.bounds.places.note_refusal(self.transport)
