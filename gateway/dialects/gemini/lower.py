"""From a request's contents to the engine's prompt: an ordered list of segments.

Functions come first, then the system instruction, then the contents in order: each part is one
segment. Neighbours of one role are one turn. What a cached content holds stands before what the
request adds, and the end of it carries the marker.
"""

import base64
import binascii
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.protocol import (
    Message,
    Part,
    Prompt,
    Role,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
    Ttl,
)
from gateway.base.errors import InvalidRequest
from gateway.dialects.gemini.request import (
    KINDS,
    Blob,
    Content,
    FileData,
    FunctionCall,
    FunctionDeclaration,
    FunctionResponse,
    Prompted,
    ResponsePart,
)
from gateway.dialects.gemini.request import Part as GivenPart
from gateway.dialects.gemini.request import Tool as GivenTool
from gateway.prompt.ignored import Notepad
from gateway.prompt.layout import Layout, Slot, check_json
from gateway.prompt.media import Kind, Media, Unreadable, stand_in


@dataclass(slots=True)
class PendingCalls:
    """In the order of the calls. Every step takes constant time over all calls of a request."""

    _calls: dict[int, tuple[str, str]] = field(default_factory=dict)
    _by_id: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    _by_name: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    _num_added: int = 0

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call_id: str, name: str) -> None:
        self._calls[self._num_added] = call_id, name
        self._by_id[call_id].append(self._num_added)
        self._by_name[name].append(self._num_added)
        self._num_added += 1

    def answered(self, call_id: str | None, name: str) -> str | None:
        """The id of the call that a response answers: the first with its id, else with its name.

        None where no call awaits it. The call does not await one any more.
        """
        number = self._first(self._by_id, call_id) if call_id else None
        if number is None:
            number = self._first(self._by_name, name)
        return None if number is None else self._calls.pop(number)[0]

    def names(self, most: int) -> Iterator[str]:
        """The names of the first calls."""
        return (name for _, name in islice(self._calls.values(), most))

    def _first(self, calls: dict[str, deque[int]], key: str) -> int | None:
        numbers = calls.get(key)
        while numbers:
            if numbers[0] in self._calls:
                return numbers[0]
            numbers.popleft()
        return None


MAX_DEPTH = 64
_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_NAMES = {
    "additional_properties": "additionalProperties",
    "any_of": "anyOf",
    "defs": "$defs",
    "max_items": "maxItems",
    "max_length": "maxLength",
    "max_properties": "maxProperties",
    "min_items": "minItems",
    "min_length": "minLength",
    "min_properties": "minProperties",
    "property_ordering": "propertyOrdering",
    "ref": "$ref",
}
_UNSPECIFIED = "TYPE_UNSPECIFIED"


