"""The engine's uvicorn: bounds on what a connection may bring, and the end of the server.

uvicorn bounds neither heads, nor the requests that wait behind another one, nor connections. It
waits for a request for ever. A caller without the secret can't keep a gateway out: its connections
make way, and its requests get a part of the loop's time (`engine/places.py`).
"""

import asyncio
import socket
import sys
from functools import partial
from typing import Any, NoReturn

import httptools
import msgspec
import uvicorn
from litestar import Litestar
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from engine.asgi import (
    BACKLOG,
    AccessLog,
    Application,
    SteadyServer,
    UntilGrace,
    num_descriptors,
    raise_descriptor_limit,
    send_whole,
)
from engine.places import (
    Connections,
    Places,
    RefusedConnections,
    Split,
    Strangers,
    group_of,
    split,
)
from engine.protocol import STATUS_OF, ErrorReply
from engine.reading import (
    FRAMING_TOLD,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    SteadyProtocol,
)
from engine.serve.health import ServedEngine
from engine.serve.secret import Secret
from engine.serve.server import note_call
from engine.settings import Settings

HEAD_SECONDS = 30.0
"""The most time for a whole head. It begins with the connection. On a used connection it begins
with the head's first byte."""
BODY_SECONDS = 60.0
"""The most time between two bytes of a body. Both bounds are checked every HEAD_SECONDS."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than a gateway keeps idle connections (30 s), so that the gateway closes first."""
NO_PLACE_TOLD = "too many connections"
RETRY_SECONDS = 1
"""The `retry-after` for a connection that lost its place, or got none."""


FAILED_SECONDS = 3.0
"""How long a failed engine still says why it failed. Gateways look each second."""


def engine_places(parts: Split) -> Places:
    """The places of all connections to one engine.

    A connection that showed the secret counts for its address, which is a gateway's. `parts` says
    how the process's descriptors are split.
    """
    connections = Connections(parts.places, parts.places, part_of_holder=1.0)
    return Places(connections, RefusedConnections(parts.sockets))


class BoundedProtocol(SteadyProtocol):
    """A connection with bounds. uvicorn's setting `http` is a partial of it with the places."""

    def __init__(self, places: Places, **options: Any) -> None:
        super().__init__(**options)
        self.places = places

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Since when a head is awaited. None: no head is.
        self._head_since: float | None = self.loop.time()
        # When the last byte of an unfinished body came. None: no body is unfinished.
        self._body_at: float | None = None
        self._look = self.loop.call_later(HEAD_SECONDS, self._end_if_late)
        self._refusal = ""
        address = self.client[0] if self.client else ""
        if not self.places.enter(self, address, len(self.connections)):
            self._refuse_place()

    def evict(self) -> None:
        """Give this connection's place to another one.

        A request that has no answer yet is answered with 503. So is a new connection, because its
        first request may be on its way.
        """
        cycle = self.cycle
        is_answered = cycle is not None and cycle.response_complete
        is_answering = cycle is not None and cycle.response_started and not is_answered
        if is_answered and not self.pipeline and self._head_since is None and self._body_at is None:
            self.transport.close()
        elif self.transport.is_closing() or self.pipeline or is_answering:
            self.transport.abort()
        else:
            self._refuse_place()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        self.places.leave(self, self.transport)
        super().connection_lost(exc)

    def feed(self, piece: bytes) -> None:
        # uvicorn's own `data_received` parses, and answers what is no HTTP.
        HttpToolsProtocol.data_received(self, piece)
        if self.loose_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refusal = f"the headers have more than {MAX_HEAD_BYTES} bytes"
            self.send_400_response("")

    def refuse_framing(self) -> None:
        self._refusal = FRAMING_TOLD
        self.send_400_response("")

    def refuse_headers(self) -> NoReturn:
        self._refusal = f"there are more than {MAX_HEADERS} headers"
        raise httptools.HttpParserError  # uvicorn answers with `send_400_response`

    def on_response_complete(self) -> None:
        is_whole = self.transport.is_closing() or self._body_at is None or bool(self.pipeline)
        is_last = not is_whole and self.cycle.response_complete
        super().on_response_complete()
        if is_last:
            self.transport.close()  # nobody will read the rest of its body

    def on_message_begin(self) -> None:
        if self._head_since is None:
            self._head_since = self.loop.time()
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def on_headers_complete(self) -> None:
        self._body_at = self.loop.time()
        self._head_since = None
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = f"more than {MAX_PIPELINED} requests wait on the connection"
            raise httptools.HttpParserError  # uvicorn answers with `send_400_response`
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_at = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_at = None
        super().on_message_complete()

    def _end_if_late(self) -> None:
        now = self.loop.time()
        cycle = self.cycle
        self._look = self.loop.call_later(HEAD_SECONDS, self._end_if_late)
        is_answering = cycle is not None and not cycle.response_complete
        if self.pipeline or (is_answering and (cycle.response_started or self._body_at is None)):
            return  # closing would cut the answer to a whole request
        if self._head_since is not None and now - self._head_since >= HEAD_SECONDS:
            self._refusal = f"the head did not come within {HEAD_SECONDS:g} seconds"
            self.send_400_response("")
        elif self._body_at is not None and now - self._body_at >= BODY_SECONDS:
            if not self.flow.read_paused:
                self._refusal = f"no byte of the body came for {BODY_SECONDS:g} seconds"
                self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Answer in the protocol's envelope, unless the request has an answer, and close."""
        if self.cycle is None or not self.cycle.response_started:
            message = self._refusal or "the request is not valid HTTP"
            self._say(400, ErrorReply("invalid_request", message))
        self.lingering.has_more = True
        self.transport.close()

    def _refuse_place(self) -> None:
        retry_after = b"retry-after: %d\r\n" % RETRY_SECONDS
        # 503 is a status that every caller knows. 529 is the protocol's own.
        self._say(503, ErrorReply("overloaded", NO_PLACE_TOLD), retry_after)
        self.lingering.has_more = True
        self.transport.close()
        self.places.note_refusal(self.transport)

    def _say(self, status: int, reply: ErrorReply, more: bytes = b"") -> None:
        body = msgspec.json.encode(reply)
        head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        head += more + b"connection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head + body)


