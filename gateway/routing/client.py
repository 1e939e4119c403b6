"""HTTP to engines by aiohttp, and the checked frames of an answer. Every failure is one of the
gateway's errors."""

import asyncio
import io
import re
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

import aiohttp
import msgspec

from engine.protocol import (
    Delta,
    Done,
    ErrorReply,
    Failed,
    FinalCounts,
    Finished,
    Frame,
    Started,
)
from gateway.base.errors import (
    AnswerAborted,
    DemandRefused,
    EngineFailed,
    EngineLost,
    EngineRefusesSecret,
    EngineTimeout,
    GatewayError,
    InvalidRequest,
    NoEngineReady,
    Overloaded,
    PromptTooLong,
    PutOff,
)

PIECE_BYTES = 16 * 1024
"""The most bytes of a piece, and the most bytes of a stream that wait here while its client does
not read.

aiohttp stops reading the socket at twice as many. The rest stays with the engine.
"""
_TOO_LONG = re.compile(r"(?<!\d)(\d+) tokens > (\d+)")

MAX_COUNT = 2**31 - 1
"""No prompt and no answer has more tokens.

A larger count comes from a broken engine. The ledger's sums (64 bits) must hold billions of turns.
"""

_frame = msgspec.json.Decoder(Frame)
_KEEPALIVE_SECONDS = 30.0
_LARGE_BYTES = 1 << 20
_LEAST_BYTES_PER_SECOND = 1 << 20
"""The rate that bounds how long a request's body may take to be sent. Images have megabytes."""
_GRACE_SECONDS = 2.0
"""How much longer a wait lasts after its time is over.

If this process stood still, its event loop ends overdue waits before it reads what has arrived. An
engine that was not silent is read within these seconds.
"""


class CannotConnect(EngineLost):
    """No connection came about, so the request was not sent.

    With `is_refused` nothing listens at the address. Otherwise the name was not found, no route
    leads to the address, or it did not answer in time. These may pass by themselves.
    """

    def __init__(self, *, is_refused: bool = False) -> None:
        super().__init__()
        self.is_refused = is_refused


class Timeouts(NamedTuple):
    """The bounds of a call. The call as a whole has none."""

    # For each wait for the next bytes.
    read_seconds: float
    # For DNS and connecting, with all addresses together.
    connect_seconds: float


class EngineResponse:
    """The status and the body of one answer. It yields what has arrived, PIECE_BYTES at most.

    Reading raises EngineLost if the connection breaks, and EngineTimeout if nothing comes for
    `read_seconds`. One timer watches all waits of an answer, because a timer for each piece would
    cost three times as much.
    """

    def __init__(self, response: aiohttp.ClientResponse, read_seconds: float) -> None:
        self.status = response.status
        self._response = response
        self._read_seconds = read_seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # When the wait for the next piece began; None while nobody waits.
        self._waiting_since: float | None = None
        # When the overdue wait began: its time is over, and only the grace is left.
        self._overdue_since: float | None = None
        self._is_silent = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self._waiting_since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._read_seconds, self._look)
        try:
            piece = await self._response.content.read(PIECE_BYTES)
        except aiohttp.ClientError:
            self._stop_watching()
            raise (EngineTimeout if self._is_silent else EngineLost) from None
        finally:
            self._waiting_since = None
        if not piece:
            self._stop_watching()
            raise StopAsyncIteration
        return piece

    def _look(self) -> None:
        """End a wait whose time and grace are over. If nobody waits, the next wait sets the timer
        again."""
        self._timer = None
        since = self._waiting_since
        if since is None:
            return
        seconds_left = since + self._read_seconds - self._loop.time()
        if seconds_left <= 0:
            if self._overdue_since == since:
                self._is_silent = True
                self._response.close()
                return
            self._overdue_since = since
            seconds_left = _GRACE_SECONDS
        self._timer = self._loop.call_later(seconds_left, self._look)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def read(self) -> bytes:
        """The whole body. Its connection is free afterwards."""
        return b"".join([piece async for piece in self])

    def close(self) -> None:
        """Close the connection, so that the engine sees that we left. A body that was read to its
        end has already given its connection back."""
        self._stop_watching()
        self._response.close()


