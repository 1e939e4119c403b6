"""Request bodies of POST /v1/chat/completions and POST /v1/completions, and their decoding.

Whatever the bytes are, the outcome is a request, InvalidRequest or TooLarge. A top-level null
counts as a missing field. Unknown top-level fields are errors. A message of a response is accepted
verbatim.

`cache_control` stands where LiteLLM and OpenRouter put it: on a content part, a message, a tool
call, a tool or its function. `prompt_cache_breakpoint` is OpenAI's own marker, and stands on parts
only.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from engine.protocol import MAX_ALLOWED_TOKENS, MAX_PENALTY, MAX_STOP_TOKENS
from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects import fields
from gateway.dialects.anthropic.decode import declared_tool
from gateway.dialects.anthropic.request import CacheBreakpoint, CacheControl, Strict
from gateway.dialects.bodies import (
    bound_output,
    decode_with_foreign_tools,
    fields_of,
    read,
    split_complaint,
)
from gateway.dialects.fields import Fields, Style, rules_of, undone_of
from gateway.dialects.lowering import HELD_BY_TTL, IN_MEMORY
from gateway.dialects.unknown import UnknownFields, written
from gateway.prompt.ignored import ADVICE, ADVICE_REASON, Notepad


class _Marked(Strict):
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class Text(_Marked, tag="text", kw_only=True):
    text: str


class Refusal(Strict, tag="refusal"):
    refusal: str


class Address(msgspec.Struct):
    """An address, or a `data:` URL with the content itself."""

    url: str = ""
    detail: str | None = None


class Sound(msgspec.Struct):
    data: str = ""
    format: str = ""


class File(msgspec.Struct):
    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


# Content that is not text: see `prompt/media.py`.


class ImagePart(_Marked, tag="image_url", kw_only=True):
    image_url: Address | str


class VideoPart(_Marked, tag="video_url", kw_only=True):
    video_url: Address | str


class AudioUrlPart(_Marked, tag="audio_url", kw_only=True):
    audio_url: Address | str


class AudioPart(_Marked, tag="input_audio", kw_only=True):
    input_audio: Sound


class FilePart(_Marked, tag="file", kw_only=True):
    file: File


MediaPart = ImagePart | VideoPart | AudioUrlPart | AudioPart | FilePart
Part = Text | MediaPart


class CalledFunction(Strict):
    """The function of a call. `arguments` is a JSON object as a string. Of a call that was cut off
    it is the beginning of one."""

    name: fields.Name
    arguments: fields.Arguments


class CalledCustom(Strict):
    name: fields.Name
    input: fields.CallText


class ToolCall(Strict):
    """A call. The field with the name of the type says what is called. `index` is there where a
    client has joined the pieces of a streamed call."""

    id: fields.Name
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    type: Literal["function", "custom"] = "function"
    index: int | None = None
    cache_control: CacheControl | None = None


class _Said(Strict):
    name: str | None = None
    cache_control: CacheControl | None = None


class SystemMessage(_Said, tag_field="role", tag="system", kw_only=True):
    content: Annotated[str | list[Text], fields.content]


class DeveloperMessage(SystemMessage, tag_field="role", tag="developer"):
    """A system message by its newer name."""


class UserMessage(_Said, tag_field="role", tag="user", kw_only=True):
    content: Annotated[str | list[Part], fields.content]


class AssistantMessage(_Said, tag_field="role", tag="assistant"):
    """What the model said. The fields without a use here are those that responses and routers
    add."""

    content: Annotated[str | list[Text | Refusal] | UnsetType | None, fields.content] = UNSET
    tool_calls: Annotated[list[ToolCall], fields.blocks] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    provider_specific_fields: Any = None
    reasoning_details: Any = None
    audio: Any = None
    function_call: CalledFunction | None = None


class FunctionMessage(_Said, tag_field="role", tag="function", kw_only=True):
    """The older form of a tool's message. `name` is the function's."""

    content: str | None = None


class ToolMessage(_Said, tag_field="role", tag="tool", kw_only=True):
    tool_call_id: fields.Name
    content: Annotated[str | list[Part], fields.content]


Message = (
    SystemMessage
    | DeveloperMessage
    | UserMessage
    | AssistantMessage
    | ToolMessage
    | FunctionMessage
)


class Function(Strict):
    name: fields.Name
    description: str | None = None
    parameters: fields.Schema | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnyText(Strict, tag="text"): ...


class Grammar(Strict):
    definition: str
    syntax: Literal["lark", "regex"]


class GrammarText(Strict, tag="grammar"):
    grammar: Grammar


class Custom(Strict):
    """A tool whose input is a text."""

    name: fields.Name
    description: str | None = None
    format: AnyText | GrammarText | None = None


class Tool(Strict):
    """A tool. The field with the name of the type describes it."""

    type: Literal["function", "custom"]
    function: Function | None = None
    custom: Custom | None = None
    cache_control: CacheControl | None = None

    @property
    def name(self) -> str:
        tool = self.custom if self.type == "custom" else self.function
        return "" if tool is None else tool.name


class ForeignTool(Tool):
    """A tool of another type, which is left out of the prompt. Its function is named by its
    type."""


COMPLETION_TOKENS = 16
TopK = Annotated[int, msgspec.Meta(ge=-1, le=fields.MAX_COUNT)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Biases = Annotated[dict[str, Bias], msgspec.Meta(max_length=1024)]
Stops = Annotated[list[str], msgspec.Meta(max_length=4)]
RepetitionPenalty = Annotated[float, msgspec.Meta(gt=0, le=MAX_PENALTY)]
StopTokens = Annotated[list[fields.Count], msgspec.Meta(max_length=MAX_STOP_TOKENS)]
_AllowedLength = msgspec.Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)
AllowedTokenIds = Annotated[list[fields.Count], _AllowedLength]
Pattern = Annotated[str, fields.pattern]
Choice = Annotated[list[str], msgspec.Meta(min_length=1, max_length=1024), fields.pattern]
Key = Annotated[str, msgspec.Meta(max_length=1024)]


class StreamOptions(Strict):
    """The options of a stream. Obfuscation and running counts are never sent."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class NamedFunction(Strict):
    name: fields.Name


