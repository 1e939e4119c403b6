"""From raw bytes to a request, or to one error that names the field.

Whatever the bytes are, the outcome is a request, InvalidRequest or TooLarge. A top-level field that
is null is a field that is not there. Items and tools get their types first: a message may come
without one, and what this server can't do becomes `hosted`.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest, ResponseNotKept
from gateway.dialects.bodies import bounded_tokens, check_arguments, check_input, check_values
from gateway.dialects.openai.decode import (
    check_metadata,
    fields_of,
    is_neutral,
    unreadable,
    validation_error,
)
from gateway.dialects.responses.request import (
    IGNORED,
    LOGPROBS,
    REFUSED,
    TOLD,
    AdditionalTools,
    ClientCall,
    ClientCallOutput,
    CustomTool,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    Given,
    Item,
    JsonSchemaFormat,
    Message,
    NamespaceTool,
    ResponsesRequest,
    Tool,
)
from gateway.prompt.ignored import Notepad
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


_ITEMS = frozenset(
    {
        "additional_tools",
        "custom_tool_call",
        "custom_tool_call_output",
        "function_call",
        "function_call_output",
        "message",
        "reasoning",
    }
)
# Calls of the vendor's tools that ran at the client. The field says what was asked for.
_CLIENT_CALLS = {
    "apply_patch_call": "operation",
    "computer_call": "action",
    "local_shell_call": "action",
    "shell_call": "action",
    "tool_search_call": "arguments",
}
_CLIENT_OUTPUTS = frozenset(
    {"apply_patch_call_output", "computer_call_output", "local_shell_call_output"}
    | {"shell_call_output"}
)
_HOSTED_ITEMS = frozenset(
    {
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "configuration_update",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "tool_search_output",
        "web_search_call",
    }
)
_TOOLS = frozenset({"custom", "function", "namespace"})
_MAX_SHOWN = 64


class _Head(msgspec.Struct):
    """What tells one kind of item from another."""

    type: Any = None
    role: Any = None
    id: Any = None


_heads = msgspec.json.Decoder(_Head)
_raws = msgspec.json.Decoder(list[Raw])
_open = msgspec.json.Decoder(dict[str, Any])


def decode_responses(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> Given:
    check_values(body, bounds.max_json_values, bounds.max_object_keys)
    fields = {name: value for name, value in fields_of(body).items() if bytes(value) != b"null"}
    if (previous := fields.get("previous_response_id")) is not None:
        raise ResponseNotKept(_shown(previous))
    given: dict[str, Any] = {}
    notepad = Notepad()
    for name, value in fields.items():
        if name in ("metadata", "client_metadata"):
            check_metadata(len(value), bounds, name)
        if name in IGNORED:
            continue
        if name in TOLD:
            notepad.ignore(name, TOLD[name])
            continue
        if name not in REFUSED:
            given[name] = value
        elif not is_neutral(value, REFUSED[name]):
            raise InvalidRequest(f"{name}: this value is not supported by this server", name)
    try:
        if "input" in given:
            given["input"] = _typed_items(given["input"], notepad)
        if "tools" in given:
            given["tools"] = _typed_tools(given["tools"], "tools", notepad)
        request = msgspec.json.decode(msgspec.json.encode(given), type=ResponsesRequest)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from None
    check_bounds(request, bounds)
    return Given(request, fields, notepad)


def _typed_items(value: Raw, notepad: Notepad) -> Any:
    if not _is_list(value):
        return value
    return [
        _typed_item(raw, f"input[{index}]", notepad)
        for index, raw in enumerate(_raws.decode(value))
    ]


def _typed_item(raw: Raw, path: str, notepad: Notepad) -> Any:
    head = _head(raw, path)
    kind = head.type
    if kind is not None and not isinstance(kind, str):
        raise InvalidRequest(f"{path}.type: Expected 'str'", f"{path}.type")
    if kind is None:
        if head.role is None and head.id is not None:
            kind = "item_reference"
        else:
            return _with_type(raw, "message")
    if kind == "additional_tools":
        tools = _open_object(raw).get("tools")
        made = _typed_tools(Raw(msgspec.json.encode(tools)), f"{path}.tools", notepad)
        return {"type": "additional_tools", "tools": made}
    if kind in _ITEMS:
        return raw
    if kind == "item_reference":
        raise InvalidRequest(f"{path}: item references are not supported, send the item", path)
    if kind in _CLIENT_CALLS:
        return _client_call(raw, kind, path)
    if kind in _CLIENT_OUTPUTS:
        return _client_output(raw, kind, path)
    if kind in _HOSTED_ITEMS:
        notepad.ignore(path, f"this server has no {kind}")
        return {"type": "hosted", "kind": kind}
    raise InvalidRequest(f"{path}.type: Invalid value: '{kind[:_MAX_SHOWN]}'", f"{path}.type")


def _client_call(raw: Raw, kind: str, path: str) -> Any:
    item = _open_object(raw)
    field = _CLIENT_CALLS[kind]
    found = item.get(field)
    if isinstance(found, str):
        found = {field: found}
    if not isinstance(found, dict):
        raise InvalidRequest(f"{path}.{field}: must be an object", f"{path}.{field}")
    name = kind.removesuffix("_call")
    return {"type": "client_call", "kind": name, "call_id": _call_id(item, path), "input": found}


def _client_output(raw: Raw, kind: str, path: str) -> Any:
    item = _open_object(raw)
    text = item.get("output") or ""
    if not isinstance(text, str):
        text = msgspec.json.encode(text).decode()
    name = kind.removesuffix("_call_output")
    found = {"kind": name, "call_id": _call_id(item, path), "text": text}
    return {"type": "client_call_output", **found}


def _call_id(item: dict[str, Any], path: str) -> str:
    """The call's id. A local shell's output has the call's id in its own."""
    found = item.get("call_id") or item.get("id")
    if not isinstance(found, str):
        raise InvalidRequest(f"Missing required parameter: '{path}.call_id'.", f"{path}.call_id")
    return found


def _typed_tools(value: Raw, path: str, notepad: Notepad) -> Any:
    if not _is_list(value):
        return value
    made: list[Any] = []
    for index, raw in enumerate(_raws.decode(value)):
        where = f"{path}[{index}]"
        kind = _head(raw, where).type
        if not isinstance(kind, str):
            raise InvalidRequest(f"Missing required parameter: '{where}.type'.", f"{where}.type")
        if kind in _TOOLS:
            made.append(raw)
        else:
            notepad.ignore(where, "this server has no such tool")
            made.append({"type": "hosted", "kind": kind[:_MAX_SHOWN]})
    return made


def _is_list(value: Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b"["


def _head(raw: Raw, path: str) -> _Head:
    try:
        return _heads.decode(raw)
    except msgspec.ValidationError:
        raise InvalidRequest(f"{path}: must be an object", path) from None


def _open_object(raw: Raw) -> dict[str, Any]:
    return _open.decode(raw)


def _with_type(raw: Raw, kind: str) -> Raw:
    """The object with a type. It is known to be an object."""
    rest = bytes(raw)[1:]
    separator = b"" if rest.lstrip().startswith(b"}") else b","
    return Raw(b'{"type":"%s"%s' % (kind.encode(), separator) + rest)


def _shown(value: Raw) -> str:
    try:
        found = msgspec.json.decode(value, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise InvalidRequest("previous_response_id: Expected 'str'") from None
    return found[:_MAX_SHOWN]
