"""Contents, parts and tools as Gemini clients send them, by Google's own JSON names.

`fields.py` brings a body to these names first: Google's parser takes `system_instruction` for
`systemInstruction`, one object for a list of one, and null for a field that is not there.
"""

from typing import Any

import msgspec


class Shape(msgspec.Struct, rename="camel", omit_defaults=True):
    """Base of every request shape. Its fields are the ones that are known; see `fields.py`."""


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