def json_schema(schema: dict[str, Any], path: str, depth: int = 0) -> dict[str, Any]:
    """Raise InvalidRequest, with `path` in front, for what is no schema or is nested too deep."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{path}: nested more than {MAX_DEPTH} levels deep")
    given = {_NAMES.get(key, key): value for key, value in schema.items() if value is not None}
    is_nullable = given.pop("nullable", False) is True
    order = given.pop("propertyOrdering", None)
    made: dict[str, Any] = {}
    for key, value in given.items():
        where = f"{path}.{key}"
        match key:
            case "type" if isinstance(value, str):
                if value != _UNSPECIFIED:
                    made["type"] = value.lower()
            case "properties" | "$defs" if isinstance(value, dict):
                made[key] = {
                    name: _inner(each, f"{where}.{name[:64]}", depth)
                    for name, each in value.items()
                }
            case "items" | "additionalProperties" if isinstance(value, dict):
                made[key] = _inner(value, where, depth)
            case "anyOf" if isinstance(value, list):
                made[key] = [
                    _inner(each, f"{where}[{index}]", depth) for index, each in enumerate(value)
                ]
            case _ if key in _COUNTS and isinstance(value, str) and value.isdecimal():
                made[key] = int(value[:18])
            case "example":
                pass
            case _:
                made[key] = value
    if isinstance(order, list) and isinstance(made.get("properties"), dict):
        made["properties"] = _ordered(made["properties"], order)
    return _or_null(made) if is_nullable else made


def _inner(schema: Any, path: str, depth: int) -> Any:
    return json_schema(schema, path, depth + 1) if isinstance(schema, dict) else schema


def _ordered(properties: dict[str, Any], order: list[Any]) -> dict[str, Any]:
    first = {
        name: properties[name] for name in order if isinstance(name, str) and name in properties
    }
    return {**first, **properties}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type")
    if isinstance(schema.get("anyOf"), list):
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    if not isinstance(kind, str):
        return schema
    made = {**schema, "type": [kind, "null"]}
    if isinstance(schema.get("enum"), list):
        made["enum"] = [*schema["enum"], None]
    return made


_ROLES: dict[str | None, Role] = {
    None: "user",
    "": "user",
    "user": "user",
    "function": "user",
    "tool": "user",
    "model": "assistant",
}
_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/x-ndjson")
_HOSTED = "this server runs no tools itself"
_encode = msgspec.json.Encoder().encode


def lay_out(
    request: Prompted,
    unreadable: Unreadable,
    notepad: Notepad,
    held: Prompted | None = None,
    marker: Ttl | None = None,
) -> Layout:
    """The prompt of a request, behind what is `held` of a cached content, whose end is marked.

    Raise InvalidRequest for content that no engine could be sent.
    """
    builder = _Builder(unreadable, notepad)
    if held is not None:
        builder.add(held, "cachedContent.")
        builder.mark_end(marker)
    builder.add(request, "")
    builder.check_answered()
    return builder.layout()


@dataclass(slots=True)
class _Builder:
    _unreadable: Unreadable
    _notepad: Notepad
    _slots: list[Slot] = field(default_factory=list)
    _tools: list[Tool] = field(default_factory=list)
    _system: list[TextPart] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=list)
    _pending: PendingCalls = field(default_factory=PendingCalls)
    _num_calls: int = 0

    def layout(self) -> Layout:
        return Layout(Prompt(self._messages, self._tools, self._system), self._slots)

    def add(self, given: Prompted, where: str) -> None:
        for index, tool in enumerate(given.tools):
            self._add_tool(f"{where}tools[{index}]", tool)
        if given.system_instruction is not None:
            self._add_system(f"{where}systemInstruction", given.system_instruction)
        for index, content in enumerate(given.contents):
            self._add_content(f"{where}contents[{index}]", content)

    def mark_end(self, marker: Ttl | None) -> None:
        """Mark the last segment so far that can carry a marker."""
        for index in range(len(self._slots) - 1, -1, -1):
            if marker is not None and self._slots[index].can_carry:
                self._slots[index] = replace(self._slots[index], marker=marker, num_markers=1)
                return

    def check_answered(self) -> None:
        if self._pending:
            missing = ", ".join(name[:64] for name in self._pending.names(8))
            raise InvalidRequest(
                "contents: each function call must be answered by a function response in the turn"
                f" that follows it. Missing: {missing}"
            )

    def _add_tool(self, path: str, tool: GivenTool) -> None:
        for info in msgspec.structs.fields(tool):
            if info.name != "function_declarations" and getattr(tool, info.name) is not None:
                self._notepad.ignore(f"{path}.{info.encode_name}", _HOSTED)
        for number, function in enumerate(tool.function_declarations):
            self._add_function(f"{path}.functionDeclarations[{number}]", function)

    def _add_function(self, path: str, function: FunctionDeclaration) -> None:
        if not function.name:
            raise InvalidRequest(f"{path}.name: must not be empty")
        if function.parameters is not None and function.parameters_json_schema is not None:
            raise InvalidRequest(f"{path}.parameters: excludes parametersJsonSchema")
        schema: dict[str, Any] = {"type": "object", "properties": {}}
        if function.parameters is not None:
            schema = json_schema(function.parameters, f"{path}.parameters")
        elif function.parameters_json_schema is not None:
            schema = function.parameters_json_schema
        for name in ("response", "response_json_schema"):
            if getattr(function, name) is not None:
                self._notepad.ignore(f"{path}.{name}", "only inputs are held to a schema")
        self._slots.append(Slot(path=path))
        self._tools.append(Tool(function.name, schema, function.description))

    def _add_system(self, path: str, content: Content) -> None:
        for number, part in enumerate(content.parts):
            where = f"{path}.parts[{number}]"
            if part.text is None:
                raise InvalidRequest(f"{where}: only text is supported in a system instruction")
            self._slots.append(Slot(path=where, can_carry=bool(part.text)))
            self._system.append(TextPart(part.text))

    def _add_content(self, path: str, content: Content) -> None:
        role = _ROLES.get(content.role)
        if role is None:
            raise InvalidRequest(f"{path}.role: Please use a valid role: user, model.")
        if not content.parts:
            raise InvalidRequest(f"{path}.parts: contents.parts must not be empty.")
        if role == "assistant" and self._begins(role):
            self.check_answered()
        parts: list[Part] = []
        for number, part in enumerate(content.parts):
            parts += self._part(f"{path}.parts[{number}]", role, part)
        if not parts:
            return
        if self._begins(role):
            self._messages.append(Message(role, parts))
        else:
            self._messages[-1].parts.extend(parts)

    def _begins(self, role: Role) -> bool:
        return not self._messages or self._messages[-1].role != role

    def _part(self, path: str, role: Role, part: GivenPart) -> Sequence[Part]:
        """No part for what is not shown to the model; then its path is in `ignored`."""
        found = [name for name in KINDS if getattr(part, name) is not None]
        if len(found) != 1:
            raise InvalidRequest(
                f"{path}: must have one of text, functionCall, functionResponse,"
                " inlineData, fileData"
            )
        match found[0]:
            case "function_call" if part.function_call is not None:
                return [self._call(path, role, part.function_call)]
            case "function_response" if part.function_response is not None:
                return [self._result(path, role, part.function_response)]
            case "tool_call" | "tool_response":
                self._notepad.ignore(path, _HOSTED)
                return []
            case _:
                text = self._text(path, part)
                is_thought = part.thought
                self._slots.append(Slot(path=path, can_carry=bool(text) and not is_thought))
                return [ThinkingPart(text) if is_thought else TextPart(text)]

    def _text(self, path: str, part: GivenPart) -> str:
        if part.text is not None:
            return part.text
        if part.executable_code is not None:
            return f"```{part.executable_code.language.lower()}\n{part.executable_code.code}\n```"
        if part.code_execution_result is not None:
            return f"```\n{part.code_execution_result.output}\n```"
        if part.inline_data is not None:
            return self._blob(f"{path}.inlineData", part.inline_data)
        file = part.file_data or FileData()
        name = file.display_name or file.file_uri
        media = Media(_kind(file.mime_type), file.mime_type, name=name)
        return stand_in(f"{path}.fileData", media, self._unreadable, self._notepad)

    def _blob(self, path: str, blob: Blob) -> str:
        """The text of a text file; what stands in for any other file."""
        if blob.mime_type.startswith(_TEXT_TYPES):
            try:
                return base64.b64decode(blob.data, validate=True).decode()
            except (binascii.Error, ValueError):
                raise InvalidRequest(f"{path}.data: must be base64 of text in UTF-8") from None
        media = Media(_kind(blob.mime_type), blob.mime_type, blob.data, blob.display_name or "")
        return stand_in(path, media, self._unreadable, self._notepad)

    def _call(self, path: str, role: Role, call: FunctionCall) -> ToolUsePart:
        where = f"{path}.functionCall"
        if role != "assistant":
            raise InvalidRequest(f"{where}: only a content of role 'model' may call a function")
        if not call.name:
            raise InvalidRequest(f"{where}.name: must not be empty")
        check_json(call.args, f"{where}.args")
        self._num_calls += 1
        call_id = call.id or f"call_{self._num_calls}"
        self._pending.add(call_id, call.name)
        self._slots.append(Slot(path=path))
        return ToolUsePart(call_id, call.name, call.args)

    def _result(self, path: str, role: Role, result: FunctionResponse) -> ToolResultPart:
        where = f"{path}.functionResponse"
        if role != "user":
            raise InvalidRequest(f"{where}: only a content of role 'user' may answer a call")
        call_id = self._pending.answered(result.id, result.name)
        if call_id is None:
            raise InvalidRequest(
                f"{where}: no function call of this name awaits a response in the turn before"
            )
        check_json(result.response, f"{where}.response")
        text, is_error = _outcome(result.response)
        beside = [
            self._beside(f"{where}.parts[{number}]", part)
            for number, part in enumerate(result.parts)
        ]
        self._slots.append(Slot(path=path))
        return ToolResultPart(call_id, "\n".join([text, *beside]), is_error)

    def _beside(self, path: str, part: ResponsePart) -> str:
        return self._text(path, GivenPart(inline_data=part.inline_data, file_data=part.file_data))


def _outcome(response: dict[str, Any]) -> tuple[str, bool]:
    """The text of a response, and whether it is an error.

    Google's rule: `output` is the output, `error` is an error, else the whole is the output.
    """
    for key in ("output", "error"):
        if response.keys() == {key}:
            value = response[key]
            return (value if isinstance(value, str) else _encode(value).decode()), key == "error"
    return _encode(response).decode(), False


def _kind(mime_type: str) -> Kind:
    match mime_type.partition("/")[0]:
        case "image":
            return "image"
        case "audio":
            return "audio"
        case "video":
            return "video"
        case _:
            return "document" if mime_type == "application/pdf" else "file"
