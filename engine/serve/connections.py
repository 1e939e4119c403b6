"""The engine's uvicorn, with bounds on what a connection may bring, and how it comes to an end.

uvicorn bounds neither heads nor the requests that wait behind another one nor the connections,
waits for a request for ever, and does not ask for the secret.
"""

import asyncio
import socket
import sys

import httptools
import msgspec
import uvicorn
from litestar import Litestar
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from engine.asgi import AccessLog, TrimmingServer, num_descriptors, raise_descriptor_limit
from engine.protocol import ErrorReply
from engine.reading import FRAMING_TOLD, SteadyProtocol
from engine.serve.health import ServedEngine
from engine.serve.server import note_call
from engine.settings import Settings

MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 8
"""Requests that may wait on a connection for the answer to the one before them. Gateways send none.

One packet of 256 KiB may bring thousands, and each answer lets the next packet in.
"""
HEAD_SECONDS = 30.0
"""A head is whole so long after its connection began, or after its first byte on a used one."""
BODY_SECONDS = 60.0
"""Between two bytes of a body. Looked at every HEAD_SECONDS, as is the head's time."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than a gateway keeps idle connections (30 s), since it must be the one who closes."""
DESCRIPTORS_SHARE = 0.75
"""Of the process's descriptors, for connections. The store and workers need some too."""


def max_connections() -> int:
    return int(num_descriptors(sys.maxsize) * DESCRIPTORS_SHARE)


class BoundedProtocol(SteadyProtocol):
    """For uvicorn's `http` setting."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # When a head was begun to be waited for, and the last byte of a body that is not whole.
        self._head_since: float | None = self.loop.time()
        self._body_at: float | None = None
        self._look = self.loop.call_later(HEAD_SECONDS, self._end_if_late)
        # Bytes since the last complete part: of a head, of trailers, or of nothing.
        self._loose_bytes = 0
        self._refusal = ""
        if len(self.connections) > max_connections():
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def feed(self, piece: bytes) -> None:
        self._loose_bytes += len(piece)
        # uvicorn's own `data_received` parses, and answers what is no HTTP.
        HttpToolsProtocol.data_received(self, piece)
        if self._loose_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refusal = f"the headers have more than {MAX_HEAD_BYTES} bytes"
            self.send_400_response("")

    def refuse_framing(self) -> None:
        self._refusal = FRAMING_TOLD
        self.send_400_response("")

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

    def on_headers_complete(self) -> None:
        self._body_at = self.loop.time()
        self._head_since = None
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = f"more than {MAX_PIPELINED} requests wait on the connection"
            raise httptools.HttpParserError  # uvicorn answers with `send_400_response`
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_at = self.loop.time()
        self._loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._loose_bytes = 0
        self._body_at = None
        super().on_message_complete()

    def _end_if_late(self) -> None:
        now = self.loop.time()
        cycle = self.cycle
        self._look = self.loop.call_later(HEAD_SECONDS, self._end_if_late)
        is_answering = cycle is not None and not cycle.response_complete
        if self.pipeline or (is_answering and (cycle.response_started or self._body_at is None)):
            return  # the end of the connection would end the answer to a whole request
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
            reply = ErrorReply("invalid_request", self._refusal or "the request is not valid HTTP")
            body = msgspec.json.encode(reply)
            head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            self.transport.write(STATUS_LINE[400] + head + b"connection: close\r\n\r\n" + body)
        self.lingering.has_more = True
        self.transport.close()


class Server(TrimmingServer):
    """`host` is the one that `app` was made with.

    On SIGTERM or SIGINT nothing new is accepted. Event streams end at once, since they would never
    end by themselves. Running generations have `grace_seconds`; then they are cut off.
    """

    def __init__(self, app: Litestar, host: ServedEngine, settings: Settings) -> None:
        self._engine = host
        raise_descriptor_limit()
        super().__init__(
            uvicorn.Config(
                AccessLog(app, note_call) if settings.log_level == "debug" else app,
                host=settings.host,
                port=settings.port,
                http=BoundedProtocol,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=settings.grace_seconds,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.end_events()
        await super().shutdown(sockets)
