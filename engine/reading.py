"""How both servers read from a connection, so that no client's bytes keep others waiting.

uvicorn parses at once all that a read brought. It reads a body that nobody asked for, and goes on
reading behind an answer that did not need the body. Here a read is parsed in pieces, with the other
connections' work in between. A body is parsed when the application asks for it. The framing of a
body has a bound by its content. A connection that ends is read for a short while without being
parsed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
"""The most headers of a head, and the most of its trailers."""
MAX_PIPELINED = 8
"""The most requests on a connection that wait for the answer to an earlier one. One packet of 256
KiB may bring thousands, and each answer lets the next packet in."""
PIECE_BYTES = 4096
PARTS_A_ROUND = 256
"""The parts (headers, pieces of bodies) that are parsed before the loop serves others. They take
less than 1 ms."""
SMALL_READ_BYTES = 1024
FREE_SMALL_READS = 8
SMALL_READ_SECONDS = 0.002
"""The pause behind each further small read of one request. Small packets that come in the pause are
parsed together. So packets of a byte cost their sender as much as the server."""
FREE_FRAMING_BYTES = 16 * 1024
"""The bytes of framing that any chunked body may have. Go's net/http allows as many
(CVE-2023-39326)."""
FRAMING_SHARE = 0.5
"""Further bytes of framing for each byte of content. A chunk of 16 bytes has 6 of them."""
FRAMING_TOLD = "transfer-encoding: the body has too little content for so many or so long chunks"
LINGER_SECONDS = 2.0
LINGER_BYTES = 4 * 1024 * 1024
"""The most bytes that are read and dropped behind a last answer. A server that closes while a
client still sends resets the connection, and the client may lose the answer (RFC 9112, 9.6)."""


@dataclass(slots=True)
class Framing:
    """Counts the bytes of a chunked body that are no content: sizes, extensions, line breaks.

    Such bytes count once content comes behind them. Until then they may be trailers, which have
    another bound.
    """

    num_content: int = 0
    num_framing: int = 0
    _num_waiting: int = 0

    def count(self, num_bytes: int, num_content: int) -> None:
        """Note `num_bytes` of the body, of which `num_content` were content."""
        self._num_waiting += num_bytes - num_content
        if num_content:
            self.num_content += num_content
            self.num_framing += self._num_waiting
            self._num_waiting = 0

    @property
    def is_excessive(self) -> bool:
        return self.num_framing > FREE_FRAMING_BYTES + FRAMING_SHARE * self.num_content


class LingeringTransport(asyncio.Transport):
    """A transport that closes in two steps if the client may still be sending (`has_more`).

    It ends its own side. Then it drops all that comes until the client ends too, for at most
    LINGER_SECONDS.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.has_more = False
        self._transport = transport
        self._loop = loop
        self._is_lingering = False
        self._num_dropped = 0
        self._timer: asyncio.TimerHandle | None = None

    def drop(self, num_bytes: int) -> None:
        """Note bytes that came and that nobody will read."""
        self._num_dropped += num_bytes
        if self._num_dropped > LINGER_BYTES:
            self.abort()

    def end(self) -> None:
        """The connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        if self.is_closing():
            return
        if not self.has_more:
            self._transport.close()
            return
        self._is_lingering = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._timer = self._loop.call_later(LINGER_SECONDS, self._transport.abort)

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def write(self, data: Any) -> None:
        if not self._is_lingering:
            self._transport.write(data)

    def pause_reading(self) -> None:
        if not self.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closing():
            self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


class _SteadyFlow(FlowControl):
    """uvicorn's flow control, for bytes that were read and are not parsed yet. They come first."""

    def __init__(self, transport: asyncio.Transport, go_on: Callable[[], None]) -> None:
        super().__init__(transport)
        self.go_on: Callable[[], None] | None = go_on

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            if self.go_on is not None:
                self.go_on()


class SteadyProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the bounds above. Subclasses have `feed` and the refusals."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.lingering = LingeringTransport(transport, self.loop)
        super().connection_made(self.lingering)
        self._steady_flow = _SteadyFlow(self.lingering, self._go_on)
        self.flow = self._steady_flow
        self._unread = b""
        self._next: asyncio.Handle | None = None
        self._is_reading = False
        # Bytes since the last complete part. They are a head's, trailers', or no part's.
        self.loose_bytes = 0
        self._num_parts = 0
        self._num_small_reads = 0
        # Of the request whose body is read now.
        self._framing: Framing | None = None
        self._num_content = 0
        self._has_length = False
        self._waits_for_application = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of all that leads back here: a cycle is memory until Python's collector comes."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        super().connection_lost(exc)
        self.lingering.end()
        self._steady_flow.go_on = None
        self._unread = b""
        self.pipeline.clear()
        self.headers = []
        self.cycle = None  # type: ignore[assignment]
        self.scope = None  # type: ignore[assignment]

    def feed(self, piece: bytes) -> None:
        """Parse a piece."""
        raise NotImplementedError

    def refuse_framing(self) -> None:
        """Answer with FRAMING_TOLD, and close."""
        raise NotImplementedError

    def refuse_headers(self) -> NoReturn:
        """There are more than MAX_HEADERS. Raise HttpParserError, which the parser passes on."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self.lingering.drop(len(data))
            return
        if len(data) < SMALL_READ_BYTES:
            self._num_small_reads += 1
        self._unread = self._unread + data if self._unread else data
        self._go_on()

    def _go_on(self) -> None:
        if self._is_reading or self._next is not None:
            return
        if self._unread:
            self._read()
        else:
            self.transport.resume_reading()

    def _read(self) -> None:
        """Parse what was read, up to PARTS_A_ROUND, and come back for the rest."""
        self._next = None
        self._is_reading = True
        most = self._num_parts + PARTS_A_ROUND
        data = self._unread
        begin = 0
        while begin < len(data) and self._num_parts < most:
            if self.flow.read_paused or self.transport.is_closing():
                break
            # A body of a known length is one call of the parser however long it is.
            end = len(data) if self._has_length else begin + PIECE_BYTES
            self._feed_counted(data[begin:end])
            begin = end
        self._is_reading = False
        is_closing = self.transport.is_closing()
        self._unread = b"" if is_closing else data[begin:]
        if self._unread:
            self.transport.pause_reading()
        if is_closing or self.flow.read_paused:
            return
        if self._unread:
            self._next = self.loop.call_soon(self._read)
        elif data and self._num_small_reads > FREE_SMALL_READS:
            self.transport.pause_reading()
            self._next = self.loop.call_later(SMALL_READ_SECONDS, self._read)
        else:
            self.transport.resume_reading()

    def _feed_counted(self, piece: bytes) -> None:
        framing = self._framing
        num_before = self._num_content
        self.loose_bytes += len(piece)
        self.feed(piece)
        if framing is None or framing is not self._framing:
            return
        framing.count(len(piece), self._num_content - num_before)
        if framing.is_excessive and not self.transport.is_closing():
            self.refuse_framing()

    # httptools calls these.

    def on_message_begin(self) -> None:
        self._num_parts += 1
        self.lingering.has_more = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self.refuse_headers()

    def on_headers_complete(self) -> None:
        headers = dict(self.headers)
        self._num_parts += len(self.headers)
        super().on_headers_complete()
        # Trailers arrive as headers too. A list of their own keeps them out of the request's.
        self.headers = []
        is_chunked = b"transfer-encoding" in headers
        has_body = is_chunked or headers.get(b"content-length", b"0") != b"0"
        self._framing = Framing() if is_chunked else None
        self._has_length = not is_chunked
        if has_body and not self.flow.read_paused:
            self._waits_for_application = True
            self.flow.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._num_parts += 1
        self._num_content += len(body)
        self.loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_parts += len(self.headers)
        self.loose_bytes = 0
        self.lingering.has_more = False
        self._num_small_reads = 0
        self._framing = None
        self._has_length = False
        if self._waits_for_application:
            self._waits_for_application = False
            self.flow.resume_reading()
        super().on_message_complete()
