"""The bounds of a Responses request, checked before any work is done for it."""

from collections.abc import Iterator

from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.calls import check_arguments, check_input
from gateway.dialects.gathered import bounded_tokens
from gateway.dialects.responses.content import (
    AdditionalTools,
    ClientCall,
    ClientCallOutput,
    CustomTool,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    Item,
    Message,
    NamespaceTool,
    Tool,
)
from gateway.dialects.responses.request import LOGPROBS, JsonSchemaFormat, ResponsesRequest
from gateway.prompt.schemas import check_schema

_Call = FunctionCall | CustomToolCall | ClientCall
_Output = FunctionCallOutput | CustomToolCallOutput | ClientCallOutput


def check_bounds(request: ResponsesRequest, bounds: RequestBounds) -> None:
    """Raise InvalidRequest that names the field and its bound; linear in the request."""
    _check_length(request.model, "model", bounds)
    items = [] if isinstance(request.input, str) else request.input
    _check_items(items, bounds)
    num_tools = 0
    for path, tool in _all_tools(request, items):
        num_tools += 1
        if num_tools > bounds.max_tools:
            raise InvalidRequest(f"tools: may have at most {bounds.max_tools} items")
        _check_length(tool.name, f"{path}.name", bounds)
        if isinstance(tool, FunctionTool) and tool.parameters is not None:
            check_schema(tool.parameters, f"{path}.parameters", bounds)
    choice = request.tool_choice
    allowed = choice.get("tools") if isinstance(choice, dict) else None
    if isinstance(allowed, list) and len(allowed) > bounds.max_tools:
        raise InvalidRequest(f"tool_choice.tools: may have at most {bounds.max_tools} items")
    if LOGPROBS in request.include:
        name, num_probs = "max_output_tokens", request.top_logprobs + 1
        most = bounded_tokens(request.max_output_tokens, num_probs, bounds, field=name, param=name)
        request.max_output_tokens = most
    form = request.text.format if request.text else None
    if isinstance(form, JsonSchemaFormat):
        check_schema(form.schema, "text.format.schema", bounds)


def _all_tools(
    request: ResponsesRequest, items: list[Item]
) -> Iterator[tuple[str, FunctionTool | CustomTool | NamespaceTool]]:
    yield from _tools("tools", request.tools)
    for index, item in enumerate(items):
        if isinstance(item, AdditionalTools):
            yield from _tools(f"input[{index}].tools", item.tools)


def _tools(
    path: str, tools: list[Tool]
) -> Iterator[tuple[str, FunctionTool | CustomTool | NamespaceTool]]:
    """The tools, those of namespaces too. A namespace counts as one."""
    for index, tool in enumerate(tools):
        where = f"{path}[{index}]"
        if isinstance(tool, FunctionTool | CustomTool | NamespaceTool):
            yield where, tool
        if isinstance(tool, NamespaceTool):
            for number, inner in enumerate(tool.tools):
                yield f"{where}.tools[{number}]", inner


def _check_items(items: list[Item], bounds: RequestBounds) -> None:
    left = bounds.max_blocks
    for item in items:
        left -= _num_parts(item)
        if left < 0:
            raise InvalidRequest(f"input: more than {bounds.max_blocks} items and content parts")
    for index, item in enumerate(items):
        if isinstance(item, _Call | _Output):
            _check_length(item.call_id, f"input[{index}].call_id", bounds)
        if isinstance(item, FunctionCall | CustomToolCall):
            _check_length(item.name, f"input[{index}].name", bounds)
        if isinstance(item, FunctionCall):
            check_arguments(item.arguments, f"input[{index}].arguments", bounds)
        elif isinstance(item, CustomToolCall | ClientCall):
            check_input(item.input, f"input[{index}]", bounds)


def _num_parts(item: Item) -> int:
    match item:
        case Message(content=list(parts)):
            return len(parts)
        case FunctionCallOutput(output=list(parts)) | CustomToolCallOutput(output=list(parts)):
            return 1 + len(parts)
        case _:
            return 1


def _check_length(name: str, path: str, bounds: RequestBounds) -> None:
    if len(name) > bounds.max_name_characters:
        raise InvalidRequest(f"{path}: may have at most {bounds.max_name_characters} characters")
