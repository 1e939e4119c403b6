"""HTTP to engines: one aiohttp session, whose failures are the gateway's errors."""

import io
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self

import aiohttp

from gateway.base.errors import EngineLost, EngineTimeout

PIECE_BYTES = 16 * 1024
"""The bytes of one stream that wait here while its client does not read, and the most of a piece.

aiohttp stops reading the socket at twice as many; the rest stays with the engine.
"""
_KEEPALIVE_SECONDS = 30.0
_LARGE_BYTES = 1 << 20


class CannotConnect(EngineLost):
    """No connection came about, so the request was not sent.

    `is_refused`: nothing listens at the address. Otherwise its name was not found, no route leads
    to it, or it did not answer in time, which may pass.
    """

    def __init__(self, *, is_refused: bool = False) -> None:
        super().__init__()
        self.is_refused = is_refused


def timeouts(read_seconds: float, connect_seconds: float) -> aiohttp.ClientTimeout:
    """Timeouts for each wait for the next bytes, and for connecting: DNS and all addresses
    together. The whole has none."""
    return aiohttp.ClientTimeout(total=None, connect=connect_seconds, sock_read=read_seconds)


class EngineResponse:
    """The status and the body of one answer. The body is read as it arrives.

    Reading raises EngineLost if the connection breaks, EngineTimeout if it falls silent.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield what has arrived, at most PIECE_BYTES at a time, until the body's end."""
        try:
            async for piece in self._response.content.iter_chunked(PIECE_BYTES):
                yield piece
        except TimeoutError:
            raise EngineTimeout from None
        except aiohttp.ClientError:
            raise EngineLost from None

    async def read(self) -> bytes:
        """The whole body. Its connection is free afterwards."""
        return b"".join([piece async for piece in self.chunks()])

    def close(self) -> None:
        """End the connection, so that the engine sees that we left. A body that was read to its
        end has given its connection back before."""
        self._response.close()


class EngineHttp:
    """Connections to all engines. Make it in a running loop.

    Their number has no limit here, because admission bounds the turns. The regular GETs have
    connections of their own: aiohttp takes the connection that was idle for longest, so they would
    keep every connection of an earlier burst of turns.
    """

    def __init__(self) -> None:
        self._turns, self._polls = _new_session(), _new_session()

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
        await self._turns.close()
        await self._polls.close()

    async def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: aiohttp.ClientTimeout,
    ) -> EngineResponse:
        """Return once the head of the answer is there.

        Raise CannotConnect, EngineLost or EngineTimeout. A GET is sent once more where the engine
        had closed an idle connection; a POST may have been carried out, so its sender decides.
        """
        data = io.BytesIO(body) if body and len(body) > _LARGE_BYTES else body
        try:
            session = self._polls if method == "GET" else self._turns
            response = await session.request(
                method, url, headers=headers, data=data, timeout=timeout, allow_redirects=False
            )
        except aiohttp.ConnectionTimeoutError:
            raise CannotConnect from None
        except aiohttp.ClientConnectorError as error:
            is_refused = isinstance(error.os_error, ConnectionRefusedError)
            raise CannotConnect(is_refused=is_refused) from None
        except TimeoutError:
            raise EngineTimeout from None
        except aiohttp.ClientError:
            raise EngineLost from None
        return EngineResponse(response)


def _new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        read_bufsize=PIECE_BYTES,
    )
