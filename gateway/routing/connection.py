"""One HTTP/1.1 connection to an engine: bytes out, parsed answers in, one at a time.

httptools parses. A connection is used again only behind an answer that was read to its end.
"""

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable

import httptools

from gateway.base.errors import EngineLost, EngineTimeout, GatewayError

# The memory of one stream while its client does not read: one piece, what is made of it, and twice
# as much beside it. The rest stays with the engine. A socket that holds more is read to its end.
PIECE_BYTES = 16 * 1024
RECEIVE_BYTES = 64 * 1024
_MAX_LOOSE_BYTES = 64 * 1024
"""Bytes behind which there must be content: a head, trailers, or the sizes of chunks."""
_LOOK_AGAIN_SECONDS = 0.5
_OK = 200
_WITHOUT_BODY = (204, 304)


class Connection(asyncio.Protocol):
    """`is_open`: the transport can be used. `idle_since` is on the loop's clock."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, lost: Callable[["Connection"], None]
    ) -> None:
        self._loop = loop
        self._lost = lost
        self._answer: Answer | None = None
        self.transport: asyncio.Transport | None = None
        self.socket: socket.socket | None = None
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def ask(self, head: bytes, body: bytes, read_seconds: float) -> "Answer":
        """Send a request. Its answer fails where the connection has ended meanwhile."""
        answer = self._answer = Answer(self, self._loop, read_seconds)
        if self.transport is None or self.transport.is_closing():
            answer.fail(EngineLost())
        elif len(body) <= RECEIVE_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
        return answer

    def end(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def is_reusable(self) -> bool:
        """Whether the last request went out whole, and nothing was left behind its answer."""
        self._answer = None
        return self.is_open and not (self.transport and self.transport.get_write_buffer_size())

    # asyncio calls these.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.socket = transport.get_extra_info("socket")

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.end()  # nothing was asked
        else:
            self._answer.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None:
            self._answer.ended(error)
        self._lost(self)


class Answer:
    """One answer, as far as it has come.

    `status` is 0 until the head is there. `has_begun`: a byte of it has come.
    """

    def __init__(
        self, connection: Connection, loop: asyncio.AbstractEventLoop, read_seconds: float
    ) -> None:
        self.status = 0
        self.has_begun = False
        self._connection = connection
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._is_delimited = self._is_whole = self._is_kept = self._is_paused = False
        self._pieces: deque[bytes] = deque()
        self._num_bytes = self._loose_bytes = 0
        self._failure: GatewayError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._seconds = read_seconds
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def head(self) -> int:
        """The status. Raise EngineLost or EngineTimeout."""
        while not self.status:
            await self._next()
        return self.status

    async def piece(self) -> bytes:
        """The next bytes of the body, at most PIECE_BYTES; empty at its end. Raises as `head`."""
        while not self._pieces:
            if self._is_whole:
                return b""
            await self._next()
        piece = self._pieces.popleft()
        if len(piece) > PIECE_BYTES:
            self._pieces.appendleft(piece[PIECE_BYTES:])
            piece = piece[:PIECE_BYTES]
        elif self._pieces:
            together, size = [piece], len(piece)
            while self._pieces and size + len(self._pieces[0]) <= PIECE_BYTES:
                size += len(self._pieces[0])
                together.append(self._pieces.popleft())
            piece = b"".join(together)
        self._num_bytes -= len(piece)
        if self._is_paused and self._num_bytes <= PIECE_BYTES:
            self._pause(False)
        return piece

    def close(self) -> bool:
        """End the answer. Return whether its connection may be used again; else it has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_paused and self._connection.is_open:
            self._pause(False)
        if self._is_whole and self._is_kept and self._connection.is_reusable():
            return True
        self._connection.end()
        return False

    async def _next(self) -> None:
        """Wait for news. A silence of `read_seconds` is an EngineTimeout."""
        if self._failure is not None:
            raise self._failure
        self._began = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._check_silence)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = self._began = None

    def _check_silence(self) -> None:
        """The timer alone says only that time has passed. The socket may have unread bytes.

        It runs out once in `read_seconds` whatever comes, since a new timer for every piece costs a
        tenth of relaying it.
        """
        now = self._loop.time()
        left = (now if self._began is None else self._began) + self._seconds - now
        connected = self._connection.socket
        if left <= 0 and connected is not None and has_unread(connected):
            # The loop was busy and has not yet read bytes that arrived meanwhile.
            left = _LOOK_AGAIN_SECONDS
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_silence)
        else:
            self.fail(EngineTimeout())

    def _pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        transport = self._connection.transport
        if transport is not None and not transport.is_closing():
            transport.pause_reading() if is_paused else transport.resume_reading()

    # The connection calls these.

    def feed(self, data: bytes) -> None:
        self.has_begun, self._began = True, None
        self._loose_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.fail(EngineLost())
            return
        if self._loose_bytes > _MAX_LOOSE_BYTES and not self._is_whole:
            self.fail(EngineLost())
        elif self._num_bytes > 2 * PIECE_BYTES and not self._is_paused:
            self._pause(True)
        self._wake()

    def ended(self, error: Exception | None) -> None:
        """The connection has ended: the end of a body that tells no length, else a loss."""
        if self._is_whole:
            return
        if error is None and self.status and not self._is_delimited:
            self._is_whole = True
            self._wake()
        else:
            self.fail(EngineLost())

    def fail(self, failure: GatewayError) -> None:
        self._failure = self._failure or failure
        self._wake()
        self._connection.end()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # httptools calls these.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._is_delimited = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= _OK:
            self.status = status
            self._is_kept = self._parser.should_keep_alive()
            self._is_delimited = self._is_delimited or status in _WITHOUT_BODY

    def on_body(self, body: bytes) -> None:
        self._loose_bytes = 0
        self._pieces.append(body)
        self._num_bytes += len(body)

    def on_message_complete(self) -> None:
        if not self.status:
            self._is_delimited = False  # 100 Continue and its like: the answer follows
        elif self._is_whole:
            self._is_kept = False  # a second answer, to nothing
        else:
            self._is_whole = True


def has_unread(connection: socket.socket) -> bool:
    """Whether bytes, or the end, wait in a socket to be read."""
    descriptor = connection.fileno()
    if descriptor < 0:
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
