"""Request bodies of POST /v1/messages and POST /v1/messages/count_tokens.

What is not listed here is refused by name. A block that a response contained is accepted verbatim
as input.
"""

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

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
    toolset_name: str | None = None


class SearchResult(Strict, tag="search_result"):
    source: str
    title: str
    content: list[Text]
    cache_control: CacheControl | None = None
    citations: Citations | None = None


class Base64Source(Strict, tag="base64"):
    """Bytes of an image or a PDF. A media type that no model reads is no error here."""

    media_type: str
    data: str


class UrlSource(Strict, tag="url"):
    url: str


class FileSource(Strict, tag="file"):
    file_id: str


class TextSource(Strict, tag="text"):
    media_type: Literal["text/plain"]
    data: str


class Image(Strict, tag="image"):
    """Models here read text: see `prompt/media.py`."""

    source: Base64Source | UrlSource | FileSource
    cache_control: CacheControl | None = None
    transformations: Any = None


class ContentSource(Strict, tag="content"):
    content: str | list[Text | Image]


class Document(Strict, tag="document"):
    source: TextSource | ContentSource | Base64Source | UrlSource | FileSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: CacheControl | None = None


class ToolReference(Strict, tag="tool_reference"):
    """Names a deferred tool, which the model may call from here on."""

    tool_name: str
    cache_control: CacheControl | None = None


class Foreign(msgspec.Struct):
    """A block of the vendor's own servers, or of another model. Its other fields are not read."""

    cache_control: CacheControl | None = None


class RedactedThinking(Foreign, tag="redacted_thinking"):
    """Another model's thinking, encrypted."""


class Compaction(Foreign, tag="compaction"):
    """A summary of what came before."""

    content: str | None = None


class ToolAddition(Foreign, tag="tool_addition"):
    """A tool that the model may call from here on: a reference, or a definition."""

    tool: dict[str, Any] = {}


class ToolRemoval(Foreign, tag="tool_removal"):
    tool: dict[str, Any] = {}


class ServerToolUse(Foreign, tag="server_tool_use"): ...


class WebSearchResult(Foreign, tag="web_search_tool_result"): ...


class WebFetchResult(Foreign, tag="web_fetch_tool_result"): ...


class CodeExecutionResult(Foreign, tag="code_execution_tool_result"): ...


class BashResult(Foreign, tag="bash_code_execution_tool_result"): ...


class TextEditorResult(Foreign, tag="text_editor_code_execution_tool_result"): ...


class ToolSearchResult(Foreign, tag="tool_search_tool_result"): ...


class AdvisorResult(Foreign, tag="advisor_tool_result"): ...


class ContainerUpload(Foreign, tag="container_upload"): ...


class BrowserState(Foreign, tag="browser_state"): ...


class McpToolUse(Foreign, tag="mcp_tool_use"): ...


class McpToolResult(Foreign, tag="mcp_tool_result"): ...


class McpToolListing(Foreign, tag="mcp_tool_listing"): ...


class Fallback(Foreign, tag="fallback"): ...


Nested = Text | SearchResult | Document | Image | ToolReference | BrowserState


class ToolResult(Strict, tag="tool_result"):
    tool_use_id: str
    content: str | list[Nested] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None
    toolset_name: str | None = None


ForeignBlock = (
    RedactedThinking
    | Compaction
    | ToolAddition
    | ToolRemoval
    | ServerToolUse
    | WebSearchResult
    | WebFetchResult
    | CodeExecutionResult
    | BashResult
    | TextEditorResult
    | ToolSearchResult
    | AdvisorResult
    | ContainerUpload
    | BrowserState
    | McpToolUse
    | McpToolResult
    | McpToolListing
    | Fallback
)
Block = (
    Text
    | Thinking
    | ToolUse
    | ToolResult
    | SearchResult
    | Document
    | Image
    | ToolReference
    | ForeignBlock
)

SUPPORTED_BLOCKS = ("text", "thinking", "tool_use", "tool_result", "search_result", "document")
PLACED_BLOCKS = frozenset(
    str(kind.__struct_config__.tag) for kind in (Image, ToolReference, *get_args(ForeignBlock))
)
"""A text stands in the place of these."""


