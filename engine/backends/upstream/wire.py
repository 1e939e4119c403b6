"""HTTP to a server that is not ours: every answer has a bound on its bytes and on its silence."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import msgspec

from engine.backends.upstream.server import (
    UpstreamBusy,
    UpstreamDenied,
    UpstreamError,
    UpstreamGone,
)

T = TypeVar("T")

CONNECT_SECONDS = 5.0
LOOK_SECONDS = 10.0
"""How long a small question may take: a model's name, a count of tokens, whether it lives."""
MAX_REPLY_BYTES = 8 * 2**20
MAX_EVENT_BYTES = 2**20
MAX_IDLE_BYTES = 2**20
"""Comments and empty lines between two events."""
_BUSY = {429, 503, 529}


class Wire:
    """Calls to one server. `url` has no path of an API; a trailing `/v1` is left out."""

    def __init__(self, url: str, key: str, silence_seconds: float) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(LOOK_SECONDS, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            follow_redirects=False,
            trust_env=False,
        )
        self._silence = httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS, pool=None)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body; raises UpstreamGone and UpstreamError."""
        async with self._call("GET", path, None, None) as response:
            return response.status_code, await _body(response)

    async def check_alive(self, path: str) -> None:
        """Raise UpstreamGone unless the server answers this with 200."""
        status, _ = await self.get(path)
        if status != 200:
            raise UpstreamGone(f"{path}: status {status}")

    async def post(self, path: str, body: Any, *, is_long: bool = False) -> tuple[int, bytes]:
        """`is_long`: it may take as long as a generation."""
        async with self._call("POST", path, body, self._silence if is_long else None) as response:
            return response.status_code, await _body(response)

    async def post_checked(self, path: str, body: Any, kind: type[T], *, is_long: bool) -> T:
        """The decoded answer; raises UpstreamError for any other status than 200."""
        status, answer = await self.post(path, body, is_long=is_long)
        check_status(status, path)
        return decoded(answer, kind, path)

    async def events(self, path: str, body: Any) -> AsyncGenerator[bytes, None]:
        """The data of a stream of server-sent events. Closing it closes the connection."""
        async with self._call("POST", path, body, self._silence) as response:
            if response.status_code != 200:
                await _body(response)
                check_status(response.status_code, path)
            if "text/event-stream" not in response.headers.get("content-type", ""):
                raise UpstreamError(f"{path}: no stream of events")
            try:
                async for data in event_data(response.aiter_raw()):
                    yield data
            except httpx.HTTPError as error:
                raise _lost(path, error) from error

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def _call(
        self, method: str, path: str, body: Any, timeout: httpx.Timeout | None
    ) -> AsyncIterator[httpx.Response]:
        content = None if body is None else msgspec.json.encode(body)
        request = self._client.build_request(
            method,
            path,
            content=content,
            headers={"content-type": "application/json", "accept-encoding": "identity"},
            timeout=timeout or httpx.USE_CLIENT_DEFAULT,
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _lost(path, error) from error
        try:
            yield response
        finally:
            await response.aclose()


def check_status(status: int, path: str) -> None:
    """Raise UpstreamBusy, UpstreamDenied or UpstreamError unless it is 200."""
    if status in _BUSY:
        raise UpstreamBusy(f"{path}: the server is overloaded (status {status})")
    if status in (401, 403):
        raise UpstreamDenied(f"{path}: status {status}: set ENGINE_UPSTREAM_KEY")
    if status != 200:
        raise UpstreamError(f"{path}: status {status}")


def decoded(body: bytes, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UpstreamError(f"{path}: an answer of another form") from None


async def event_data(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The `data` of each event. Raises UpstreamError for an event or a pause beyond its bound."""
    data, idle = bytearray(), 0
    async for line in _lines(chunks):
        if line.startswith(b"data:"):
            data += (b"\n" if data else b"") + line[5:].removeprefix(b" ")
            if len(data) > MAX_EVENT_BYTES:
                raise UpstreamError("an event is too long")
        elif not line and data:
            whole, idle = bytes(data), 0
            data.clear()
            yield whole
        else:
            idle += len(line) + 1
            if idle > MAX_IDLE_BYTES:
                raise UpstreamError("the stream goes on without an event")
    if data:
        yield bytes(data)


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Whole lines without their ends, each byte looked at once."""
    buffer = bytearray()
    async for chunk in chunks:
        searched = len(buffer)
        buffer += chunk
        start = 0
        while (end := buffer.find(b"\n", max(searched, start))) >= 0:
            yield bytes(buffer[start:end]).removesuffix(b"\r")
            start = end + 1
        del buffer[:start]
        if len(buffer) > MAX_EVENT_BYTES:
            raise UpstreamError("an event is too long")


async def _body(response: httpx.Response) -> bytes:
    parts, size = [], 0
    try:
        async for chunk in response.aiter_raw():
            size += len(chunk)
            if size > MAX_REPLY_BYTES:
                raise UpstreamError(f"{response.request.url.path}: the answer is too long")
            parts.append(chunk)
    except httpx.HTTPError as error:
        raise _lost(response.request.url.path, error) from error
    return b"".join(parts)


def _lost(path: str, error: httpx.HTTPError) -> UpstreamError:
    if isinstance(error, httpx.ReadTimeout):
        return UpstreamError(f"{path}: the server said nothing in time")
    return UpstreamGone(f"{path}: {type(error).__name__}")
