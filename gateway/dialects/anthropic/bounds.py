"""The bounds of a Messages request, checked before any work is done for it."""

import msgspec

from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.content import (
    Block,
    ContentSource,
    Document,
    SearchResult,
    ToolResult,
    ToolUse,
)
from gateway.dialects.anthropic.request import ChoiceTool, CountTokensRequest, MessagesRequest
from gateway.dialects.calls import check_input
from gateway.prompt.schemas import check_schema

_MAX_EDITS = 16


def check_bounds(request: CountTokensRequest, bounds: RequestBounds) -> None:
    """Raise InvalidRequest that names the field and its bound; linear in the request."""
    _check_blocks(request, bounds)
    if len(request.tools) > bounds.max_tools:
        raise InvalidRequest(f"tools: List should have at most {bounds.max_tools} items")
    for index, tool in enumerate(request.tools):
        _check_length(tool.name, f"tools.{index}.name", bounds)
        check_schema(tool.input_schema, f"tools.{index}.input_schema", bounds)
    form = request.form
    if form is not None:
        check_schema(form.schema, f"{request.form_path}.schema", bounds)
    _check_length(request.model, "model", bounds)
    if isinstance(request.tool_choice, ChoiceTool):
        _check_length(request.tool_choice.name, "tool_choice.name", bounds)
    edits = request.context_management.edits if request.context_management else None
    if edits is not None and len(edits) > _MAX_EDITS:
        raise InvalidRequest(
            f"context_management.edits: List should have at most {_MAX_EDITS} items"
        )
    if isinstance(request, MessagesRequest):
        _check_generation(request, bounds)


def _check_generation(request: MessagesRequest, bounds: RequestBounds) -> None:
    stops = request.stop_sequences
    if len(stops) > bounds.max_stop_sequences:
        raise InvalidRequest(
            f"stop_sequences: List should have at most {bounds.max_stop_sequences} items"
        )
    for index, stop in enumerate(stops):
        if len(stop) > bounds.max_stop_characters:
            raise InvalidRequest(
                f"stop_sequences.{index}: String should have at most"
                f" {bounds.max_stop_characters} characters"
            )
    if len(msgspec.json.encode(request.metadata)) > bounds.max_metadata_bytes:
        raise InvalidRequest(f"metadata: should have at most {bounds.max_metadata_bytes} bytes")


def _check_blocks(request: CountTokensRequest, bounds: RequestBounds) -> None:
    """Count segments and nested blocks. The longest lists are counted first."""
    system = request.system
    left = bounds.max_blocks - (len(system) if isinstance(system, list) else system is not None)
    for message in request.messages:
        left -= len(message.content) if isinstance(message.content, list) else 1
        if left < 0:
            raise _too_many(bounds)
    for index, message in enumerate(request.messages):
        if not isinstance(message.content, list):
            continue
        for position, block in enumerate(message.content):
            left -= _num_nested(block)
            if left < 0:
                raise _too_many(bounds)
            if isinstance(block, ToolUse | ToolResult):
                _check_call(f"messages.{index}.content.{position}", block, bounds)


def _too_many(bounds: RequestBounds) -> InvalidRequest:
    return InvalidRequest(f"messages: more than {bounds.max_blocks} content blocks in the request")


def _num_nested(block: Block) -> int:
    match block:
        case ToolResult(content=list() as content):
            return len(content) + sum(_num_nested(inner) for inner in content)
        case SearchResult(content=content):
            return len(content)
        case Document(source=ContentSource(content=list() as content)):
            return len(content)
        case _:
            return 0


def _check_call(path: str, block: ToolUse | ToolResult, bounds: RequestBounds) -> None:
    if isinstance(block, ToolUse):
        _check_length(block.id, f"{path}.tool_use.id", bounds)
        _check_length(block.name, f"{path}.tool_use.name", bounds)
        check_input(block.input, f"{path}.tool_use.input", bounds)
    else:
        _check_length(block.tool_use_id, f"{path}.tool_result.tool_use_id", bounds)


def _check_length(name: str, path: str, bounds: RequestBounds) -> None:
    if len(name) > bounds.max_name_characters:
        raise InvalidRequest(
            f"{path}: String should have at most {bounds.max_name_characters} characters"
        )
