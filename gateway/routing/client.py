"""HTTP to engines: aiohttp's client, with its failures as the gateway's errors.

aiohttp is used directly. gateway/README.md, "What a request costs", has the cost of a client on top
of it.
"""

import asyncio
import select
import socket
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import aiohttp

from gateway.base.errors import EngineLost, EngineTimeout, GatewayError

_KEEPALIVE_SECONDS = 30
# The memory of one stream while its client does not read: one piece, what is made of it, and twice
# as much beside it. The rest stays with the engine. A socket that holds more is read to its end.
_PIECE_BYTES = 16 * 1024
_RECEIVE_BYTES = 64 * 1024
_LOOK_AGAIN_SECONDS = 0.5
_FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


class CannotConnect(EngineLost):
    """Nothing listens at the address, or no route leads to it. The request was not sent."""


class EngineResponse:
    """The status and the body of one answer. The body is read as it arrives.

    Reading raises EngineLost if the connection breaks, EngineTimeout if it falls silent.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes that arrived since the last piece, until the body's end."""
        content = self._response.content
        silence = _Silence(self._response)
        try:
            while True:
                silence.begin()
                piece = await content.read(_PIECE_BYTES)
                silence.end()
                if not piece:
                    return
                yield piece
        except _FAILURES as error:
            raise _failure(error) from None
        finally:
            silence.close()

    async def read(self) -> bytes:
        try:
            return await self._response.read()
        except _FAILURES as error:
            raise _failure(error) from None

    def close(self) -> None:
        """Keep the connection if the body has ended.

        Otherwise end it, so that the engine sees that we left.
        """
        self._response.release()


class _Silence:
    """A stream's read timeout.

    A timer alone says only that time has passed. When it runs out, the socket is checked for unread
    bytes too.

    aiohttp sets a new timer for every piece, which is a tenth of the cost of relaying it. So
    aiohttp's own timeout is switched off here.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_bytes = self._content.total_bytes
        connection = response.connection
        transport = connection.transport if connection else None
        self._socket = transport.get_extra_info("socket") if transport else None
        protocol = connection.protocol if connection else None
        if protocol is not None and (seconds := protocol.read_timeout):
            self._seconds: float = seconds
            protocol.read_timeout = None
            protocol.start_timeout()  # which ends the one that runs
            self._check()

    def begin(self) -> None:
        self._began = self._loop.time()

    def end(self) -> None:
        """Bytes arrived. No timeout runs until the next wait."""
        self._began = None
        self._num_bytes = self._content.total_bytes

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        left = (now if self._began is None else self._began) + self._seconds - now
        if left <= 0 and self._has_come():
            # The loop was busy and has not yet read bytes that arrived meanwhile.
            left = _LOOK_AGAIN_SECONDS
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self._content.set_exception(aiohttp.SocketTimeoutError("the engine fell silent"))

    def _has_come(self) -> bool:
        """Whether bytes, or the end, wait in aiohttp's buffer or in the socket."""
        if self._content.is_eof() or self._content.total_bytes != self._num_bytes:
            return True
        return self._socket is not None and has_unread(self._socket)


class EngineHttp:
    """Connections to all engines.

    Their number has no limit here, because admission bounds the turns.
    """

    def __init__(self) -> None:
        # Polls several times a second have connections of their own. aiohttp reuses the connection
        # that was idle longest, so polls would keep all connections of a past peak open.
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def send(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        body: bytes | None,
        timeout: aiohttp.ClientTimeout,
    ) -> EngineResponse:
        """Return once the status line is there.

        Raise CannotConnect, EngineLost or EngineTimeout.
        """
        try:
            response = await self._open(is_look=method == "GET").request(
                method, url, headers=headers, data=body, timeout=timeout, allow_redirects=False
            )
        except _FAILURES as error:
            raise _failure(error) from None
        return EngineResponse(response)

    def _open(self, *, is_look: bool) -> aiohttp.ClientSession:
        """A session, made in the event loop that uses it."""
        if is_look not in self._sessions:
            self._sessions[is_look] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=_KEEPALIVE_SECONDS, socket_factory=_socket
                ),
                read_bufsize=_PIECE_BYTES,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("accept", "accept-encoding", "user-agent"),
            )
        return self._sessions[is_look]


def has_unread(connection: socket.socket) -> bool:
    """Whether bytes, or the end, wait in a socket to be read."""
    descriptor = connection.fileno()
    if descriptor < 0:
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    return made


def timeouts(read_seconds: float, connect_seconds: float) -> aiohttp.ClientTimeout:
    """Timeouts for connecting and for each wait for the next bytes. The total time has none."""
    return aiohttp.ClientTimeout(sock_connect=connect_seconds, sock_read=read_seconds)


def _failure(error: Exception) -> GatewayError:
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return CannotConnect()
    if isinstance(error, TimeoutError):
        return EngineTimeout()
    return EngineLost()
