"""The response object and its items. `holdfast` is our extension; UNSET fields are not sent."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from engine.protocol import InputUsage
from gateway.dialects.extension import Holdfast
from gateway.dialects.openai.response import TokenLogprob
from gateway.dialects.openai.response import usage_of as chat_usage_of
from gateway.dialects.responses.request import Status

DiagnosticReason = Literal["model_changed", "tools_changed", "input_changed"]
_REASONS: dict[str, DiagnosticReason] = {
    "model_changed": "model_changed",
    "tools_changed": "tools_changed",
    "system_changed": "input_changed",
    "messages_changed": "input_changed",
}


class CacheMiss(msgspec.Struct, frozen=True, tag="cache_miss"):
    cache_missed_tokens: int
    reason: DiagnosticReason


class CacheHit(msgspec.Struct, frozen=True, tag="cache_hit"):
    pass


class ComparisonNotFound(msgspec.Struct, frozen=True, tag="comparison_response_not_found"):
    pass


class Unavailable(msgspec.Struct, frozen=True, tag="unavailable"):
    pass


Diagnostics = CacheMiss | CacheHit | ComparisonNotFound | Unavailable


def diagnostics_of(kind: str | None, missed_tokens: int | None, *, has_read: bool) -> Diagnostics:
    """`kind` is the divergence's, None where the prompt only grew.

    Such a prompt may still not be read: its entry can be gone.
    """
    if kind is None:
        return CacheHit() if has_read else Unavailable()
    if kind not in _REASONS or missed_tokens is None:
        return Unavailable()
    return CacheMiss(missed_tokens, _REASONS[kind])


ResponseStatus = Literal["completed", "failed", "in_progress", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, frozen=True, tag="summary_text"):
    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning"):
    id: str
    status: Status
    summary: list[SummaryText] = []
    content: list[ReasoningText] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


class CustomCallItem(msgspec.Struct, frozen=True, kw_only=True, tag="custom_tool_call"):
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class WriteDetails(msgspec.Struct, frozen=True):
    ttl_30m_tokens: int
    ttl_12h_tokens: int = 0


class InputDetails(msgspec.Struct, frozen=True):
    """`cache_write_tokens_details` is there where every write is held for 30 minutes at least."""

    cached_tokens: int
    cache_write_tokens: int
    cache_write_tokens_details: WriteDetails | UnsetType = UNSET


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


def usage_of(usage: InputUsage, output_tokens: int, thinking_tokens: int) -> Usage:
    """The engine's counts, as Chat Completions has them, in this API's fields."""
    counts = chat_usage_of(usage, output_tokens, thinking_tokens)
    written = counts.prompt_tokens_details.cache_write_tokens
    return Usage(
        input_tokens=counts.prompt_tokens,
        input_tokens_details=InputDetails(
            counts.prompt_tokens_details.cached_tokens,
            written,
            UNSET if usage.cache_write_5m_tokens else WriteDetails(written),
        ),
        output_tokens=counts.completion_tokens,
        output_tokens_details=OutputDetails(thinking_tokens),
        total_tokens=counts.total_tokens,
    )


class Failure(msgspec.Struct, frozen=True):
    code: str
    message: str
    request_id: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class AppliedCacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """No breakpoint is held for 12 hours, so the TTL is always the shorter one."""

    mode: Literal["implicit", "explicit"]
    ttl: Literal["30m"] = "30m"
    comparison_response_id: str | UnsetType = UNSET


class InputTokens(msgspec.Struct, frozen=True):
    """What a request's prompt has."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of type Raw are the request's, as they came."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    background: Literal[False] = False
    error: Failure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: Raw | None = None
    max_output_tokens: Raw | None = None
    max_tool_calls: Raw | None = None
    metadata: Raw
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: Raw
    previous_response_id: None = None
    prompt_cache_diagnostics: Diagnostics | UnsetType = UNSET
    prompt_cache_key: Raw | None = None
    prompt_cache_options: AppliedCacheOptions | UnsetType = UNSET
    reasoning: Raw
    safety_identifier: Raw | None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: Raw
    text: Raw
    tool_choice: Raw
    tools: Raw
    top_logprobs: Raw
    top_p: Raw
    truncation: Literal["disabled"] = "disabled"
    usage: Usage | None = None
    user: Raw | None = None
    holdfast: Holdfast | UnsetType = UNSET


MAX_ECHO_BYTES = 256 * 1024
"""The longest field of a request that its response repeats, in bytes of JSON.

A stream repeats it three times. The vendor's tools, for one, may have any length here, since they
are not shown to the model.
"""
_NULL = {
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "user",
}
_DEFAULTS = {
    "metadata": Raw(b"{}"),
    "parallel_tool_calls": Raw(b"true"),
    "reasoning": Raw(b'{"effort":null,"summary":null}'),
    "temperature": Raw(b"1.0"),
    "text": Raw(b'{"format":{"type":"text"}}'),
    "tool_choice": Raw(b'"auto"'),
    "tools": Raw(b"[]"),
    "top_logprobs": Raw(b"0"),
    "top_p": Raw(b"1.0"),
}


def unechoed(fields: Mapping[str, Raw]) -> list[str]:
    """The fields of a request that are too long to be repeated."""
    repeated = sorted(_NULL | _DEFAULTS.keys())
    return [name for name in repeated if len(fields.get(name, b"")) > MAX_ECHO_BYTES]


def echo_of(fields: Mapping[str, Raw]) -> dict[str, Raw | None]:
    """The request's fields that every state of its response repeats, but for very long ones."""
    long = unechoed(fields)
    fields = {name: value for name, value in fields.items() if name not in long}
    echo: dict[str, Raw | None] = {name: fields.get(name) for name in _NULL}
    echo |= {name: fields.get(name, default) for name, default in _DEFAULTS.items()}
    return echo
