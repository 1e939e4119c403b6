"""From the engine's frames to the dialect's events, and from those to one message.

A response that is not streamed is collected from the same events, so both ways say the same.
"""

from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic_core import from_json

from engine.protocol import (
    Done,
    Finished,
    FinishReason,
    Frame,
    InputUsage,
    Started,
    TextDelta,
    ThinkingDelta,
    ToolInputDelta,
    ToolUseStart,
)
from gateway.base.errors import EngineFailed
from gateway.dialects.anthropic import events
from gateway.dialects.anthropic.events import Event
from gateway.dialects.anthropic.response import (
    CacheCreation,
    ContentBlock,
    DeltaUsage,
    Diagnostics,
    Message,
    OutputDetails,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    Usage,
)
from gateway.dialects.extension import Found, extension_of

_STOP_REASONS: dict[FinishReason, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "stop_sequence": "stop_sequence",
    "tool_use": "tool_use",
    "context": "model_context_window_exceeded",
}
# A stream begins before its output is counted. The final count comes with `message_delta`.
_PROVISIONAL_OUTPUT = 1


@dataclass(slots=True, kw_only=True)
class EventWriter:
    """One choice of one response. `paths` name the request's segments in the extension object.

    `found` and `diagnose`, the requested comparison, are asked when the engine's first frame is
    there. `omit_thinking` leaves thinking blocks without their text; `hide_thinking` leaves them
    out, where nobody asked for thinking.
    """

    turn_id: str
    model: str
    found: Found
    paths: Sequence[str]
    diagnose: Callable[[], Diagnostics | None]
    omit_thinking: bool = False
    hide_thinking: bool = False
    _index: int = -1
    _open: type[events.TextDelta] | type[events.ThinkingDelta] | type[ToolUseStart] | None = None
    _thought: Any = field(default_factory=lambda: blake2b(digest_size=32))
    _usage: InputUsage = field(default_factory=lambda: InputUsage(input_tokens=0))
    _finished: Finished | None = None

    def write(self, frame: Frame) -> Iterator[Event]:
        match frame:
            case Started():
                self._usage = frame.usage
                yield events.MessageStart(self._message(frame))
            case TextDelta(text=text):
                if self._open is not events.TextDelta:
                    yield from self._begin(events.TextDelta, events.OpenText())
                yield self._delta(events.TextDelta(text))
            case ThinkingDelta() if self.hide_thinking:
                pass
            case ThinkingDelta(text=text):
                if self._open is not events.ThinkingDelta:
                    yield from self._begin(events.ThinkingDelta, events.OpenThinking())
                self._thought.update(text.encode())
                if not self.omit_thinking:
                    yield self._delta(events.ThinkingDelta(text))
            case ToolUseStart(id=call_id, name=name):
                yield from self._begin(ToolUseStart, events.OpenToolUse(call_id, name))
                yield self._delta(events.InputJsonDelta(""))
            case ToolInputDelta(partial_json=partial):
                yield self._delta(events.InputJsonDelta(partial))
            case Finished():
                self._finished = frame
                yield from self._end()
            case Done():
                yield self._message_delta(frame)
                yield events.MessageStop()

    def _begin(self, kind: Any, block: Any) -> Iterator[Event]:
        yield from self._end()
        self._open = kind
        self._index += 1
        yield events.BlockStart(self._index, block)

    def _end(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open is events.ThinkingDelta:
            signature = b64encode(self._thought.digest()).decode()
            yield self._delta(events.SignatureDelta(signature))
        self._open = None
        yield events.BlockStop(self._index)

    def _delta(self, delta: Any) -> Event:
        return events.BlockDelta(self._index, delta)

    def _message(self, started: Started) -> Message:
        return Message(
            model=self.model,
            id=self.turn_id,
            content=[],
            usage=usage_of(started.usage, _PROVISIONAL_OUTPUT),
            diagnostics=self.diagnose() or UNSET,
            holdfast=extension_of(started, self.found, self.paths),
        )

    def _message_delta(self, done: Done) -> events.MessageDelta:
        finished = self._finished
        if finished is None or finished.reason not in _STOP_REASONS:
            raise EngineFailed
        usage = self._usage
        return events.MessageDelta(
            events.StopDelta(_STOP_REASONS[finished.reason], finished.stop_sequence),
            DeltaUsage(
                input_tokens=usage.input_tokens,
                cache_creation_input_tokens=usage.written_tokens,
                cache_read_input_tokens=usage.cache_read_tokens,
                output_tokens=done.output_tokens,
                output_tokens_details=_details(finished.thinking_tokens),
            ),
        )


@dataclass(slots=True)
class MessageCollector:
    """Joins a response's events to one message."""

    _message: Message | None = None
    _blocks: list[events.OpenText | events.OpenThinking | events.OpenToolUse] = field(
        default_factory=list
    )
    _texts: list[list[str]] = field(default_factory=list)
    _signatures: dict[int, str] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        match event:
            case events.MessageStart(message=message):
                self._message = message
            case events.BlockStart(content_block=block):
                self._blocks.append(block)
                self._texts.append([])
            case events.BlockDelta(index=index, delta=events.SignatureDelta(signature=signature)):
                self._signatures[index] = signature
            case events.BlockDelta(delta=events.TextDelta(text=text)):
                self._texts[-1].append(text)
            case events.BlockDelta(delta=events.ThinkingDelta(thinking=text)):
                self._texts[-1].append(text)
            case events.BlockDelta(delta=events.InputJsonDelta(partial_json=text)):
                self._texts[-1].append(text)
            case events.MessageDelta():
                self._message = self._complete(event)

    def message(self) -> Message:
        if self._message is None or self._message.stop_reason is None:
            raise EngineFailed
        return self._message

    def _complete(self, event: events.MessageDelta) -> Message:
        if self._message is None:
            raise EngineFailed
        start = self._message.usage
        return msgspec.structs.replace(
            self._message,
            content=[self._block(index) for index in range(len(self._blocks))],
            stop_reason=event.delta.stop_reason,
            stop_sequence=event.delta.stop_sequence,
            usage=msgspec.structs.replace(
                start,
                output_tokens=event.usage.output_tokens,
                output_tokens_details=event.usage.output_tokens_details,
            ),
        )

    def _block(self, index: int) -> ContentBlock:
        text = "".join(self._texts[index])
        match self._blocks[index]:
            case events.OpenText():
                return TextBlock(text)
            case events.OpenThinking():
                return ThinkingBlock(text, self._signatures.get(index, ""))
            case events.OpenToolUse(id=call_id, name=name):
                return ToolUseBlock(call_id, name, _input(text))


def usage_of(usage: InputUsage, output_tokens: int, thinking_tokens: int = 0) -> Usage:
    """The engine's counts in the wire's fields, not adjusted."""
    return Usage(
        input_tokens=usage.input_tokens,
        cache_creation_input_tokens=usage.written_tokens,
        cache_read_input_tokens=usage.cache_read_tokens,
        cache_creation=CacheCreation(usage.cache_write_5m_tokens, usage.cache_write_1h_tokens),
        output_tokens=output_tokens,
        output_tokens_details=_details(thinking_tokens),
    )


def _details(thinking_tokens: int) -> OutputDetails | UnsetType:
    return OutputDetails(thinking_tokens) if thinking_tokens else UNSET


def _input(text: str) -> dict[str, Any]:
    """The input of a call; of one that was cut off what there was of it."""
    try:
        value = from_json(text, allow_partial="trailing-strings") if text else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
