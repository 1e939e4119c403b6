"""Response bodies and the shapes that stream events share with them.

An optional field that would be null is left out: strict third-party schemas refuse the null. Null
is written where the hosted API always writes it (`stop_reason`, `stop_sequence`, `stop_details`).
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.dialects.anthropic.diagnostics import Diagnostics
from gateway.dialects.extension import Holdfast

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


class ErrorDetails(msgspec.Struct, frozen=True):
    error_code: str


class ErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class ErrorBody(msgspec.Struct, frozen=True, tag="error"):
    error: ErrorDetail
    request_id: str


class StreamError(msgspec.Struct, frozen=True, tag="error"):
    error: ErrorDetail
    request_id: str
