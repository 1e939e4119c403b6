"""Client of the engine protocol, and what is known of each engine's state.

Nothing here decides or retries. A lost connection, a silence, a broken frame and a refusal each are
one typed error.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Literal, TypeVar

import aiohttp
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from engine.protocol import (
    AckRequest,
    CancelReply,
    CancelRequest,
    Capability,
    CountReply,
    CountRequest,
    Description,
    Done,
    EntryInfo,
    ErrorReply,
    Failed,
    FinalCounts,
    Frame,
    GenerateRequest,
    Stats,
)
from gateway.errors import (
    DemandRefused,
    EngineFailed,
    EngineLost,
    EngineTimeout,
    GatewayError,
    InvalidRequest,
    NoEngineReady,
    Overloaded,
    PromptTooLong,
)

EngineStatus = Literal["starting", "ready", "down"]
Reply = TypeVar("Reply")

_CONNECT_SECONDS = 2.0
_CONTROL_SECONDS = 3.0
# The engine sends a blank line at least every 5 s; three missing ones are a silence.
_SILENCE_SECONDS = 16.0
_POLL_SECONDS = 1.0
_COUNT_SECONDS = 60.0
_CONTROL = httpx.Timeout(_CONTROL_SECONDS, connect=_CONNECT_SECONDS)
_GENERATE = httpx.Timeout(
    connect=_CONNECT_SECONDS, read=_SILENCE_SECONDS, write=_SILENCE_SECONDS, pool=None
)
_COUNT = httpx.Timeout(_COUNT_SECONDS, connect=_CONNECT_SECONDS)
_TOO_LONG = re.compile(r"(\d+) tokens > (\d+)")

_encode = msgspec.json.Encoder().encode
_frame = msgspec.json.Decoder(Frame)
_error = msgspec.json.Decoder(ErrorReply)


def make_http() -> httpx.AsyncClient:
    """A client without a connection limit: admission is ours, not the pool's.

    The aiohttp transport costs less per stream than httpx's own (README has the numbers); its
    connector must be made by hand because it reads "no limit" as its default of 100.
    """

    def session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    return httpx.AsyncClient(transport=AiohttpTransport(client=session), trust_env=False)


class Generation:
    """One accepted generation: its frames, and None for every heartbeat."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.has_ended = False

    async def frames(self) -> AsyncIterator[Frame | None]:
        """Yield until Done; raise for Failed, for silence, and for an end before the end."""
        rest = b""
        try:
            async for chunk in self._response.aiter_raw():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    frame = _frame.decode(line) if line.strip() else None
                    if isinstance(frame, Failed):
                        self.has_ended = True
                        raise refusal(ErrorReply(frame.code, frame.message))
                    if isinstance(frame, Done):
                        self.has_ended = True
                    yield frame
        except httpx.TransportError as error:
            if not self.has_ended:
                raise _lost(error) from None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise EngineFailed("the engine broke the protocol") from None
        if not self.has_ended:
            raise EngineLost

    async def aclose(self) -> None:
        await self._response.aclose()


