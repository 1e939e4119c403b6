"""Request bodies of /v1/messages and of its count_tokens.

What is not listed here is refused by name. A block that a response contained is accepted verbatim
as input. Tools that the vendor defines and the client runs get their schemas. Those that only the
vendor's servers run are left out of the prompt and reported. Their place in `tools` stays taken, so
that paths are the client's, and a marker there counts as one on the tool before.
"""

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType, defstruct

from engine import protocol
from engine.protocol import DEFAULT_RECOMPUTE, DEFAULT_SCORER, LEAST_KEEP, Recompute, Scorer
from gateway.base.errors import InvalidRequest
from gateway.dialects import fields
from gateway.dialects.fields import Fields, Style, rules_of, undone_of
from gateway.prompt.ignored import ADVICE, ADVICE_REASON
from gateway.prompt.wish import ApproximateMark, Wish

AnthropicTtl = Literal["5m", "1h"]


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """Base of every request shape: unknown keys are errors."""


class Approximate(Strict):
    """Our own: which part of a prompt need not be exact. It asks for one of three things.

    - `keep`, `scorer`: this part of the marked prefix is kept in each layer; the scorer chooses it
    - `block`, `recompute`: the marked block is read wherever it stands, and some of its tokens are
      computed anew
    - `sibling`: what a sibling model wrote of the prefix may be read
    """

    keep: Annotated[float, msgspec.Meta(ge=LEAST_KEEP, lt=1)] | None = None
    scorer: Scorer | None = None
    block: Literal["anywhere"] | None = None
    recompute: Recompute | None = None
    sibling: bool | None = None

    def check(self, where: str) -> None:
        """Raise InvalidRequest for fields that do not go together."""
        if [self.keep is not None, self.block is not None, bool(self.sibling)].count(True) != 1:
            raise InvalidRequest(f"{where}: must have one of `keep`, `block` and `sibling`")
        if (self.scorer and self.keep is None) or (self.recompute is not None and not self.block):
            raise InvalidRequest(f"{where}: `scorer` is for `keep`, `recompute` for `block`")

    def wish(self, ttl: AnthropicTtl) -> Wish:
        """What is kept of the prefix, or read in its place; or the block, held for so long."""
        if self.block is None:
            return ApproximateMark(self.keep, self.scorer or DEFAULT_SCORER, bool(self.sibling))
        recompute = DEFAULT_RECOMPUTE if self.recompute is None else self.recompute
        return protocol.Document(0, ttl, recompute)


class CacheControl(Strict):
    type: Literal["ephemeral"]
    ttl: AnthropicTtl = "5m"
    holdfast: Approximate | None = None


CacheTtl = Literal["30m", "12h"]


class CacheBreakpoint(Strict):
    """OpenAI's own marker. The request's `ttl` is a lower bound of each marker's TTL. A marker
    without a `ttl` has that one."""

    mode: Literal["explicit"]
    ttl: CacheTtl | None = None


class Citations(Strict):
    enabled: bool = False


class Caller(msgspec.Struct, frozen=True):
    """The model itself, or the vendor's program that called the tool: `direct` or another type."""

    type: str


class Text(Strict, tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: list[dict[str, Any]] | None = None


class Thinking(Strict, tag="thinking"):
    thinking: str
    signature: str


class ToolUse(Strict, tag="tool_use"):
    id: fields.Name
    name: fields.Name
    input: fields.CallInput
    cache_control: CacheControl | None = None
    caller: Caller | None = None
    toolset_name: str | None = None


class SearchResult(Strict, tag="search_result"):
    source: str
    title: str
    content: Annotated[list[Text], fields.blocks]
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
    content: Annotated[str | list[Text | Image], fields.blocks]


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


# A block of these types has nothing that a model here reads.
_UNREAD = """
server_tool_use web_search_tool_result web_fetch_tool_result code_execution_tool_result
bash_code_execution_tool_result text_editor_code_execution_tool_result tool_search_tool_result
advisor_tool_result container_upload mcp_tool_use mcp_tool_result mcp_tool_listing fallback
""".split()
if TYPE_CHECKING:
    Unread = Foreign
else:
    Unread = reduce(
        or_,
        (
            defstruct(kind.title().replace("_", ""), [], bases=(Foreign,), tag=kind)
            for kind in _UNREAD
        ),
    )


class BrowserState(Foreign, tag="browser_state"): ...


Nested = Text | SearchResult | Document | Image | ToolReference | BrowserState


class ToolResult(Strict, tag="tool_result"):
    tool_use_id: fields.Name
    content: Annotated[str | list[Nested], fields.blocks] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None
    toolset_name: str | None = None


ForeignBlock = RedactedThinking | Compaction | ToolAddition | ToolRemoval | BrowserState | Unread
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


class Tool(Strict):
    """A tool that the client runs. Those that only the vendor runs are `ForeignTool`s."""

    name: fields.Name
    input_schema: fields.Schema
    type: Literal["custom"] | None = None
    description: str | None = None
    cache_control: CacheControl | None = None
    defer_loading: bool = False
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] = msgspec.field(default_factory=list)
    strict: bool = False
    allowed_callers: list[str] = msgspec.field(default_factory=lambda: ["direct"])


class ForeignTool(Tool):
    """A vendor's tool, left out of the prompt: `name` is its type, `description` its name."""


