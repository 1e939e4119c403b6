"""What the Messages API answers: its bodies, its stream's events, and their writer.

An optional field that would be null is left out: strict third-party schemas refuse the null. Null
is written where the hosted API always writes it (`stop_reason`, `stop_sequence`, `stop_details`).
The tag of an event's struct is its name.
"""

from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

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
from gateway.base.grants import RateStatuses
from gateway.dialects.collector import Writer, partial_json
from gateway.dialects.extension import Holdfast, extension_of


class _Changed(msgspec.Struct, frozen=True):
    cache_missed_input_tokens: int


class ModelChanged(_Changed, frozen=True, tag="model_changed"): ...


class ToolsChanged(_Changed, frozen=True, tag="tools_changed"): ...


class SystemChanged(_Changed, frozen=True, tag="system_changed"): ...


class MessagesChanged(_Changed, frozen=True, tag="messages_changed"): ...


class PreviousMessageNotFound(msgspec.Struct, frozen=True, tag="previous_message_not_found"):
    pass


class Unavailable(msgspec.Struct, frozen=True, tag="unavailable"):
    pass


CacheMissReason = (
    ModelChanged
    | ToolsChanged
    | SystemChanged
    | MessagesChanged
    | PreviousMessageNotFound
    | Unavailable
)
_CHANGED: dict[str, type[ModelChanged | ToolsChanged | SystemChanged | MessagesChanged]] = {
    "model_changed": ModelChanged,
    "tools_changed": ToolsChanged,
    "system_changed": SystemChanged,
    "messages_changed": MessagesChanged,
}


class Diagnostics(msgspec.Struct, frozen=True):
    """`cache_miss_reason` None: the comparison had not ended when the response began."""

    cache_miss_reason: CacheMissReason | None