def front(app: Application, secret: Secret, connections: Connections) -> Application:
    """The application behind the check of the secret.

    A connection is proved if its last request showed the secret. Requests without the secret wait
    for their turn.
    """
    strangers = Strangers()

    async def served(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        connection: BoundedProtocol = scope["state"]["connection"]
        client = scope["client"]
        address = client[0] if client else ""
        if secret.is_shown(scope["headers"]):
            connections.prove(connection, group_of(address))
            with strangers.known:
                await app(scope, receive, send)
        else:
            connections.doubt(connection)
            await strangers.wait(address)
            await app(scope, receive, send)

    return served


async def _answer_stopping(scope: Any, send: Any) -> None:
    body = msgspec.json.encode(ErrorReply("not_ready", "the engine stops"))
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "retry-after": str(RETRY_SECONDS),
    }
    await send_whole(send, STATUS_OF["not_ready"], headers, body)


class Server(SteadyServer):
    """The engine's HTTP server. `host` must be the one that `app` was made with.

    On SIGTERM or SIGINT nothing new is accepted. Event streams end at once, since they would never
    end by themselves. Running generations have `grace_seconds`, then they are cut off. A call that
    has no answer by then gets `not_ready`.

    After an error of the engine all running calls are cut off at once. `/readyz` says why for
    FAILED_SECONDS more, so that gateways learn the reason.
    """

    def __init__(self, app: Litestar, host: ServedEngine, settings: Settings) -> None:
        self._engine = host
        raise_descriptor_limit()
        parts = split(num_descriptors(sys.maxsize))
        places = engine_places(parts)
        served: Application = app
        if settings.log_level == "debug":
            served = AccessLog(app, note_call)
        secret = Secret(settings.secret.get_secret_value())
        options: dict[str, Any] = {
            "host": settings.host,
            "port": settings.port,
            "http": partial(BoundedProtocol, places),
            "backlog": BACKLOG,
            "log_level": "warning",
            "server_header": False,
            "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
            "timeout_graceful_shutdown": settings.grace_seconds,
        }
        served = UntilGrace(front(served, secret, places.connections), _answer_stopping)
        super().__init__(uvicorn.Config(served, **options))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.end_events()
        if self._engine.is_ending:
            self.config.timeout_graceful_shutdown = 0
            for task in self.server_state.tasks:
                task.cancel()
            await asyncio.sleep(FAILED_SECONDS)
        await super().shutdown(sockets)
