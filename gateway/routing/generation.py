"""One accepted generation: the checked frames of an engine's answer, and its refusals as errors."""

import re
from collections.abc import AsyncIterator

import msgspec

from engine.protocol import (
    Done,
    ErrorReply,
    Failed,
    FinalCounts,
    Finished,
    Frame,
    Started,
)
from gateway.base.errors import (
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
)
from gateway.routing.client import EngineResponse

_TOO_LONG = re.compile(r"(\d+) tokens > (\d+)")

MAX_COUNT = 2**31 - 1
"""No prompt and no answer has more tokens.

A larger count comes from a broken engine. The ledger's sums (64 bits) must hold billions of turns.
"""

_frame = msgspec.json.Decoder(Frame)


class Generation:
    """One accepted generation.

    `num_ignored` counts frames that were left out: late ones, double ones, and another request's.
    """

    def __init__(self, response: EngineResponse, request_id: str) -> None:
        self._response = response
        self._request_id = request_id
        self._has_started = False
        self._finished: set[int] = set()
        self.has_ended = False
        self.num_ignored = 0

    async def frames(self) -> AsyncIterator[list[Frame]]:
        """Yield the frames until Done, as many at a time as have come.

        An empty list is a heartbeat. Raise for Failed, for a silence, and for a stream that ends
        without Done. The frames before a failure are yielded first.
        """
        rest = b""
        try:
            async for chunk in self._response.chunks():
                *lines, rest = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
                if lines:
                    frames, failure = self._decode(lines)
                    if frames or failure is None:
                        yield frames
                    if failure is not None:
                        raise failure
        except (EngineLost, EngineTimeout):
            if not self.has_ended:
                raise
        if not self.has_ended:
            raise EngineLost

    def _decode(self, lines: list[bytes]) -> tuple[list[Frame], GatewayError | None]:
        """The frames of whole lines, and the error behind them that ended the generation."""
        frames: list[Frame] = []
        for line in lines:
            if not line:
                continue
            try:
                frame = _frame.decode(line)
                has_sane_counts = are_sane(frame)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return frames, EngineFailed("the engine broke the protocol")
            if not has_sane_counts:
                return frames, EngineFailed("the engine broke the protocol")
            if not self._belongs(frame):
                self.num_ignored += 1
                continue
            if isinstance(frame, Failed):
                self.has_ended = True
                return frames, refusal(ErrorReply(frame.code, frame.message))
            frames.append(frame)
            if isinstance(frame, Done):
                self.has_ended = True
        return frames, None

    def _belongs(self, frame: Frame) -> bool:
        if self.has_ended:
            return False
        match frame:
            case Started(request_id=request_id):
                is_first, self._has_started = not self._has_started, True
                return is_first and request_id == self._request_id
            case Done(request_id=request_id):
                return request_id == self._request_id
            case Finished(choice=choice):
                is_first = choice not in self._finished
                self._finished.add(choice)
                return is_first
            case Failed():
                return True
            case _:
                return frame.choice not in self._finished

    def close(self) -> None:
        self._response.close()


def are_sane(told: Frame | FinalCounts) -> bool:
    """Whether all counts are from 0 to MAX_COUNT."""
    counts: tuple[int, ...]
    match told:
        case Started():
            counts = msgspec.structs.astuple(told.usage)
        case Finished():
            counts = told.output_tokens, told.thinking_tokens
        case Done():
            counts = (told.output_tokens,)
        case FinalCounts():
            own = told.output_tokens, told.thinking_tokens, told.prefilled_tokens
            counts = (*own, *(() if told.usage is None else msgspec.structs.astuple(told.usage)))
        case _:
            return True
    return min(counts) >= 0 and max(counts) <= MAX_COUNT


def refusal(reply: ErrorReply) -> GatewayError:
    """Translate an engine's refusal.

    The engine's message stays inside, except for the prompt's length and a message for the client.
    """
    match reply.code:
        case "prompt_too_long":
            lengths = _TOO_LONG.search(reply.message)
            return PromptTooLong(int(lengths[1]), int(lengths[2])) if lengths else PromptTooLong()
        case "invalid_request" if reply.is_public:
            return DemandRefused(reply.message)
        case "invalid_request":
            return InvalidRequest("the engine could not read the prompt")
        case "too_costly":
            # No other engine is asked, because it would take as long.
            return InvalidRequest("the prompt, its tools or its schemas take too long to prepare")
        case "unsupported":
            return InvalidRequest("the request asks for something this model does not support")
        case "overloaded":
            return Overloaded()
        case "not_ready":
            return NoEngineReady()
        case "unauthorized":
            return EngineRefusesSecret()
        case _:
            return EngineFailed()
