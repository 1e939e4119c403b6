"""Response bodies and the shapes that stream events share with them.

An optional field that would be null is left out: strict third-party schemas refuse the null. Null
is written where the hosted API always writes it (`stop_reason`, `stop_sequence`, `stop_details`).
"""

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.base.errors import DemandRefused, GatewayError, ThreadNotFound
from gateway.base.standing import Standings
from gateway.dialects.extension import Holdfast


class ModelChanged(msgspec.Struct, frozen=True, tag="model_changed"):
    cache_missed_input_tokens: int


class ToolsChanged(msgspec.Struct, frozen=True, tag="tools_changed"):
    cache_missed_input_tokens: int


class SystemChanged(msgspec.Struct, frozen=True, tag="system_changed"):
    cache_missed_input_tokens: int


class MessagesChanged(msgspec.Struct, frozen=True, tag="messages_changed"):
    cache_missed_input_tokens: int


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


_TOOL = re.compile(r"^tools\[(\d+)\]\.")
_SCHEMA = re.compile(r"^output_schema\b")


def detail_of(failure: GatewayError) -> ErrorDetail:
    message = str(failure)
    if isinstance(failure, DemandRefused):
        message = _TOOL.sub(r"tools.\1.", message)
        message = _SCHEMA.sub("output_config.format.schema", message)
    if isinstance(failure, ThreadNotFound):
        return ErrorDetail(failure.type, message, ErrorDetails(failure.code))
    return ErrorDetail(failure.type, message)


def limit_headers(rates: Standings, now: datetime) -> Iterator[tuple[str, str]]:
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
            reset = _in_whole_seconds(now + timedelta(seconds=rate.reset_seconds))
            yield f"anthropic-ratelimit-{kind}-limit", str(rate.limit)
            yield f"anthropic-ratelimit-{kind}-remaining", str(rate.remaining)
            yield f"anthropic-ratelimit-{kind}-reset", reset.strftime("%Y-%m-%dT%H:%M:%SZ")


def _in_whole_seconds(moment: datetime) -> datetime:
    """The time is rounded up, so that a client that waits until then is not early."""
    return moment.replace(microsecond=0) + timedelta(seconds=1 if moment.microsecond else 0)
