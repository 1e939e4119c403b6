"""Request bodies of generateContent, countTokens and cachedContents, and their decoding.

Whatever the bytes are, the outcome is a request, InvalidRequest or TooLarge. The model is in the
path. The rules are those of the JSON form of protocol buffers: a field has two names
(`systemInstruction` and `system_instruction`), null is a field that is not there, and an object may
stand where a list of one is meant. An unknown name is an error. What is below a free field (a
function's arguments, a schema) stays as it is. Decoding takes time that is linear in the body.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects import fields
from gateway.dialects.bodies import bound_output, check_values, read, split_complaint
from gateway.dialects.fields import Checking, Fields, Style, rules_of, undone_of


class Shape(msgspec.Struct, rename="camel", omit_defaults=True):
    """Base of every request shape. Its fields are the ones that are known."""


class Inner(Shape):
    """Base of what is inside contents and tools: unknown fields of it are left out."""


def _functions(checking: Checking, value: list[Any], path: str) -> None:
    most = checking.bounds.max_tools
    if sum(len(tool.function_declarations) + 1 for tool in value) > 2 * most:
        raise InvalidRequest(f"tools: may have at most {most} functions")


def _parts(checking: Checking, value: list[Any], path: str) -> None:
    fields.content(checking, value or None, path)


class Blob(Inner):
    """`data` is base64."""

    data: str = ""
    mime_type: str = ""
    display_name: str | None = None


class FileData(Inner):
    file_uri: str = ""
    mime_type: str = ""
    display_name: str | None = None


class FunctionCall(Inner):
    name: fields.Name = ""
    args: fields.CallInput = msgspec.field(default_factory=dict)
    id: fields.Name | None = None
    partial_args: Any = None
    will_continue: bool = False


class ResponsePart(Inner):
    """A file, such as one beside a function's response."""

    inline_data: Blob | None = None
    file_data: FileData | None = None
    media_processing: Any = None
    media_resolution: Any = None
    video_metadata: Any = None
    document_metadata: Any = None
    spreadsheet_metadata: Any = None
    audio_metadata: Any = None


class FunctionResponse(Inner):
    """`response` has `output` or `error`; without them it is the output as a whole."""

    name: fields.Name = ""
    response: dict[str, Any] = msgspec.field(default_factory=dict)
    id: fields.Name | None = None
    parts: list[ResponsePart] = msgspec.field(default_factory=list)
    scheduling: str | None = None
    will_continue: bool = False


class ExecutableCode(Inner):
    code: str = ""
    language: str = ""
    id: str | None = None


class CodeExecutionResult(Inner):
    outcome: str = ""
    output: str = ""
    id: str | None = None


class Part(ResponsePart):
    """One of the fields of `KINDS` is the part's content. The others say more about it."""

    text: str | None = None
    thought: bool = False
    thought_signature: str | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    executable_code: ExecutableCode | None = None
    code_execution_result: CodeExecutionResult | None = None
    tool_call: Any = None
    tool_response: Any = None
    part_metadata: Any = None
    audio_transcription: Any = None
    speech_metadata: Any = None


KINDS = """
text function_call function_response inline_data file_data executable_code code_execution_result
tool_call tool_response
""".split()


class Content(Inner):
    """One turn. Without a role it is the user's; `function` and `tool` are other names of that."""

    parts: Annotated[list[Part], _parts] = msgspec.field(default_factory=list)
    role: str | None = None


class FunctionDeclaration(Inner):
    """Of `parameters` (Google's schema) and `parametersJsonSchema` (JSON Schema) one is given."""

    name: fields.Name = ""
    description: str | None = None
    parameters: fields.Schema | None = None
    parameters_json_schema: fields.Schema | None = None
    response: Any = None
    response_json_schema: Any = None
    behavior: str | None = None


class Tool(Inner):
    """Functions, and tools that Google would run itself: these are left out."""

    function_declarations: list[FunctionDeclaration] = msgspec.field(default_factory=list)
    google_search: Any = None
    google_search_retrieval: Any = None
    google_maps: Any = None
    code_execution: Any = None
    url_context: Any = None
    computer_use: Any = None
    file_search: Any = None
    retrieval: Any = None
    enterprise_web_search: Any = None
    parallel_ai_search: Any = None
    exa_ai_search: Any = None
    mcp_servers: Any = None