class NamedTool(Strict, tag="function"):
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustom(Strict, tag="custom"):
    custom: NamedFunction

    @property
    def name(self) -> str:
        return self.custom.name


class ListedTool(msgspec.Struct):
    """A tool of a choice. A vendor's own tool has no name."""

    type: str
    function: NamedFunction | None = None
    custom: NamedFunction | None = None

    @property
    def name(self) -> str | None:
        named = self.custom if self.type == "custom" else self.function
        return None if named is None else named.name


class AllowedList(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ListedTool], fields.named_tools]


class AllowedTools(Strict, tag="allowed_tools"):
    allowed_tools: AllowedList


class CacheOptions(Strict):
    """A minimum lifetime for every breakpoint; `implicit` adds one at the prompt's end."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] = "30m"


class TemplateArguments(Strict):
    """The only option of a chat template that clients may set: whether the model thinks."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class TextFormat(Strict, tag="text"): ...


class JsonObjectFormat(Strict, tag="json_object"):
    """Any JSON object."""


class JsonSchema(Strict):
    """The output keeps to the schema, whether it is `strict` or not. Without a schema the output is
    any object."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    description: str | None = None
    schema: fields.Schema | None = None
    strict: bool | None = None


class JsonSchemaFormat(Strict, tag="json_schema"):
    json_schema: JsonSchema


Format = TextFormat | JsonObjectFormat | JsonSchemaFormat


class Reasoning(msgspec.Struct):
    """OpenRouter's switch of thinking. Its other fields only ask for an improvement."""

    effort: fields.Word | None = None
    enabled: bool | None = None


class Thinking(Strict):
    """The switch of Kimi, GLM and DeepSeek. Its other fields ask for nothing that can be done."""

    type: Literal["enabled", "disabled", "auto"]
    budget_tokens: Any = None
    clear_thinking: Any = None
    effort: Any = None
    keep: Any = None


class StructuredOutputs(Strict):
    """What binds the text, in vLLM's form. A request may have one of these.

    - `choice`: the text is one of these
    - `json`: the text is JSON of this schema
    - `json_object`: the text is any JSON object
    - `regex`: the regular expression matches the whole text
    """

    choice: Choice | None = None
    json: fields.Schema | None = None
    json_object: bool | None = None
    regex: Pattern | None = None
    disable_any_whitespace: Any = None
    disable_fallback: Any = None