def changed(kind: str, missed_tokens: int | None) -> Diagnostics:
    """The report of a divergence of that kind."""
    if missed_tokens is None:
        return Diagnostics(Unavailable())
    return Diagnostics(_CHANGED[kind](missed_tokens))


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class CacheCreation(msgspec.Struct, frozen=True):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """`input_tokens` comes after the last breakpoint; total = input + creation + read."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: OutputDetails | UnsetType = UNSET
    service_tier: Literal["standard"] = "standard"
    inference_geo: Literal["not_available"] = "not_available"


class DeltaUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Cumulative counters of the whole response, without the breakdown by TTL."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails | UnsetType = UNSET


class DirectCaller(msgspec.Struct, frozen=True):
    type: Literal["direct"] = "direct"


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller = DirectCaller()


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    model: str
    id: str
    role: Literal["assistant"] = "assistant"
    content: list[ContentBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    usage: Usage
    diagnostics: Diagnostics | UnsetType = UNSET
    holdfast: Holdfast


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None = None
    max_tokens: int | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class OpenText(msgspec.Struct, frozen=True, tag="text"):
    text: str = ""


class OpenThinking(msgspec.Struct, frozen=True, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class OpenToolUse(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    caller: DirectCaller = DirectCaller()
    input: dict[str, Any] = {}


class TextPiece(msgspec.Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingPiece(msgspec.Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignaturePiece(msgspec.Struct, frozen=True, tag="signature_delta"):
    signature: str


class InputPiece(msgspec.Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: Message


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: OpenText | OpenThinking | OpenToolUse


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None = None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    delta: StopDelta
    usage: DeltaUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    pass


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


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
class MessageWriter(Writer[Event, Message]):
    """`diagnose`, the requested comparison, is asked when the engine's first frame is there.

    `omits_thinking` leaves thinking blocks without their text. Where nobody asked for thinking they
    are left out (`hides_thinking`).
    """

    diagnose: Callable[[], Diagnostics | None]
    omits_thinking: bool = False
    _begun: Message | None = None
    _index: int = -1
    _open: str | None = None
    _thought: Any = field(default_factory=lambda: blake2b(digest_size=32))

    def begin(self, started: Started) -> None:
        self._begun = Message(
            model=self.model,
            id=self.id,
            content=[],
            usage=usage_of(started.usage, _PROVISIONAL_OUTPUT),
            diagnostics=self.diagnose() or UNSET,
            holdfast=extension_of(started, self.found, self.paths),
        )

    def write(self, frame: Frame) -> Iterator[Event]:
        self.note(frame)
        match frame:
            case Started() if self._begun is not None:
                yield MessageStart(self._begun)
            case TextDelta(text=text):
                if self._open != "text":
                    yield from self._begin("text", OpenText())
                yield BlockDelta(self._index, TextPiece(text))
            case ThinkingDelta() if self.hides_thinking:
                pass
            case ThinkingDelta(text=text):
                if self._open != "thinking":
                    yield from self._begin("thinking", OpenThinking())
                self._thought.update(text.encode())
                if not self.omits_thinking:
                    yield BlockDelta(self._index, ThinkingPiece(text))
            case ToolUseStart(id=call_id, name=name):
                yield from self._begin("call", OpenToolUse(call_id, name))
                yield BlockDelta(self._index, InputPiece(""))
            case ToolInputDelta(partial_json=partial):
                yield BlockDelta(self._index, InputPiece(partial))
            case Finished():
                yield from self._end()
            case Done():
                usage = usage_of(self.usage, self.output_tokens, self.thinking_tokens)
                end = self.finished[0]
                yield MessageDelta(
                    StopDelta(_STOP_REASONS[end.reason], end.stop_sequence),
                    DeltaUsage(
                        input_tokens=usage.input_tokens,
                        cache_creation_input_tokens=usage.cache_creation_input_tokens,
                        cache_read_input_tokens=usage.cache_read_input_tokens,
                        output_tokens=usage.output_tokens,
                        output_tokens_details=usage.output_tokens_details,
                    ),
                )
                yield MessageStop()

    def whole(self) -> Message:
        [(end, blocks)] = self.answers()
        if self._begun is None:
            raise EngineFailed
        content: list[ContentBlock] = []
        for block in blocks:
            match block.kind:
                case "text":
                    content.append(TextBlock(block.text))
                case "thinking":
                    self._thought.update(block.text.encode())
                    shown = "" if self.omits_thinking else block.text
                    content.append(ThinkingBlock(shown, self._signature()))
                case "call":
                    value = partial_json(block.text)
                    given = value if isinstance(value, dict) else {}
                    content.append(ToolUseBlock(block.id, block.name, given))
        return replace(
            self._begun,
            content=content,
            usage=usage_of(self.usage, self.output_tokens, self.thinking_tokens),
            stop_reason=_STOP_REASONS[end.reason],
            stop_sequence=end.stop_sequence,
        )

    def _begin(self, kind: str, block: OpenText | OpenThinking | OpenToolUse) -> Iterator[Event]:
        yield from self._end()
        self._open = kind
        self._index += 1
        yield BlockStart(self._index, block)

    def _end(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield BlockDelta(self._index, SignaturePiece(self._signature()))
        self._open = None
        yield BlockStop(self._index)

    def _signature(self) -> str:
        return b64encode(self._thought.digest()).decode()


def usage_of(usage: InputUsage, output_tokens: int, thinking_tokens: int = 0) -> Usage:
    """The engine's counts in the wire's fields, not adjusted."""
    return Usage(
        input_tokens=usage.input_tokens,
        cache_creation_input_tokens=usage.written_tokens,
        cache_read_input_tokens=usage.cache_read_tokens,
        cache_creation=CacheCreation(usage.cache_write_5m_tokens, usage.cache_write_1h_tokens),
        output_tokens=output_tokens,
        output_tokens_details=OutputDetails(thinking_tokens) if thinking_tokens else UNSET,
    )


def limit_headers(rates: RateStatuses, now: datetime) -> Iterator[tuple[str, str]]:
    """`reset` is the time, RFC 3339, at which all of a limit is there again.

    There is one limit for all tokens. Input and output each end where it ends, so clients that
    look at one of them only find its numbers there too.
    """
    kinds = [
        ("requests", rates.requests),
        *((kind, rates.tokens) for kind in ("tokens", "input-tokens", "output-tokens")),
    ]
    for kind, rate in kinds:
        if rate is not None:
            reset = now + timedelta(seconds=rate.reset_seconds)
            # Rounded up, so that a client that waits until then is not early.
            reset += timedelta(seconds=1 if reset.microsecond else 0)
            yield f"anthropic-ratelimit-{kind}-limit", str(rate.limit)
            yield f"anthropic-ratelimit-{kind}-remaining", str(rate.remaining)
            yield f"anthropic-ratelimit-{kind}-reset", reset.strftime("%Y-%m-%dT%H:%M:%SZ")