class Engine:
    """One engine: calls of the protocol, and the state that the last poll saw."""

    def __init__(self, name: str, url: str, secret: str, http: httpx.AsyncClient) -> None:
        self.name = name
        self.url = url
        self.status: EngineStatus = "starting"
        self.readiness: dict[str, object] = {}
        self.description: Description | None = None
        self._http = http
        self._headers = {
            "authorization": f"Bearer {secret}",
            "content-type": "application/json",
        }

    @property
    def is_ready(self) -> bool:
        return self.status == "ready"

    @property
    def capabilities(self) -> list[Capability]:
        return self.description.capabilities if self.description else []

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return when the engine has answered its status line; raise when it refuses."""
        response = await self._send("POST", "/v1/generate", _encode(request), _GENERATE)
        if response.status_code != 200:
            await self._refuse(response)
        return Generation(response)

    async def count(self, request: CountRequest) -> CountReply:
        body = await self._call("POST", "/v1/count", CountReply, _encode(request), _COUNT)
        return body

    async def cancel(self, request_id: str) -> bool:
        """Whether it was running; cancelling what has ended, or is unknown, is no error."""
        body = _encode(CancelRequest(request_id))
        return (await self._call("POST", "/v1/cancel", CancelReply, body)).cancelled

    async def ack(self, request_ids: list[str]) -> None:
        await self._discard("/v1/ack", _encode(AckRequest(request_ids)))

    async def unacknowledged(self) -> list[FinalCounts]:
        return await self._call("GET", "/v1/unacknowledged", list[FinalCounts])

    async def stats(self) -> Stats:
        return await self._call("GET", "/v1/stats", Stats)

    async def entries(self) -> list[EntryInfo]:
        return await self._call("GET", "/v1/entries", list[EntryInfo])

    async def poll(self) -> None:
        """Look whether the engine is ready, and learn what it is."""
        try:
            response = await self._send("GET", "/readyz", None, _CONTROL)
            self.readiness = _readiness(await _read(response))
            if response.status_code == 200:
                self.description = await self._call("GET", "/v1/describe", Description)
                self.status = "ready"
            else:
                self.status = "starting"
        except GatewayError as error:
            self.mark_down(str(error))

    def mark_down(self, reason: str) -> None:
        self.status = "down"
        self.readiness = {"error": reason}

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[Reply],
        body: bytes | None = None,
        timeout: httpx.Timeout = _CONTROL,
    ) -> Reply:
        response = await self._send(method, path, body, timeout)
        if response.status_code != 200:
            await self._refuse(response)
        try:
            return msgspec.json.decode(await _read(response), type=kind)
        except msgspec.MsgspecError:
            raise EngineFailed("the engine broke the protocol") from None

    async def _discard(self, path: str, body: bytes) -> None:
        response = await self._send("POST", path, body, _CONTROL)
        if response.status_code not in (200, 204):
            await self._refuse(response)
        await _read(response)

    async def _send(
        self, method: str, path: str, body: bytes | None, timeout: httpx.Timeout
    ) -> httpx.Response:
        request = self._http.build_request(
            method, self.url + path, content=body, headers=self._headers, timeout=timeout
        )
        try:
            return await self._http.send(request, stream=True)
        except httpx.ConnectError:
            self.mark_down("cannot connect")
            raise EngineLost from None
        except httpx.TransportError as error:
            raise _lost(error) from None

    async def _refuse(self, response: httpx.Response) -> None:
        try:
            reply = _error.decode(await _read(response))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise EngineFailed("the engine broke the protocol") from None
        if reply.code == "not_ready":
            self.status = "starting"
        raise refusal(reply)


class Fleet:
    """All engines; each is polled by a task of its own."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.status == "ready"]

    @property
    def served(self) -> list[str]:
        """Model names that engines said they serve, also while they are down."""
        described = [engine.description for engine in self.engines if engine.description]
        return list(dict.fromkeys(description.model for description in described))

    def epoch_of(self, name: str) -> str | None:
        """The epoch that the engine of that name was last seen in."""
        for engine in self.engines:
            if engine.name == name and engine.description is not None:
                return engine.description.epoch
        return None

    async def acknowledge(self, name: str, turn_ids: list[str]) -> None:
        """Tell the engine of that name that its counts are recorded, if it is there to hear it."""
        for engine in self.ready:
            if engine.name == name:
                await engine.ack(turn_ids)

    async def start(self) -> None:
        await asyncio.gather(*(engine.poll() for engine in self.engines))
        self._tasks = [asyncio.create_task(self._follow(engine)) for engine in self.engines]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            await engine.poll()


def refusal(reply: ErrorReply) -> GatewayError:
    """Translate an engine's refusal.

    Its own words stay inside, except for the prompt's length and what it wrote for the client.
    """
    match reply.code:
        case "prompt_too_long":
            lengths = _TOO_LONG.search(reply.message)
            return PromptTooLong(int(lengths[1]), int(lengths[2])) if lengths else PromptTooLong()
        case "invalid_request" if reply.is_public:
            return DemandRefused(reply.message)
        case "invalid_request":
            return InvalidRequest("the engine could not read the prompt")
        case "unsupported":
            return InvalidRequest("the request asks for something this model does not support")
        case "overloaded":
            return Overloaded()
        case "not_ready":
            return NoEngineReady()
        case _:
            return EngineFailed()


async def _read(response: httpx.Response) -> bytes:
    try:
        return await response.aread()
    except httpx.TransportError as error:
        raise _lost(error) from None


def _lost(error: httpx.TransportError) -> GatewayError:
    return EngineTimeout() if isinstance(error, httpx.TimeoutException) else EngineLost()


def _readiness(body: bytes) -> dict[str, object]:
    try:
        return msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