class FunctionCallingConfig(Shape):
    mode: str = "AUTO"
    allowed_function_names: list[str] = msgspec.field(default_factory=list)
    stream_function_call_arguments: bool = False


class ToolConfig(Shape):
    function_calling_config: FunctionCallingConfig | None = None
    retrieval_config: Any = None
    include_server_side_tool_invocations: bool = False


ENUM_TYPE = "text/x.enum"


class ThinkingConfig(Shape):
    """A budget of 0 asks for no thinking, -1 lets the model decide."""

    include_thoughts: bool = False
    thinking_budget: Annotated[int, msgspec.Meta(ge=-1, le=fields.MAX_COUNT)] | None = None
    thinking_level: str | None = None


class GenerationConfig(Shape):
    """A setting that is not carried out is reported or refused by name: see `FIELDS`."""

    temperature: fields.Temperature | None = None
    top_p: fields.Share | None = None
    top_k: fields.Count | None = None
    max_output_tokens: fields.Count | None = None
    stop_sequences: Annotated[list[str], fields.stops] = msgspec.field(default_factory=list)
    candidate_count: fields.Choices = 1
    seed: fields.Seed | None = None
    response_mime_type: str = ""
    response_schema: fields.Schema | None = None
    response_json_schema: fields.Schema | None = None
    thinking_config: ThinkingConfig | None = None
    presence_penalty: fields.Penalty = 0.0
    frequency_penalty: fields.Penalty = 0.0
    response_logprobs: bool = False
    logprobs: fields.TopLogprobs | None = None
    response_modalities: list[str] = msgspec.field(default_factory=list)
    response_format: Any = None
    media_resolution: Any = None
    speech_config: Any = None
    image_config: Any = None
    audio_timestamp: Any = None
    audio_transcription_config: Any = None
    enable_affective_dialog: Any = None
    enable_enhanced_civic_answers: Any = None
    routing_config: Any = None
    model_config: Any = None
    model_selection_config: Any = None
    translation_config: Any = None
    continuation_token: Any = None

    @property
    def is_enum(self) -> bool:
        """Whether the answer is one of a schema's strings, without quotes."""
        return self.response_mime_type == ENUM_TYPE


class Prompted(Shape):
    """What every prompt here is made of: of a request, of a cached content."""

    contents: list[Content] = msgspec.field(default_factory=list)
    system_instruction: Content | None = None
    tools: Annotated[list[Tool], _functions] = msgspec.field(default_factory=list)
    tool_config: ToolConfig | None = None
    model: fields.Name = ""


class GenerateRequest(Prompted):
    """`serviceTier` and `store` change nothing here. Of `labels` the `name` alone is kept."""

    generation_config: GenerationConfig = msgspec.field(default_factory=GenerationConfig)
    cache_salt: fields.Salt | None = None
    cached_content: str | None = None
    safety_settings: list[Any] = msgspec.field(default_factory=list)
    labels: Annotated[Any, fields.metadata] = None
    service_tier: Any = None
    store: Any = None


class ReducedGenerateRequest(GenerateRequest, kw_only=True):
    """A request from which unknown fields were left out: their paths."""

    left_out: list[str]


class CountRequest(Shape):
    """Contents, or a whole request: one of them."""

    contents: list[Content] = msgspec.field(default_factory=list)
    generate_content_request: GenerateRequest | None = None
    system_instruction: Content | None = None
    tools: list[Tool] = msgspec.field(default_factory=list)
    generation_config: GenerationConfig | None = None
    model: str = ""


_MAX_SHOWN = 64
REFUSED = ("response_format", "continuation_token")
"""Settings of the generation that would change the answer and that no engine here carries out."""
FIELDS = Fields(
    style=Style("contents: more than {} parts", is_camel=True),
    rules=rules_of(GenerateRequest, Prompted),
    undone=undone_of(
        {
            **{
                f"generation_config.{field.name}": ("not done by this server",)
                for field in msgspec.structs.fields(GenerationConfig)
                if field.type is Any and field.name not in REFUSED
            },
            "safety_settings": ("this server filters nothing", []),
        }
    ),
)
ShapeT = TypeVar("ShapeT", bound=Shape)


