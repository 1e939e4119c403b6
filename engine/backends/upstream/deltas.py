"""What an event of OpenAI's chat completions has, as far as it is read."""

from dataclasses import dataclass

import msgspec


class CalledFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: CalledFunction = CalledFunction()


class ChatDelta(msgspec.Struct, frozen=True):
    """Both names of thoughts are in use: `reasoning_content` and `reasoning`."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """One event's delta, and the end if it is the last."""

    delta: ChatDelta
    finish_reason: str | None = None
