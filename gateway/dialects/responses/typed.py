"""Gives each item and each tool of a body its type before it is decoded.

All calls of tools that ran at the client become one type. All calls that the vendor ran and whose
outputs are texts become another. An item or a tool with nothing for a model to read becomes
`hosted`: it is left out, and the answer says so.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from gateway.base.errors import InvalidRequest
from gateway.dialects.lowering import HOSTED
from gateway.dialects.responses.client_tools import runs_at_client
from gateway.prompt.ignored import Notepad

# Calls of the vendor's tools that ran at the client, each with the field of its input.
_CLIENT_CALLS = {
    "apply_patch_call": "operation",
    "computer_call": "action",
    "local_shell_call": "action",
    "shell_call": "action",
}
_CLIENT_OUTPUTS = {f"{call}_output" for call in _CLIENT_CALLS}
_HOSTED_ITEMS = frozenset(
    """
code_interpreter_call file_search_call image_generation_call mcp_approval_request
mcp_approval_response mcp_call mcp_list_tools program program_output web_search_call
""".split()
)
_HAVE_TOOLS = ("additional_tools", "tool_search_output")
_TOOLS = frozenset({"custom", "function", "namespace"})
_MAX_SHOWN = 64
_NO_SCREENSHOTS = "this model reads no screenshots"
_NO_OUTPUT = "this server has no {}, and the item has no output that a model reads"


class _Head(msgspec.Struct):
    """The fields that tell an item's type."""

    type: Any = None
    role: Any = None
    id: Any = None


_heads = msgspec.json.Decoder(_Head)
_raws = msgspec.json.Decoder(list[Raw])
_open = msgspec.json.Decoder(dict[str, Any])


def id_of(item: Raw) -> Any:
    """The item's id; None without one."""
    return _heads.decode(item).id


def typed_list(
    value: Raw, path: str, typed_one: Callable[[Raw, str, Notepad], Any], notepad: Notepad
) -> Any:
    """The list with what `typed_one` makes of each item; any other value as it is."""
    if bytes(memoryview(value)[:1]) != b"[":
        return value
    raws = _raws.decode(value)
    return [typed_one(raw, f"{path}[{index}]", notepad) for index, raw in enumerate(raws)]


def typed_item(raw: Raw, path: str, notepad: Notepad, *, known: Collection[str]) -> Any:
    """The item with its type. Items of the types in `known` are decoded as they are. Raise
    InvalidRequest for an unknown type, and for an item without a field that its type needs."""
    head = _head(raw, path)
    kind = head.type
    if kind is not None and not isinstance(kind, str):
        raise InvalidRequest(f"{path}.type: Expected 'str'", f"{path}.type")
    if kind in known and kind not in _HAVE_TOOLS:
        return raw
    if kind is None and head.role is None and head.id is not None:
        return {"type": "item_reference", "id": head.id}
    if kind is None:
        rest = bytes(raw)[1:]
        separator = b"" if rest.lstrip().startswith(b"}") else b","
        return Raw(b'{"type":"message"' + separator + rest)
    item = _open.decode(raw)
    if kind in _HAVE_TOOLS:
        tools = Raw(msgspec.json.encode(item.get("tools")))
        return {**item, "tools": typed_list(tools, f"{path}.tools", _added_tool, notepad)}
    if kind in _HOSTED_ITEMS:
        call = _hosted_call(kind, item)
        if call is None:
            notepad.ignore(path, _NO_OUTPUT.format(kind))
            return {"type": "hosted", "kind": kind}
        return {"type": "hosted_call", **call}
    if kind in _CLIENT_CALLS:
        field = _CLIENT_CALLS[kind]
        action = item.get(field)
        if isinstance(action, str):
            action = {field: action}
        if action is None and kind == "computer_call":
            action = {"actions": item.get("actions")}
        if not isinstance(action, dict):
            raise InvalidRequest(f"{path}.{field}: must be an object", f"{path}.{field}")
        call = {"type": "client_call", "kind": kind.removesuffix("_call"), "input": action}
    elif kind in _CLIENT_OUTPUTS:
        text = item.get("output") or ""
        if not isinstance(text, str):
            text = msgspec.json.encode(text).decode()
        name = kind.removesuffix("_call_output")
        call = {"type": "client_call_output", "kind": name, "text": text}
    else:
        raise InvalidRequest(f"{path}.type: Invalid value: '{kind[:_MAX_SHOWN]}'", f"{path}.type")
    # A local shell's output has the call's id in the field `id`.
    call_id = item.get("call_id") or item.get("id")
    if not isinstance(call_id, str):
        raise InvalidRequest(f"Missing required parameter: '{path}.call_id'.", f"{path}.call_id")
    return {**call, "call_id": call_id}


