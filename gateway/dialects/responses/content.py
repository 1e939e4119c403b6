"""Input items, content parts and tools of the Responses API. Unknown keys are errors.

An output item of a response is accepted verbatim as an input item. `decode.py` gives every item and
every tool a `type` from here: what this server can't do has the type `hosted`.
"""

from typing import Annotated, Any, Literal

import msgspec

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
