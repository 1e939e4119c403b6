"""Content blocks and tools as clients send them. What is not listed here is refused by name.

A block that a response contained is accepted verbatim as input.
"""

from typing import Any, Literal

import msgspec

Ttl = Literal["5m", "1h"]


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """Base of every request shape: unknown keys are errors."""


class CacheControl(Strict):
    type: Literal["ephemeral"]
    ttl: Ttl = "5m"


class Citations(Strict):
    enabled: bool = False


class Caller(msgspec.Struct, frozen=True):
    type: Literal["direct"]


class Text(Strict, tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: list[dict[str, Any]] | None = None


class Nonce(Text, tag="nonce"):
    """A text block that is kept out of the prompt.

    `dialects/nonces.py` makes it; it is never decoded.
    """


class Thinking(Strict, tag="thinking"):
    thinking: str
    signature: str


class ToolUse(Strict, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Caller | None = None
    toolset_name: None = None


class SearchResult(Strict, tag="search_result"):
    source: str
    title: str
    content: list[Text]
    cache_control: CacheControl | None = None
    citations: Citations | None = None


class TextSource(Strict, tag="text"):
    media_type: Literal["text/plain"]
    data: str


class ContentSource(Strict, tag="content"):
    content: str | list[Text]


class Document(Strict, tag="document"):
    source: TextSource | ContentSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: CacheControl | None = None


Nested = Text | SearchResult | Document


class ToolResult(Strict, tag="tool_result"):
    tool_use_id: str
    content: str | list[Nested] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None
    toolset_name: None = None


Block = Text | Thinking | ToolUse | ToolResult | SearchResult | Document

SUPPORTED_BLOCKS = ("text", "thinking", "tool_use", "tool_result", "search_result", "document")
UNSUPPORTED_BLOCKS = frozenset(
    {
        "image",
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "container_upload",
        "compaction",
        "tool_reference",
        "browser_state",
        "advisor_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "mcp_tool_listing",
        "tool_addition",
        "tool_removal",
        "fallback",
    }
)


class Tool(Strict):
    """A custom tool. All other kinds run on the vendor's servers and are refused by their type."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    cache_control: CacheControl | None = None
    defer_loading: bool = False
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] = msgspec.field(default_factory=list)
    strict: bool = False
    allowed_callers: list[str] = msgspec.field(default_factory=lambda: ["direct"])