class GenerationRequest(Strict):
    """The fields of both calls. Those that begin with `guided_` are older names of the fields in
    `structured_outputs`.

    - `top_k`: 0 and -1 switch it off
    """

    model: fields.Name
    allowed_token_ids: AllowedTokenIds | None = None
    cache_prompt: Any = None
    cache_salt: fields.Salt | None = None
    frequency_penalty: fields.Penalty | None = None
    guided_choice: Choice | None = None
    guided_json: fields.Schema | None = None
    guided_json_object: bool | None = None
    guided_regex: Pattern | None = None
    id_slot: Any = None
    ignore_eos: bool = False
    logit_bias: Biases | None = None
    max_tokens: fields.Count | None = None
    metadata: Any = None
    min_p: fields.Share | None = None
    min_tokens: fields.Count = 0
    n: fields.Choices = 1
    nvext: Any = None
    presence_penalty: fields.Penalty | None = None
    priority: Any = None
    prompt_cache_key: Key | None = None
    prompt_cache_retention: fields.Word | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: fields.Seed | None = None
    service_tier: Any = None
    session_id: Any = None
    stop: Annotated[str | Stops, fields.stops] = msgspec.field(default_factory=list)
    stop_token_ids: StopTokens = msgspec.field(default_factory=list)
    stream: bool = False
    store: Any = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    temperature: fields.Temperature | None = None
    top_k: TopK | None = None
    top_p: fields.Share | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=100_000)]
    cache_control: CacheControl | None = None
    chat_template_kwargs: TemplateArguments | None = None
    logprobs: bool = False
    max_completion_tokens: fields.Count | None = None
    parallel_tool_calls: bool = True
    prompt_cache_options: CacheOptions | None = None
    prediction: Any = None
    reasoning: Reasoning | None = None
    reasoning_effort: fields.Word | None = None
    response_format: Format | None = None
    search_parameters: Any = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | NamedCustom | AllowedTools = (
        "auto"
    )
    tools: Annotated[list[Tool], fields.tools] = msgspec.field(default_factory=list)
    thinking: Thinking | None = None
    top_logprobs: fields.TopLogprobs = 0
    verbosity: fields.Word | None = None
    web_search_options: Any = None


class ReducedChatRequest(ChatRequest, kw_only=True):
    """A request from which unknown fields were left out. `left_out` has their paths."""

    left_out: list[str]


class CompletionRequest(GenerationRequest, kw_only=True):
    """A request with a raw prompt: a string, or a list of one string. Token ids are refused by
    name."""

    prompt: str | list[Any]


_STYLE = Style("messages: more than {} content parts and tool calls")
_SILENT = frozenset({"guided_decoding_backend", "request_id", "safety_identifier", "user"})
_NEVER = "guided_grammar prompt_logprobs truncate_prompt_tokens"
_SHARED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NEVER.split(), ()),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    **dict.fromkeys(("echo", "include_stop_str_in_output", "use_beam_search"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "bad_words": ([],),
}
CHAT = Fields(
    style=_STYLE,
    rules=rules_of(ChatRequest, ForeignTool),
    silent=_SILENT,
    refused={
        **_SHARED,
        "audio": (),
        "continue_final_message": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
    },
    undone=undone_of(
        {
            "verbosity": ("this model has one verbosity", "medium"),
            "prompt_cache_retention": (HELD_BY_TTL, *IN_MEMORY),
            "prediction": ("nothing is predicted: it would only be faster",),
            "store": ("no answer is kept", False),
            "service_tier": ("there is one tier", "auto", "default"),
            **dict.fromkeys(
                ("search_parameters", "web_search_options"), ("this server searches nothing",)
            ),
            **dict.fromkeys(ADVICE, (ADVICE_REASON,)),
        }
    ),
)
COMPLETIONS = Fields(
    style=_STYLE,
    rules=rules_of(CompletionRequest),
    silent=_SILENT,
    refused={
        **_SHARED,
        "add_special_tokens": (True,),
        "logprobs": (),
        "response_format": ({"type": "text"},),
        "suffix": ("",),
    },
    undone=undone_of(
        {
            "prompt_cache_retention": ("a raw prompt has no breakpoints", *IN_MEMORY),
            **dict.fromkeys(ADVICE, (ADVICE_REASON,)),
        }
    ),
)
RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest)


