"""Request bodies of POST /v1/messages and POST /v1/messages/count_tokens."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.dialects.anthropic.content import Block, CacheControl, Strict, Text, Tool

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