class EngineHttp:
    """Connections to all engines. It is made in a running loop. Admission bounds their number.

    The regular GETs have connections of their own. aiohttp takes the connection that was idle for
    longest, so GETs on the same ones would keep all connections of an earlier burst open.
    """

    def __init__(self) -> None:
        self._turns, self._polls = (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
                read_bufsize=PIECE_BYTES,
            )
            for _ in range(2)
        )

    async def aclose(self) -> None:
        await self._turns.close()
        await self._polls.close()

    async def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeouts: Timeouts,
        wait: asyncio.Timeout | None = None,
    ) -> EngineResponse:
        """Return when the head of the answer has come. Raise CannotConnect, EngineLost or
        EngineTimeout.

        A GET whose idle connection was closed is sent again. A POST is not, because it may have
        been carried out. If the caller ends its `wait` early, EngineTimeout is raised as well.
        """
        data = io.BytesIO(body) if body and len(body) > _LARGE_BYTES else body
        session = self._polls if method == "GET" else self._turns
        connect_timeout = aiohttp.ClientTimeout(total=None, connect=timeouts.connect_seconds)
        seconds = sum(timeouts) + len(body or b"") / _LEAST_BYTES_PER_SECOND
        loop = asyncio.get_running_loop()
        timeout = wait or asyncio.timeout(None)
        # The deadline is set by a timer, which may be late because the process stood still. So the
        # grace begins when the loop runs again.
        timer = loop.call_later(seconds, lambda: timeout.reschedule(loop.time() + _GRACE_SECONDS))
        try:
            async with timeout:
                response = await session.request(
                    method,
                    url,
                    headers=headers,
                    data=data,
                    timeout=connect_timeout,
                    allow_redirects=False,
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
        finally:
            timer.cancel()
        return EngineResponse(response, timeouts.read_seconds)


class Generation:
    """One accepted generation. It yields the frames that have come, until Done.

    An empty list is a heartbeat. After the frames before it, iteration raises for Failed, a failed
    choice, a silence, or an end without Done. It is not a generator, because an event loop keeps
    account of each of those. `num_ignored` counts the frames that were left out: late ones,
    repeated ones, and frames of another request.
    """

    def __init__(self, response: EngineResponse, request_id: str) -> None:
        self._response = response
        self._request_id = request_id
        self._has_started = False
        self._finished: set[int] = set()
        self._pieces = aiter(response)
        self._rest = b""
        self._failure: GatewayError | None = None
        self.has_ended = False
        self.num_ignored = 0

    def __aiter__(self) -> AsyncIterator[list[Frame]]:
        return self

    async def __anext__(self) -> list[Frame]:
        lines: list[bytes] = []
        while not lines and self._failure is None:
            try:
                piece = await anext(self._pieces, b"")
            except (EngineLost, EngineTimeout):
                if not self.has_ended:
                    raise
                piece = b""
            if not piece:
                raise StopAsyncIteration if self.has_ended else EngineLost
            *lines, self._rest = (self._rest + piece).split(b"\n")
        if self._failure is None:
            frames, self._failure = self._decode(lines)
            if frames or self._failure is None:
                return frames
        raise self._failure

    def _decode(self, lines: list[bytes]) -> tuple[list[Frame], GatewayError | None]:
        """The frames of whole lines, and the error behind them if one ended the generation."""
        frames: list[Frame] = []
        for line in lines:
            if not line:
                continue
            try:
                frame = _frame.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return frames, EngineFailed("the engine broke the protocol")
            # Most frames are deltas, which have no counts.
            if isinstance(frame, Delta):
                if self.has_ended or frame.choice in self._finished:
                    self.num_ignored += 1
                else:
                    frames.append(frame)
                continue
            if not are_sane(frame):
                return frames, EngineFailed("the engine broke the protocol")
            if self.has_ended or not self._is_ours(frame):
                self.num_ignored += 1
                continue
            error = self._failure_of(frame)
            if error is not None:
                self.has_ended = True
                return frames, error
            frames.append(frame)
            self.has_ended = isinstance(frame, Done)
        return frames, None

    def _failure_of(self, frame: Frame) -> GatewayError | None:
        """The error that a frame stands for; None for other frames. An answer of several choices
        fails with its first failed choice."""
        match frame:
            case Failed() if not self._has_started:
                return refusal(ErrorReply(frame.code, frame.message))
            case Failed():
                return interruption(ErrorReply(frame.code, frame.message))
            case Finished(reason="failed", code=str(code)):
                return interruption(ErrorReply(code, ""))
            case Finished(reason="failed" | "cancelled"):
                return EngineFailed()
        return None

    def _is_ours(self, frame: Started | Finished | Done | Failed) -> bool:
        """Whether the frame belongs to this answer and comes for the first time."""
        match frame:
            case Started():
                is_first = not self._has_started
                self._has_started = True
                return is_first and frame.request_id == self._request_id
            case Done():
                return frame.request_id == self._request_id
            case Finished():
                is_first = frame.choice not in self._finished
                self._finished.add(frame.choice)
                return is_first
        return True

    def close(self) -> None:
        self._response.close()


def are_sane(message: Started | Finished | Done | Failed | FinalCounts) -> bool:
    """Whether all counts are from 0 to MAX_COUNT."""
    counts: tuple[int, ...]
    match message:
        case Started():
            counts = msgspec.structs.astuple(message.usage)
        case Finished():
            counts = message.output_tokens, message.thinking_tokens
        case Done():
            counts = (message.output_tokens,)
        case FinalCounts():
            counts = message.output_tokens, message.thinking_tokens, message.prefilled_tokens
            if message.usage is not None:
                counts += msgspec.structs.astuple(message.usage)
        case _:
            return True
    return min(counts) >= 0 and max(counts) <= MAX_COUNT


def refusal(reply: ErrorReply) -> GatewayError:
    """Translate an engine's refusal. The client sees of the engine's message only the prompt's
    length, and the whole message if it is public."""
    match reply.code:
        case "prompt_too_long":
            lengths = _TOO_LONG.search(reply.message)
            return PromptTooLong(int(lengths[1]), int(lengths[2])) if lengths else PromptTooLong()
        case "invalid_request" if reply.is_public:
            return DemandRefused(reply.message)
        case "too_costly" if reply.is_public:
            # A schema or a pattern, by its field. No other engine is asked here either.
            return DemandRefused(reply.message)
        case "invalid_request":
            return InvalidRequest("the engine could not read the prompt")
        case "too_costly":
            # No other engine is asked, because it would take as long.
            return InvalidRequest("the prompt, its tools or its schemas take too long to prepare")
        case "unsupported":
            return InvalidRequest("the request asks for something this model does not support")
        case "overloaded" if reply.only_this:
            return PutOff()
        case "overloaded":
            return Overloaded()
        case "not_ready" | "not_found":  # not_found: its adapter has just gone
            return NoEngineReady()
        case "unauthorized":
            return EngineRefusesSecret()
        case _:
            return EngineFailed()


def interruption(reply: ErrorReply) -> GatewayError:
    """Translate why an engine ended an answer that had begun. After `not_ready` and `overloaded`
    the turn may be tried again, and they do not count as failures of the engine."""
    if reply.code in ("not_ready", "overloaded"):
        return AnswerAborted()
    return refusal(reply)
