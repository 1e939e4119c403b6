"""The request body of POST /v1/responses and POST /v1/responses/input_tokens.

`REFUSED` are fields that ask for what this server does not do: they may only have one of the values
listed, which change nothing. `IGNORED` do not change the answer; of those in `TOLD` the answer says
that they had no effect. Unknown keys are errors.

An output item of a response is accepted verbatim as an input item. `decode.py` gives every item and
every tool a `type` from here: what this server can't do has the type `hosted`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Raw

from gateway.dialects.openai.request import Count, Key, Nucleus, Temperature, TopLogprobs
from gateway.prompt.ignored import Notepad

Status = Literal["in_progress", "completed", "incomplete"]
MAX_ID_CHARACTERS = 1024
Id = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARACTERS)]
CacheTtl = Literal["30m", "12h"]


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """Base of every request shape."""


class CacheBreakpoint(Strict):
    """Without a `ttl` the request's own counts."""

    mode: Literal["explicit"]
    ttl: CacheTtl | None = None


class InputText(Strict, tag="input_text"):
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputImage(Strict, tag="input_image"):
    detail: str | None = None
    file_id: str | None = None
    image_url: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputFile(Strict, tag="input_file"):
    detail: str | None = None
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    filename: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class OutputText(Strict, tag="output_text"):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Strict, tag="refusal"):
    refusal: str


class SummaryText(Strict, tag="summary_text"):
    text: str


class ReasoningText(Strict, tag="reasoning_text"):
    text: str


InputPart = InputText | InputImage | InputFile
Part = InputPart | OutputText | Refusal


class Message(Strict, tag="message"):
    """A message of the client, or one that a response contained."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: Id | None = None
    phase: str | None = None
    status: Status | None = None


class Reasoning(Strict, tag="reasoning"):
    id: Id | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class FunctionCall(Strict, tag="function_call", rename={"is_async": "async"}):
    call_id: str
    name: str
    arguments: str
    id: Id | None = None
    caller: Any = None
    is_async: bool | None = None
    namespace: str | None = None
    status: Status | None = None


class FunctionCallOutput(Strict, tag="function_call_output"):
    call_id: str
    output: str | list[InputPart]
    id: Id | None = None
    caller: Any = None
    name: str | None = None
    namespace: str | None = None
    status: Status | None = None


class CustomToolCall(Strict, tag="custom_tool_call", rename={"is_async": "async"}):
    call_id: str
    name: str
    input: str
    id: Id | None = None
    caller: Any = None
    is_async: bool | None = None
    namespace: str | None = None
    status: Status | None = None


class CustomToolCallOutput(Strict, tag="custom_tool_call_output"):
    call_id: str
    output: str | list[InputPart]
    id: Id | None = None
    caller: Any = None
    name: str | None = None
    status: Status | None = None


class ClientCall(Strict, tag="client_call"):
    """A call of a tool of the vendor's that ran at the client, such as `local_shell_call`.

    `kind` is the item's type and `input` what was asked for.
    """

    kind: str
    call_id: str
    input: dict[str, Any]


class ClientCallOutput(Strict, tag="client_call_output"):
    """What such a call gave; `text` is a string of the item, or its JSON."""

    kind: str
    call_id: str
    text: str


class Hosted(Strict, tag="hosted"):
    """An item or a tool that is left out. `kind` is its type."""

    kind: str


class FunctionTool(Strict, tag="function", rename={"is_async": "async"}):
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[str] | None = None
    is_async: bool | None = None
    defer_loading: bool | None = None
    description: str | None = None
    output_schema: dict[str, Any] | None = None


class TextInput(Strict, tag="text"):
    pass


class GrammarInput(Strict, tag="grammar"):
    definition: str
    syntax: Literal["lark", "regex"]


class CustomTool(Strict, tag="custom", rename={"is_async": "async"}):
    """A tool whose input is a text of the model's."""

    name: str
    allowed_callers: list[str] | None = None
    is_async: bool | None = None
    defer_loading: bool | None = None
    description: str | None = None
    format: TextInput | GrammarInput | None = None


class NamespaceTool(Strict, tag="namespace"):
    name: str
    tools: list[FunctionTool | CustomTool]
    description: str = ""


Tool = FunctionTool | CustomTool | NamespaceTool | Hosted


class AdditionalTools(Strict, tag="additional_tools"):
    """Tools that are added to those of the request."""

    tools: list[Tool]
    id: Id | None = None
    role: str | None = None


Item = (
    Message
    | Reasoning
    | FunctionCall
    | FunctionCallOutput
    | CustomToolCall
    | CustomToolCallOutput
    | ClientCall
    | ClientCallOutput
    | AdditionalTools
    | Hosted
)


MAX_ITEMS = 100_000
Length = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]
MetadataValue = Annotated[str, msgspec.Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], msgspec.Meta(max_length=16)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Summary = Literal["auto", "concise", "detailed"]


class CacheOptions(Strict):
    """`prewarm` writes the prompt to the cache and generates nothing."""

    comparison_response_id: Key | None = None
    mode: Literal["implicit", "explicit"] = "implicit"
    prewarm: bool = False
    ttl: CacheTtl = "30m"


class ReasoningOptions(Strict):
    context: str | None = None
    effort: Effort | None = None
    generate_summary: Summary | None = None
    mode: str | None = None
    summary: Summary | None = None

    @property
    def wants_summary(self) -> bool:
        return self.summary is not None or self.generate_summary is not None


class StreamOptions(Strict):
    """Obfuscation is never sent."""

    include_obfuscation: bool = False


class TextFormat(Strict, tag="text"):
    pass


class JsonObjectFormat(Strict, tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(Strict, tag="json_schema"):
    """The output keeps to the schema, with or without `strict`."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class NamedTool(msgspec.Struct):
    """A choice of one tool, by its type and name.

    The vendor's own tools have more fields, which are not read.
    """

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ResponsesRequest(Strict):
    """The fields of https://platform.openai.com/docs/api-reference/responses/create."""

    model: str
    input: str | Annotated[list[Item], msgspec.Meta(max_length=MAX_ITEMS)]
    include: list[str] = msgspec.field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: Length | None = None
    max_tool_calls: Count | None = None
    metadata: Metadata = msgspec.field(default_factory=dict)
    parallel_tool_calls: bool = True
    prompt_cache_key: Key | None = None
    prompt_cache_options: CacheOptions | None = None
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    text: TextOptions | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = "auto"
    tools: list[Tool] = msgspec.field(default_factory=list)
    top_logprobs: TopLogprobs = 0
    top_p: Nucleus | None = None
    truncation: Literal["auto", "disabled"] = "disabled"

    @property
    def is_prewarm(self) -> bool:
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm


class Given(NamedTuple):
    """A decoded body.

    `fields` are those of the body as they came, for the response's echo. `notepad` has what was
    found to have no effect.
    """

    request: ResponsesRequest
    fields: Mapping[str, Raw]
    notepad: Notepad

    @property
    def model(self) -> str:
        return self.request.model


LOGPROBS = "message.output_text.logprobs"
"""What `include` says where log probabilities are wanted."""
IGNORED = frozenset(
    {
        "access_programs",
        "client_metadata",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
TOLD: Mapping[str, str] = {
    "context_management": "this server compacts no conversation",
    "image": "this model reads no images",
    "personality": "this model has one personality",
}
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "background_options": (),
    "conversation": (),
    "generate": (True,),
    "moderation": (),
    "prompt": (),
    "stream_id": (),
    "type": ("response.create",),
}
