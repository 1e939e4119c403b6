"""HTTP to a server that is not ours: every answer has a bound on its bytes and on its silence."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar

import httpx
import msgspec

from engine.protocol import ErrorCode
from engine.supervisor import Expected

T = TypeVar("T")

CONNECT_SECONDS = 5.0
LOOK_SECONDS = 10.0
"""How long a small question may take: a model's name, a count of tokens, whether it lives."""
MAX_REPLY_BYTES = 8 * 2**20
MAX_EVENT_BYTES = 2**20
MAX_IDLE_BYTES = 2**20
"""Comments and empty lines between two events."""
_BUSY = {429, 503, 529}


class UpstreamError(Expected):
    """A server's answer that can't be used. The message is for operators and quotes no prompt."""

    code: ClassVar[ErrorCode] = "internal"


class UpstreamBusy(UpstreamError):
    """The server has no room for this request now."""

    code: ClassVar[ErrorCode] = "overloaded"


class UpstreamUnsupported(UpstreamError):
    """The server's API has no place for what the request asks."""

    code: ClassVar[ErrorCode] = "unsupported"


class UpstreamGone(UpstreamError):
    """The server can't be reached, or a connection to it broke."""

    code: ClassVar[ErrorCode] = "not_ready"


class UpstreamDenied(UpstreamError):
    """The server wants a key, or another one."""


class Wire:
    """Calls to one server. `url` has no path of an API; a trailing `/v1` is left out."""

    def __init__(self, url: str, key: str, silence_seconds: float) -> None:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers | ({"authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx.Timeout(LOOK_SECONDS, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            follow_redirects=False,
            trust_env=False,
        )
        self._silence = httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS, pool=None)

    async def look(self, path: str) -> tuple[int, bytes]:
        """Status and body; raises UpstreamGone and UpstreamError."""
        async with self._call("GET", path) as response:
            return response.status_code, await _body(response)

    async def check_alive(self, path: str) -> None:
        """Raise UpstreamGone unless the server answers this with 200."""
        status, _ = await self.look(path)
        if status != 200:
            raise UpstreamGone(f"{path}: status {status}")

    async def get(self, path: str, kind: type[T]) -> T:
        """The decoded answer; raises UpstreamError for any other status than 200."""
        status, answer = await self.look(path)
        check_status(status, path)
        return decoded(answer, kind, path)

    async def post(self, path: str, body: Any, kind: type[T], *, is_long: bool = False) -> T:
        """As `get`. `is_long`: it may take as long as a generation."""
        async with self._call("POST", path, body, self._silence if is_long else None) as response:
            answer = await _body(response)
        check_status(response.status_code, path)
        return decoded(answer, kind, path)

    async def events(self, path: str, body: Any) -> AsyncGenerator[bytes, None]:
        """The data of a stream of server-sent events. Closing it closes the connection."""
        async with self._call("POST", path, body, self._silence) as response:
            if response.status_code != 200:
                await _body(response)
                check_status(response.status_code, path)
            if "text/event-stream" not in response.headers.get("content-type", ""):
                raise UpstreamError(f"{path}: no stream of events")
            async for data in event_data(response.aiter_raw()):
                yield data

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def _call(
        self, method: str, path: str, body: Any = None, timeout: httpx.Timeout | None = None
    ) -> AsyncIterator[httpx.Response]:
        content = None if body is None else msgspec.json.encode(body)
        known = httpx.USE_CLIENT_DEFAULT if timeout is None else timeout
        try:
            async with self._client.stream(
                method, path, content=content, timeout=known
            ) as response:
                yield response
        except httpx.ReadTimeout as error:
            raise UpstreamError(f"{path}: the server said nothing in time") from error
        except httpx.HTTPError as error:
            raise UpstreamGone(f"{path}: {type(error).__name__}") from error


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
    buffer, data, idle = bytearray(), bytearray(), 0
    async for chunk in chunks:
        # Each byte is looked at once: lines may come in many chunks.
        start, searched = 0, len(buffer)
        buffer += chunk
        while (end := buffer.find(b"\n", max(searched, start))) >= 0:
            line, start = bytes(buffer[start:end]).removesuffix(b"\r"), end + 1
            if line.startswith(b"data:"):
                data += (b"\n" if data else b"") + line[5:].removeprefix(b" ")
            elif not line and data:
                whole, idle = bytes(data), 0
                data.clear()
                yield whole
            else:
                idle += len(line) + 1
            if idle > MAX_IDLE_BYTES:
                raise UpstreamError("the stream goes on without an event")
        del buffer[:start]
        if len(buffer) > MAX_EVENT_BYTES or len(data) > MAX_EVENT_BYTES:
            raise UpstreamError("an event is too long")
    if data:
        yield bytes(data)


async def _body(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            raise UpstreamError(f"{response.request.url.path}: the answer is too long")
    return bytes(body)
