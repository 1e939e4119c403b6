"""HTTP to engines: a small client of HTTP/1.1, with its failures as the gateway's errors.

It knows what the engine protocol needs, and nothing else: no redirects, cookies, compression or
proxies. aiohttp does the same for 250 us of CPU a request, which is most of what a turn may cost
(gateway/README.md, "What a request costs").
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from ipaddress import ip_address
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from gateway.base.errors import EngineLost
from gateway.routing.connection import RECEIVE_BYTES, Answer, Connection

_KEEPALIVE_SECONDS = 30.0
_CLOSING_ROUNDS = 100
"""Of the loop, in which ended connections are closed."""
_PORTS = {"http": 80, "https": 443}
_MAX_PLACES = 1024
"""Calls of engines whose URLs are kept split."""


class CannotConnect(EngineLost):
    """Nothing listens at the address, or no route leads to it. The request was not sent."""


class _Unanswered(EngineLost):
    """The connection ended before a byte of the answer came."""


class Timeouts(NamedTuple):
    """Seconds for each wait for the next bytes, and for connecting. The whole has none."""

    read: float
    connect: float


class EngineResponse:
    """The status and the body of one answer. The body is read as it arrives.

    Reading raises EngineLost if the connection breaks, EngineTimeout if it falls silent.
    """

    def __init__(self, http: "EngineHttp", key: "Origin", of: Connection, answer: Answer) -> None:
        self._http = http
        self._key = key
        self._connection = of
        self._answer: Answer | None = answer
        self.status = answer.status

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes that arrived since the last piece, until the body's end."""
        answer = self._answer
        while answer is not None and (piece := await answer.piece()):
            yield piece

    async def read(self) -> bytes:
        """The whole body. Its connection is free afterwards."""
        body = b"".join([piece async for piece in self.chunks()])
        self.close()
        return body

    def close(self) -> None:
        """Keep the connection if the body has ended.

        Otherwise end it, so that the engine sees that we left.
        """
        answer, self._answer = self._answer, None
        if answer is not None and answer.close():
            self._http.keep(self._key, self._connection)


class Origin(NamedTuple):
    """What a connection leads to."""

    is_secure: bool
    host: str
    port: int


class EngineHttp:
    """Connections to all engines.

    Their number has no limit here, because admission bounds the turns. The one that was used last
    is used first, so that those of a past peak become idle and end.
    """

    def __init__(self) -> None:
        self._idle: dict[Origin, list[Connection]] = {}
        self._all: set[Connection] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

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
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        self._idle.clear()
        for connection in list(self._all):
            connection.end()
        for _ in range(_CLOSING_ROUNDS):
            if self._all:
                await asyncio.sleep(0)

    async def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: Timeouts,
    ) -> EngineResponse:
        """Return once the status line is there.

        Raise CannotConnect, EngineLost or EngineTimeout. A GET is sent once more where the engine
        had closed an idle connection; a POST may have been carried out, so its sender decides.
        """
        origin, target, host = _place_of(url)
        head = _head(f"{method} {target} HTTP/1.1\r\nhost: {host}\r\n", headers, body)
        connection = self._take(origin)
        if connection is not None:
            try:
                return await self._ask(connection, origin, head, body, timeout.read)
            except _Unanswered:
                if method != "GET":
                    raise
        connection = await self._connect(origin, timeout.connect)
        return await self._ask(connection, origin, head, body, timeout.read)

    def keep(self, origin: Origin, connection: Connection) -> None:
        """Keep a connection for the next request."""
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.setdefault(origin, []).append(connection)
        if self._sweeping is None:
            self._sweeping = loop.call_later(_KEEPALIVE_SECONDS, self._sweep, loop)

    async def _ask(
        self,
        connection: Connection,
        origin: Origin,
        head: bytes,
        body: bytes | None,
        read_seconds: float,
    ) -> EngineResponse:
        """Raise _Unanswered where the connection ended before a byte came back."""
        answer = connection.ask(head, body or b"", read_seconds)
        try:
            await answer.head()
        except EngineLost:
            if answer.has_begun:
                raise
            raise _Unanswered from None
        finally:
            if not answer.status:
                answer.close()
        return EngineResponse(self, origin, connection, answer)

    def _take(self, origin: Origin) -> Connection | None:
        """The connection that was used last, None where a new one must be made."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, origin: Origin, seconds: float) -> Connection:
        loop = asyncio.get_running_loop()
        secure = self._secured() if origin.is_secure else None
        try:
            connected = await _connected(loop, origin, seconds)
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self._forget),
                    sock=connected,
                    ssl=secure,
                    server_hostname=origin.host if secure else None,
                )
        except (OSError, TimeoutError):
            raise CannotConnect from None
        self._all.add(connection)
        return connection

    def _secured(self) -> ssl.SSLContext:
        self._tls = self._tls or ssl.create_default_context()
        return self._tls

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the connections that were idle for too long, and forget those that have ended."""
        self._sweeping = None
        oldest = loop.time() - _KEEPALIVE_SECONDS
        for origin, idle in list(self._idle.items()):
            kept = [each for each in idle if each.is_open and each.idle_since > oldest]
            for connection in idle:
                if connection not in kept:
                    connection.end()
            if kept:
                self._idle[origin] = kept
            else:
                del self._idle[origin]
        if self._idle:
            self._sweeping = loop.call_later(_KEEPALIVE_SECONDS / 2, self._sweep, loop)


async def _connected(
    loop: asyncio.AbstractEventLoop, origin: Origin, seconds: float
) -> socket.socket:
    """A socket to the first of the origin's addresses that takes it. Raise OSError.

    Each address has `seconds`.
    """
    failure = OSError("no address")
    for family, address in await _addresses(loop, origin):
        made = socket.socket(family, socket.SOCK_STREAM)
        is_connected = False
        try:
            made.setblocking(False)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(seconds):
                await loop.sock_connect(made, address)
            is_connected = True
            return made
        except OSError as error:  # TimeoutError is one
            failure = error
        finally:
            if not is_connected:
                made.close()
    raise failure


async def _addresses(
    loop: asyncio.AbstractEventLoop, origin: Origin
) -> list[tuple[socket.AddressFamily, Any]]:
    """The origin's addresses. Only a name is looked up, in a thread."""
    try:
        version = ip_address(origin.host).version
    except ValueError:
        found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        return [(family, address) for family, _, _, _, address in found]
    if version == 4:
        return [(socket.AF_INET, (origin.host, origin.port))]
    return [(socket.AF_INET6, (origin.host, origin.port))]


@lru_cache(_MAX_PLACES)
def _place_of(url: str) -> tuple[Origin, str, str]:
    """What a URL leads to, the target of its request line, and its Host."""
    parts = urlsplit(url)
    port = parts.port or _PORTS.get(parts.scheme, 80)
    target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    host = parts.netloc.rpartition("@")[2]
    return Origin(parts.scheme == "https", parts.hostname or "", port), target, host


def _head(first: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """The head, which begins with the lines `first`."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    length = "" if body is None else f"content-length: {len(body)}\r\n"
    return f"{first}{lines}{length}\r\n".encode("latin-1")


def timeouts(read_seconds: float, connect_seconds: float) -> Timeouts:
    """Timeouts for connecting and for each wait for the next bytes. The total time has none."""
    return Timeouts(read_seconds, connect_seconds)
