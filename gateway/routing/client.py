"""HTTP to engines: aiohttp's client, with its failures as the gateway's errors.

aiohttp is used as it is: what a client with a nicer interface on top costs is in
gateway/README.md, "What a request costs".
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
# What one stream may hold while its client does not read: a piece and what is made of it, and twice
# that much beside; the rest stays with the engine. A loop that finds more in a socket reads it all.
_PIECE_BYTES = 16 * 1024
_RECEIVE_BYTES = 64 * 1024
_LOOK_AGAIN_SECONDS = 0.5
_FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


class CannotConnect(EngineLost):
    """Nobody listens there, or nothing leads there: the request was not sent."""


class EngineResponse:
    """The status and the body of one answer, the body as it comes in.

    Reading raises EngineLost where the connection breaks, EngineTimeout where it falls silent.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status

    async def chunks(self) -> AsyncIterator[bytes]:
        """What has come since the last piece, until the body's end."""
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
        """Keep the connection if the body has ended, else end it: the engine sees that we left."""
        self._response.release()


class _Silence:
    """A stream's read timeout, looked at when it may have run out. A timer says only that time has
    gone by: silence is that nothing has come, in the socket either.

    aiohttp sets a timer anew for every piece that comes, which is a tenth of what relaying one
    costs; so its own is switched off here.
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
        """Something came; while nobody waits for more, there is no silence."""
        self._began = None
        self._num_bytes = self._content.total_bytes

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        left = (now if self._began is None else self._began) + self._seconds - now
        if left <= 0 and self._has_come():
            # The loop was held up, and has not read yet what came meanwhile.
            left = _LOOK_AGAIN_SECONDS
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self._content.set_exception(aiohttp.SocketTimeoutError("the engine fell silent"))

    def _has_come(self) -> bool:
        """Whether something waits in aiohttp's buffer or in the socket, be it the end."""
        if self._content.is_eof() or self._content.total_bytes != self._num_bytes:
            return True
        return self._socket is not None and has_unread(self._socket)


class EngineHttp:
    """Connections to all engines, without a limit: admission is ours, not the pool's."""

    def __init__(self) -> None:
        # What looks at engines several times a second has connections of its own: aiohttp takes the
        # one that was idle longest, so it would keep all of a past peak from ever being idle.
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
        """Return with the status line. Raise CannotConnect, EngineLost or EngineTimeout."""
        try:
            response = await self._open(is_look=method == "GET").request(
                method, url, headers=headers, data=body, timeout=timeout, allow_redirects=False
            )
        except _FAILURES as error:
            raise _failure(error) from None
        return EngineResponse(response)

    def _open(self, *, is_look: bool) -> aiohttp.ClientSession:
        """Made in the event loop that uses it."""
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


def limits(read_seconds: float, connect_seconds: float) -> aiohttp.ClientTimeout:
    """For connecting, and for each wait for the next bytes; the whole may take any time."""
    return aiohttp.ClientTimeout(sock_connect=connect_seconds, sock_read=read_seconds)


def _failure(error: Exception) -> GatewayError:
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return CannotConnect()
    if isinstance(error, TimeoutError):
        return EngineTimeout()
    return EngineLost()