def decode_generate(
    body: bytes, model: str, bounds: RequestBounds = DEFAULT_BOUNDS, *, is_streamed: bool = False
) -> GenerateRequest:
    """A gathered answer with log probabilities gets a limit where it has none."""
    request, left_out = decode(body, GenerateRequest, bounds)
    request.model = model
    # A field of protobuf that is empty is not there.
    request.cached_content = request.cached_content or None
    FIELDS.check(request, bounds)
    config = request.generation_config
    if config.response_logprobs and not is_streamed:
        num_probs = config.candidate_count * ((config.logprobs or 0) + 1)
        path = "generationConfig.maxOutputTokens"
        bound_output(config, "max_output_tokens", num_probs, bounds, path)
    return reduced(request, left_out)


def reduced(request: GenerateRequest, left_out: Sequence[str]) -> GenerateRequest:
    """The request, with the paths of what was left out of it."""
    if not left_out:
        return request
    return ReducedGenerateRequest(**msgspec.structs.asdict(request), left_out=[*left_out])


def decode_count(
    body: bytes, model: str, bounds: RequestBounds = DEFAULT_BOUNDS
) -> GenerateRequest:
    """The request whose prompt is counted."""
    counted, _ = decode(body, CountRequest, bounds)
    request = counted.generate_content_request
    if request is not None and counted.contents:
        raise InvalidRequest("contents: excludes generateContentRequest")
    if request is None:
        request = GenerateRequest(
            contents=counted.contents,
            system_instruction=counted.system_instruction,
            tools=counted.tools,
            generation_config=counted.generation_config or GenerationConfig(),
        )
    request.model = model
    FIELDS.check(request, bounds)
    return request


def decode(body: bytes, kind: type[ShapeT], bounds: RequestBounds) -> tuple[ShapeT, list[str]]:
    """The decoded body, and the paths of unknown fields that were left out of it."""
    check_values(body, bounds.max_json_values, bounds.max_object_keys)
    return read(lambda: typed(msgspec.json.decode(body), kind), explained)


def typed(value: Any, kind: type[ShapeT]) -> tuple[ShapeT, list[str]]:
    """As `decode`, for a value that is decoded from JSON. Raise InvalidRequest, or
    msgspec.ValidationError, which `explained` translates."""
    left_out: list[str] = []
    named = _named(value, kind, left_out)
    return msgspec.convert(named, kind, strict=False), left_out


# Cached contents. A lifetime comes as `ttl` (`"300s"`) or as `expireTime` (RFC 3339).

_TTL = re.compile(r"(\d{1,9})(?:\.(\d{1,9}))?s", re.ASCII)
_MAX_NAME = 128
_Aware = Annotated[datetime, msgspec.Meta(tz=True)]


class UpdateRequest(Shape):
    """Only the lifetime may change. Fields that only answers have may stand in the body, and are
    not read."""

    ttl: str | None = None
    expire_time: str | None = None
    name: Any = None
    model: Any = None
    display_name: Any = None
    create_time: Any = None
    update_time: Any = None
    usage_metadata: Any = None


class CreateRequest(Prompted):
    display_name: str = ""
    ttl: str | None = None
    expire_time: str | None = None
    name: Any = None
    create_time: Any = None
    update_time: Any = None
    usage_metadata: Any = None

    @property
    def prompted(self) -> Prompted:
        return Prompted(self.contents, self.system_instruction, self.tools, self.tool_config)


def decode_create(body: bytes, bounds: RequestBounds) -> tuple[CreateRequest, list[str]]:
    """The request, and the paths of unknown fields that were left out of it."""
    request, left_out = decode(body, CreateRequest, bounds)
    request.model = request.model.removeprefix("models/")
    if not request.model:
        raise InvalidRequest("model: is required")
    if len(request.display_name) > _MAX_NAME or "\0" in request.display_name:
        raise InvalidRequest(f"displayName: may have at most {_MAX_NAME} characters, and no NUL")
    FIELDS.check(msgspec.structs.replace(request.prompted, model=request.model), bounds)
    if not (request.contents or request.system_instruction or request.tools):
        raise InvalidRequest("contents: a cached content must have contents, tools or instructions")
    return request, left_out