Version = Literal["2023-06-01", "2026-10-21"]
VERSIONS: tuple[Version, ...] = ("2023-06-01", "2026-10-21")


class MessageOutputConfig(Strict):
    effort: fields.Word | None = None


class Message(Strict):
    """Only a system message that sets `output_config` may be without content."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[Block] | UnsetType, fields.content] = UNSET
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: MessageOutputConfig | None = None

    @property
    def only_sets_effort(self) -> bool:
        return not self.content and self.output_config not in (None, MessageOutputConfig())


class BlockBinding(Strict):
    """What becomes of thinking whose prefix changed. Here blocks are bound to no prefix."""

    prefix_mismatch_behavior: str | None = None


class ThinkingEnabled(Strict, tag="enabled"):
    budget_tokens: Annotated[int, msgspec.Meta(ge=1024, le=fields.MAX_COUNT)]
    display: fields.Word | None = None
    block_binding: BlockBinding | None = None


class ThinkingAdaptive(Strict, tag="adaptive"):
    display: fields.Word | None = None
    block_binding: BlockBinding | None = None


class ThinkingDisabled(Strict, tag="disabled"): ...


class ThinkingBetweenTools(Strict, tag="between_tools"): ...


ThinkingConfig = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | ThinkingBetweenTools


class ChoiceAuto(Strict, tag="auto"):
    disable_parallel_tool_use: bool = False


class ChoiceAny(Strict, tag="any"):
    disable_parallel_tool_use: bool = False


class ChoiceTool(Strict, tag="tool"):
    name: fields.Name
    disable_parallel_tool_use: bool = False


class ChoiceNone(Strict, tag="none"): ...


ToolChoice = ChoiceAuto | ChoiceAny | ChoiceTool | ChoiceNone


class Format(Strict):
    type: Literal["json_schema"]
    schema: fields.Schema


class OutputConfig(Strict):
    effort: fields.Word | None = None
    format: Format | None = None
    task_budget: Any = None


class ContextManagement(Strict):
    """No edit is made: the model sees the whole conversation."""

    edits: Annotated[list[dict[str, Any]], fields.at_most(16)] | None = None


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

    model: fields.Name
    messages: Annotated[list[Message], msgspec.Meta(max_length=100_000)]
    # The first three are headers in the hosted API. Bedrock, Vertex and gateways in front send them
    # in the body.
    anthropic_beta: Any = None
    anthropic_version: Any = None
    betas: Any = None
    billing_policy: Any = None
    cache_control: CacheControl | None = None
    cache_prompt: Any = None
    cache_salt: fields.Salt | None = None
    compaction: Any = None
    context_management: ContextManagement | None = None
    id_slot: Any = None
    mcp_servers: list[Any] | None = None
    nvext: Any = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    priority: Any = None
    session_id: Any = None
    speed: Literal["standard", "fast"] | None = None
    system: Annotated[str | list[Text], fields.content] | None = None
    thinking: ThinkingConfig | None = None
    tool_choice: ToolChoice | None = None
    tools: Annotated[list[Tool], fields.tools] = msgspec.field(default_factory=list)
    user_profile_id: str | None = None
    workspace_id: str | None = None

    @property
    def edits(self) -> list[dict[str, Any]]:
        management = self.context_management
        return (management.edits if management is not None else None) or []

    @property
    def form(self) -> Format | None:
        """The schema of the text, by either of its names."""
        return self.output_format or (self.output_config.format if self.output_config else None)

    @property
    def form_path(self) -> str:
        return "output_format" if self.output_format else "output_config.format"


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: fields.Count
    container: Any = None
    diagnostics: DiagnosticsRequest | None = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: str | None = None
    metadata: Annotated[Metadata, fields.metadata] | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"
    stop_sequences: Annotated[list[str], fields.stops] = msgspec.field(default_factory=list)
    stream: bool = False
    temperature: fields.Share | None = None
    thread: ThreadCreate | ThreadContinue | None = None
    top_p: fields.Share | None = None
    top_k: fields.Count | None = None


class ReducedMessagesRequest(MessagesRequest, kw_only=True):
    """A request from which unknown fields were left out: their paths."""

    left_out: list[str]


NOT_HERE = "not supported by this server"
NO_EFFORT = "this model has one effort"
UNUSED: tuple[Any, ...] = (NOT_HERE, [], {}, "")
"""The reason why a field has no effect, then its values that ask for nothing."""
FIELDS = Fields(
    style=Style("messages: more than {} content blocks in the request", is_dotted=True),
    rules=rules_of(MessagesRequest, CountTokensRequest, ForeignTool),
    undone=undone_of(
        {
            "thread": ("no thread is kept: send the whole conversation each time",),
            "speed": ("there is one speed", "standard"),
            "output_config.effort": (NO_EFFORT,),
            "billing_policy": UNUSED,
            "mcp_servers": UNUSED,
            "container": UNUSED,
            "fallbacks": UNUSED,
            "fallback_credit_token": UNUSED,
            "output_config.task_budget": UNUSED,
            "thinking.display": (
                "thinking is shown as the model writes it",
                "summarized",
                "omitted",
            ),
            "thinking.budget_tokens": ("`max_tokens` alone bounds thinking",),
            **dict.fromkeys(ADVICE, (ADVICE_REASON,)),
        }
    ),
)
