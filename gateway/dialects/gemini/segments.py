"""From a request's contents to the engine's prompt: an ordered list of segments.

Functions come first, then the system instruction, then the contents in order: each part is one
segment. Neighbours of one role are one turn. What a cached content holds stands before what the
request adds, and the end of it carries the marker.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from gateway.dialects.gemini.content import (
    KINDS,
    Blob,
    Content,
    FileData,
    FunctionCall,
    FunctionDeclaration,
    FunctionResponse,
    ResponsePart,
)
from gateway.dialects.gemini.content import Part as GivenPart
from gateway.dialects.gemini.content import Tool as GivenTool
from gateway.dialects.gemini.pending import PendingCalls
from gateway.dialects.gemini.request import Prompted
from gateway.dialects.gemini.schemas import json_schema
from gateway.prompt.ignored import Notepad
from gateway.prompt.layout import Layout, Slot, check_json
from gateway.prompt.media import Kind, Media, Unreadable, stand_in

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
