"""The request body of POST /v1/responses and POST /v1/responses/input_tokens.

`REFUSED` are fields that ask for what this server does not do: they may only have one of the values
listed, which change nothing. `IGNORED` do not change the answer; of those in `TOLD` the answer says
that they had no effect.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Raw

from gateway.dialects.openai.request import Count, Key, Nucleus, Temperature, TopLogprobs
from gateway.dialects.responses.content import CacheTtl, Item, Strict, Tool
from gateway.prompt.ignored import Notepad

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