class Tool(Strict):
    """A custom tool. `decode.py` reads the kinds that the vendor defines."""

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


class ForeignTool(Tool):
    """A tool that the vendor defines or runs. It is left out of the prompt and keeps its place.

    `decode.py` makes it; it is never decoded.
    """


_MAX_COUNT = 1_000_000_000
Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Version = Literal["2023-06-01", "2026-10-21"]
VERSIONS: tuple[Version, ...] = ("2023-06-01", "2026-10-21")


# These only ask for better, so that no word for them is an error. Known are "low" to "max", and
# "summarized", "omitted" and "updates".
Effort = Annotated[str, msgspec.Meta(max_length=64)]
Display = Annotated[str, msgspec.Meta(max_length=64)]


class MessageOutputConfig(Strict):
    effort: Effort | None = None


class Message(Strict):
    """Only a system message that sets `output_config` may be without content."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | UnsetType = UNSET
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: MessageOutputConfig | None = None

    @property
    def only_sets_effort(self) -> bool:
        return not self.content and self.output_config not in (None, MessageOutputConfig())


class BlockBinding(Strict):
    """The treatment of a thinking block whose prefix changed.

    Here blocks are bound to no prefix.
    """

    prefix_mismatch_behavior: str | None = None


class ThinkingEnabled(Strict, tag="enabled"):
    budget_tokens: Annotated[int, msgspec.Meta(ge=1024, le=_MAX_COUNT)]
    display: Display | None = None
    block_binding: BlockBinding | None = None


class ThinkingAdaptive(Strict, tag="adaptive"):
    display: Display | None = None
    block_binding: BlockBinding | None = None


class ThinkingDisabled(Strict, tag="disabled"):
    pass


class ThinkingBetweenTools(Strict, tag="between_tools"):
    pass


ThinkingConfig = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | ThinkingBetweenTools


class ChoiceAuto(Strict, tag="auto"):
    disable_parallel_tool_use: bool = False


class ChoiceAny(Strict, tag="any"):
    disable_parallel_tool_use: bool = False


class ChoiceTool(Strict, tag="tool"):
    name: str
    disable_parallel_tool_use: bool = False


class ChoiceNone(Strict, tag="none"):
    pass


ToolChoice = ChoiceAuto | ChoiceAny | ChoiceTool | ChoiceNone


class Format(Strict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Strict):
    effort: Effort | None = None
    format: Format | None = None
    task_budget: Any = None


class ContextManagement(Strict):
    """No edit is made: the model sees the whole conversation."""

    edits: list[dict[str, Any]] | None = None


class ThreadCreate(msgspec.Struct, tag="create"):
    """No conversation is kept, so that this is an ordinary request."""


class ThreadContinue(msgspec.Struct, tag="continue"):
    previous_message_id: str | None = None


class Metadata(Strict):
    """`name` is Holdfast's own: what the dashboard calls this request's prefix."""

    user_id: str | None = None
    name: str | None = None


class DiagnosticsRequest(Strict):
    previous_message_id: str | None = None


class CountTokensRequest(Strict):
    """The fields of both calls: everything that makes the prompt."""

    model: str
    messages: Annotated[list[Message], msgspec.Meta(max_length=100_000)]
    billing_policy: Any = None
    cache_control: CacheControl | None = None
    compaction: Any = None
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    speed: Literal["standard", "fast"] | None = None
    system: str | list[Text] | None = None
    thinking: ThinkingConfig | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Tool] = msgspec.field(default_factory=list)
    user_profile_id: str | None = None
    workspace_id: str | None = None

    @property
    def form(self) -> Format | None:
        """The schema of the text, by either of its names."""
        return self.output_format or (self.output_config.format if self.output_config else None)

    @property
    def form_path(self) -> str:
        return "output_format" if self.output_format else "output_config.format"


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Count
    container: Any = None
    diagnostics: DiagnosticsRequest | None = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: str | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"
    stop_sequences: list[str] = msgspec.field(default_factory=list)
    stream: bool = False
    temperature: Share | None = None
    thread: ThreadCreate | ThreadContinue | None = None
    top_p: Share | None = None
    top_k: Count | None = None
