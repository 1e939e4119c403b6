"""Request bodies of generateContent, streamGenerateContent and countTokens.

The model is in the path; `decode.py` puts it into the request. It also brings a body to the names
here: Google's parser takes `system_instruction` for `systemInstruction`, one object for a list of
one, and null for a field that is not there.
"""

from typing import Annotated, Any

import msgspec

from engine.protocol import MAX_LOGPROBS


class Shape(msgspec.Struct, rename="camel", omit_defaults=True):
    """Base of every request shape. Its fields are the ones that are known; see `decode.py`."""


class Blob(Shape):
    """`data` is base64."""

    data: str = ""
    mime_type: str = ""
    display_name: str | None = None


class FileData(Shape):
    file_uri: str = ""
    mime_type: str = ""
    display_name: str | None = None


class FunctionCall(Shape):
    name: str = ""
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    id: str | None = None
    partial_args: Any = None
    will_continue: bool = False


class ResponsePart(Shape):
    """A file beside a function's response."""

    inline_data: Blob | None = None
    file_data: FileData | None = None
    media_processing: Any = None
    media_resolution: Any = None
    video_metadata: Any = None
    document_metadata: Any = None
    spreadsheet_metadata: Any = None
    audio_metadata: Any = None


class FunctionResponse(Shape):
    """`response` has `output` or `error`; without them it is the output as a whole."""

    name: str = ""
    response: dict[str, Any] = msgspec.field(default_factory=dict)
    id: str | None = None
    parts: list[ResponsePart] = msgspec.field(default_factory=list)
    scheduling: str | None = None
    will_continue: bool = False


class ExecutableCode(Shape):
    code: str = ""
    language: str = ""
    id: str | None = None


class CodeExecutionResult(Shape):
    outcome: str = ""
    output: str = ""
    id: str | None = None


class Part(Shape):
    """One of the fields of `KINDS` is the part's content. The others say more about it."""

    text: str | None = None
    thought: bool = False
    thought_signature: str | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    executable_code: ExecutableCode | None = None
    code_execution_result: CodeExecutionResult | None = None
    tool_call: Any = None
    tool_response: Any = None
    part_metadata: Any = None
    audio_transcription: Any = None
    media_processing: Any = None
    media_resolution: Any = None
    video_metadata: Any = None
    speech_metadata: Any = None
    document_metadata: Any = None
    spreadsheet_metadata: Any = None
    audio_metadata: Any = None


KINDS = (
    "text",
    "function_call",
    "function_response",
    "inline_data",
    "file_data",
    "executable_code",
    "code_execution_result",
    "tool_call",
    "tool_response",
)


class Content(Shape):
    """One turn. Without a role it is the user's; `function` and `tool` are other names of that."""

    parts: list[Part] = msgspec.field(default_factory=list)
    role: str | None = None


class FunctionDeclaration(Shape):
    """Of `parameters` (Google's schema) and `parametersJsonSchema` (JSON Schema) one is given."""

    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None
    response: Any = None
    response_json_schema: Any = None
    behavior: str | None = None


class Tool(Shape):
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


_MAX_COUNT = 1_000_000_000
MAX_CANDIDATES = 16
ENUM_TYPE = "text/x.enum"
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]


class ThinkingConfig(Shape):
    """A budget of 0 asks for no thinking, -1 lets the model decide."""

    include_thoughts: bool = False
    thinking_budget: Annotated[int, msgspec.Meta(ge=-1, le=_MAX_COUNT)] | None = None
    thinking_level: str | None = None


class GenerationConfig(Shape):
    """`ask.py` says what is done with each field; what is not done is told or refused by name."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Count | None = None
    max_output_tokens: Count | None = None
    stop_sequences: list[str] = msgspec.field(default_factory=list)
    candidate_count: Annotated[int, msgspec.Meta(ge=1, le=MAX_CANDIDATES)] = 1
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    response_mime_type: str = ""
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    thinking_config: ThinkingConfig | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    response_logprobs: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
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
    tools: list[Tool] = msgspec.field(default_factory=list)
    tool_config: ToolConfig | None = None
    model: str = ""


class GenerateRequest(Prompted):
    """`serviceTier` and `store` change nothing here. Of `labels` the `name` alone is kept."""

    generation_config: GenerationConfig = msgspec.field(default_factory=GenerationConfig)
    cached_content: str | None = None
    safety_settings: list[Any] = msgspec.field(default_factory=list)
    labels: Any = None
    service_tier: Any = None
    store: Any = None


class CountRequest(Shape):
    """Contents, or a whole request: one of them."""

    contents: list[Content] = msgspec.field(default_factory=list)
    generate_content_request: GenerateRequest | None = None
    system_instruction: Content | None = None
    tools: list[Tool] = msgspec.field(default_factory=list)
    generation_config: GenerationConfig | None = None
    model: str = ""