_OWN_TYPES = frozenset({"function", "custom"})
_tool = msgspec.json.Decoder(Tool)
_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_UNKNOWN = UnknownFields(
    ChatRequest,
    ("messages", "tools"),
    markers=("cache_control", "prompt_cache_breakpoint"),
    marker_types=(CacheControl, CacheBreakpoint),
    is_read=lambda name, item: name != "tools" or item.get("type") in _OWN_TYPES,
)


def decode_chat(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> ChatRequest:
    """Decode a body. An answer without a stream and with log probabilities gets a limit where it
    has none. Raise InvalidRequest, or TooLarge for a body beyond the bounds."""
    fields = CHAT.part(fields_of(body, bounds), bounds, Notepad())
    left_out: list[str] = []

    def typed() -> ChatRequest:
        try:
            return _typed(fields)
        except msgspec.ValidationError:
            rest, places = _UNKNOWN.leave_out(fields)
            left_out.extend(map(written, places))
            if not places:
                raise
        return _typed(rest)

    request = read(typed, explained)
    for index, tool in enumerate(request.tools):
        _check_kind(tool, f"tools[{index}]")
    for index, message in enumerate(request.messages):
        if isinstance(message, AssistantMessage):
            for number, call in enumerate(message.tool_calls or []):
                _check_kind(call, f"messages[{index}].tool_calls[{number}]")
    CHAT.check(request, bounds)
    if request.logprobs and not request.stream:
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        bound_output(request, name, request.n * (request.top_logprobs + 1), bounds)
    if left_out:
        request = ReducedChatRequest(**msgspec.structs.asdict(request), left_out=left_out)
    return request


def _check_kind(tool: Tool | ToolCall, path: str) -> None:
    """Raise InvalidRequest where the field with the name of the type is missing."""
    if (tool.custom if tool.type == "custom" else tool.function) is None:
        where = f"{path}.{tool.type}"
        raise InvalidRequest(f"Missing required parameter: '{where}'.", where)


def _typed(fields: Mapping[str, Raw]) -> ChatRequest:
    """The request of these fields. Raise msgspec.ValidationError with the path in the whole
    body."""
    return decode_with_foreign_tools(
        _chat, msgspec.json.encode(fields), _OWN_TYPES, _tool.decode, _foreign
    )


def decode_completion(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> CompletionRequest:
    """Decode a body. Raise InvalidRequest, or TooLarge for one beyond the bounds."""
    fields = COMPLETIONS.part(fields_of(body, bounds), bounds, Notepad())
    request = read(lambda: _completion.decode(msgspec.json.encode(fields)), explained)
    COMPLETIONS.check(request, bounds)
    return request


def _foreign(tool: Raw) -> Tool:
    declared = declared_tool(tool)
    function = Function(name=declared.type)
    return ForeignTool("function", function, cache_control=declared.cache_control)


_FIELD = re.compile(r"^Object (missing required|contains unknown) field `(.*)`$", re.DOTALL)
_VALUE = re.compile(r"^Invalid (?:enum )?value '?(.*?)'?$", re.DOTALL)
_MAX_SHOWN = 64


def explained(complaint: str) -> InvalidRequest:
    """The refusal for a decoder's `complaint`, in OpenAI's words."""
    reason, path = split_complaint(complaint)
    path = path.removeprefix(".")
    field = _FIELD.match(reason)
    if field:
        name = field[2][:_MAX_SHOWN]
        where = f"{path}.{name}" if path else name
        if field[1] == "missing required":
            return InvalidRequest(f"Missing required parameter: '{where}'.", where)
        return InvalidRequest(f"Unrecognized request argument supplied: {where}", where)
    value = _VALUE.match(reason)
    words = f"Invalid value: '{value[1][:_MAX_SHOWN]}'" if value else reason.replace("`", "'")
    return InvalidRequest(f"{path}: {words}" if path else words, path or None)
