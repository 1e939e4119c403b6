"""Stream events of POST /v1/messages; each struct's tag is the event's name."""

from typing import Any

import msgspec

from gateway.dialects.anthropic.response import DeltaUsage, DirectCaller, Message, StopReason


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


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: Message


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: OpenText | OpenThinking | OpenToolUse


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


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