def decode_update(body: bytes, bounds: RequestBounds) -> UpdateRequest:
    return decode(body, UpdateRequest, bounds)[0]


def expiry_of(
    request: CreateRequest | UpdateRequest, now: datetime, most_seconds: float
) -> datetime | None:
    """The time at which the content ends; None where the body does not say. Raise
    InvalidRequest."""
    if request.ttl is not None and request.expire_time is not None:
        raise InvalidRequest("ttl: excludes expireTime")
    if request.ttl is not None:
        field = "ttl"
        match = _TTL.fullmatch(request.ttl)
        if match is None:
            raise InvalidRequest("ttl: must be seconds, such as '300s'")
        seconds = float(f"{match[1]}.{match[2] or 0}")
    elif request.expire_time is not None:
        field = "expireTime"
        try:
            seconds = (msgspec.convert(request.expire_time, type=_Aware) - now).total_seconds()
        except msgspec.ValidationError:
            message = "expireTime: must be a time as RFC 3339 writes it, with its zone"
            raise InvalidRequest(message) from None
    else:
        return None
    if seconds <= 0:
        raise InvalidRequest(f"{field}: must be in the future")
    if seconds > most_seconds:
        raise InvalidRequest(f"{field}: may be at most {most_seconds:g} seconds from now")
    return now + timedelta(seconds=seconds)


def explained(complaint: str) -> InvalidRequest:
    what, path = split_complaint(complaint)
    path = path.removeprefix(".")
    what = what.replace("`", "'")
    return InvalidRequest(f"{path}: {what}" if path else what[:300], path or None)


class _Field(NamedTuple):
    """`shape` is the type of its value, or of each item of a list; None for anything else."""

    name: str
    shape: type[msgspec.Struct] | None
    is_list: bool


def _named(
    value: Any, shape: type[msgspec.Struct], left_out: list[str], path: str = ""
) -> dict[str, Any]:
    """The value of a message, by the names of `shape`.

    The paths of unknown fields inside contents and tools are added to `left_out`. Any other unknown
    field raises InvalidRequest, in the words of Google's parser.
    """
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}: must be an object" if path else "the body must be an object")
    fields = _fields(shape)
    renamed: dict[str, Any] = {}
    for key, item in value.items():
        where = f"{path}.{key}" if path else key
        if key not in fields and issubclass(shape, Inner):
            left_out.append(where)
            continue
        if key not in fields:
            cut_key = key[:_MAX_SHOWN]
            place = f" at '{path}'" if path else ""
            raise InvalidRequest(
                f'Invalid JSON payload received. Unknown name "{cut_key}"{place}: Cannot find'
                " field.",
                f"{path}.{cut_key}" if path else cut_key,
            )
        if item is None:
            continue
        name, inner, is_list = fields[key]
        if name in renamed:
            raise InvalidRequest(f"{where}: is given twice, by both of its names")
        if is_list and not isinstance(item, list):
            item = [item]
        if inner is not None and is_list:
            item = [
                _named(element, inner, left_out, f"{where}[{index}]")
                for index, element in enumerate(item)
            ]
        elif inner is not None:
            item = _named(item, inner, left_out, where)
        renamed[name] = item
    return renamed


@cache
def _fields(shape: type[msgspec.Struct]) -> Mapping[str, _Field]:
    shapes_by_name: dict[str, _Field] = {}
    info = inspect.type_info(shape)
    for field in info.fields if isinstance(info, inspect.StructType) else ():
        kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        lists = [kind.item_type for kind in kinds if isinstance(kind, inspect.ListType)]
        shapes = [kind.cls for kind in lists or kinds if isinstance(kind, inspect.StructType)]
        named_field = _Field(field.encode_name, shapes[0] if shapes else None, bool(lists))
        shapes_by_name[field.encode_name] = named_field
        shapes_by_name[field.name] = named_field
    return shapes_by_name