def _hosted_call(kind: str, item: Mapping[str, Any]) -> dict[str, Any] | None:
    """A call that the vendor's servers ran, with its output as a text. None without an output."""
    call_id = item.get("id")
    match kind:
        case "mcp_call" if item.get("output") is not None or item.get("error") is not None:
            output = item.get("output")
            return {
                "name": item.get("name"),
                "namespace": item.get("server_label"),
                "call_id": call_id,
                "arguments": item.get("arguments"),
                "output": _written(item["error"]) if output is None else output,
            }
        case "code_interpreter_call" if item.get("code"):
            outputs = item.get("outputs")
            texts = [
                output.get("logs", f"[{output.get('type')}: not shown to this model]")
                for output in (outputs if isinstance(outputs, list) else [])
                if isinstance(output, dict)
            ]
            arguments = _written({"code": item["code"]})
            output = "\n".join(map(_written, texts))
        case "file_search_call" if isinstance(item.get("results"), list) and item["results"]:
            results = (result for result in item["results"] if isinstance(result, dict))
            pairs = (
                (_written(result.get("filename")), _written(result.get("text")))
                for result in results
            )
            arguments = _written({"queries": item.get("queries")})
            output = "\n\n".join(f"{filename}\n{text}" for filename, text in pairs)
        case _:
            return None
    name = kind.removesuffix("_call")
    return {"name": name, "call_id": call_id, "arguments": arguments, "output": output}


def _written(value: Any) -> str:
    """A text as it is, None as an empty text, and any other value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def typed_tool(raw: Raw, path: str, notepad: Notepad) -> Any:
    """The tool with its type. Raise InvalidRequest for a tool without a type, and for one that
    needs screenshots."""
    kind = _head(raw, path).type
    if not isinstance(kind, str):
        raise InvalidRequest(f"Missing required parameter: '{path}.type'.", f"{path}.type")
    if kind in _TOOLS:
        return raw
    if kind.startswith("computer"):
        raise InvalidRequest(f"{path}.type: {_NO_SCREENSHOTS}", f"{path}.type")
    tool = _open.decode(raw)
    if kind == "tool_search" and tool.get("execution") == "client":
        return raw
    if runs_at_client(kind, tool):
        callers = tool.get("allowed_callers")
        return {"type": "client", "name": kind, "allowed_callers": callers}
    notepad.ignore(path, HOSTED)
    return {"type": "hosted", "kind": kind[:_MAX_SHOWN]}


def _added_tool(raw: Raw, path: str, notepad: Notepad) -> Any:
    """A tool inside a conversation. It is left out where `typed_tool` would refuse its screenshots,
    since a refusal would end the conversation."""
    kind = _head(raw, path).type
    if isinstance(kind, str) and kind.startswith("computer"):
        notepad.ignore(path, _NO_SCREENSHOTS)
        return {"type": "hosted", "kind": kind[:_MAX_SHOWN]}
    return typed_tool(raw, path, notepad)


def _head(raw: Raw, path: str) -> _Head:
    try:
        return _heads.decode(raw)
    except msgspec.ValidationError:
        raise InvalidRequest(f"{path}: must be an object", path) from None
