"""Messages, content parts and tools as OpenAI clients send them. Unknown keys are errors.

A message that a response contained is accepted verbatim as input. `cache_control` stands where
LiteLLM and OpenRouter put it: on a content part, a message, a tool call, a tool or its function;
`prompt_cache_breakpoint` is OpenAI's own marker, on content parts only.
"""

from typing import Any, Literal

import msgspec

from engine.protocol import Ttl

UNSUPPORTED_PARTS = frozenset({"image_url", "input_audio", "file", "video_url", "audio_url"})


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """Base of every request shape."""


class CacheControl(Strict):
    type: Literal["ephemeral"]
    ttl: Ttl = "5m"


class CacheBreakpoint(Strict):
    mode: Literal["explicit"]
    ttl: Literal["30m"] = "30m"


class Text(Strict, tag="text"):
    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class Nonce(Text, tag="nonce"):
    """A text part that is kept out of the prompt.

    `dialects/nonces.py` makes it; it is never decoded.
    """


class Refusal(Strict, tag="refusal"):
    refusal: str


class CalledFunction(Strict):
    """`arguments` is a JSON object, written as a string."""

    name: str
    arguments: str


class ToolCall(Strict):
    """`index` is there if a client has joined the pieces of a streamed call."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None
    cache_control: CacheControl | None = None


class SystemMessage(Strict, tag_field="role", tag="system"):
    content: str | list[Text]
    name: str | None = None
    cache_control: CacheControl | None = None


class DeveloperMessage(Strict, tag_field="role", tag="developer"):
    content: str | list[Text]
    name: str | None = None
    cache_control: CacheControl | None = None


class UserMessage(Strict, tag_field="role", tag="user"):
    content: str | list[Text]
    name: str | None = None
    cache_control: CacheControl | None = None


class AssistantMessage(Strict, tag_field="role", tag="assistant"):
    """Responses and routers add the fields that have no use here."""

    content: str | list[Text | Refusal] | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    provider_specific_fields: Any = None
    reasoning_details: Any = None
    audio: None = None
    function_call: None = None
    cache_control: CacheControl | None = None


class ToolMessage(Strict, tag_field="role", tag="tool"):
    tool_call_id: str
    content: str | list[Text]
    name: str | None = None
    cache_control: CacheControl | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = None
