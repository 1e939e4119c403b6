"""Messages, content parts and tools as OpenAI clients send them. Unknown keys are errors.

A message that a response contained is accepted verbatim as input. `cache_control` stands where
LiteLLM and OpenRouter put it: on a content part, a message, a tool call, a tool or its function;
`prompt_cache_breakpoint` is OpenAI's own marker, on content parts only.
"""

from typing import Annotated, Any, Literal

import msgspec

from engine.protocol import Ttl

# A word that only asks for better, so that no word is an error.
Word = Annotated[str, msgspec.Meta(max_length=64)]


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """Base of every request shape."""


class CacheControl(Strict):
    type: Literal["ephemeral"]
    ttl: Ttl = "5m"


class CacheBreakpoint(Strict):
    """`12h` is held as long as an hour, and told."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] = "30m"


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


class Address(msgspec.Struct):
    """An address, or a `data:` URL with the content itself."""

    url: str = ""


class Sound(msgspec.Struct):
    data: str = ""
    format: str = ""


class File(msgspec.Struct):
    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class Medium(Strict):
    """Content that is no text: see `prompt/media.py`."""

    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class ImagePart(Medium, tag="image_url", kw_only=True):
    image_url: Address | str


class VideoPart(Medium, tag="video_url", kw_only=True):
    video_url: Address | str


class AudioUrlPart(Medium, tag="audio_url", kw_only=True):
    audio_url: Address | str


class AudioPart(Medium, tag="input_audio", kw_only=True):
    input_audio: Sound


class FilePart(Medium, tag="file", kw_only=True):
    file: File


MediaPart = ImagePart | VideoPart | AudioUrlPart | AudioPart | FilePart
Part = Text | MediaPart


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
    content: str | list[Part]
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
    audio: Any = None
    function_call: None = None
    cache_control: CacheControl | None = None


class ToolMessage(Strict, tag_field="role", tag="tool"):
    tool_call_id: str
    content: str | list[Part]
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


class ForeignTool(Tool):
    """A tool of another type. It is left out of the prompt and keeps its place.

    `dialects/openai/foreign.py` makes it; it is never decoded.
    """
