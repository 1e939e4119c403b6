"""From a Messages request's content to the plan of its prompt: an ordered list of segments.

Tools come first, then system blocks, then message blocks, whatever the order of the JSON keys.
Every tool and every content block is exactly one segment; a string is one text block. Messages
of one role that follow each other are merged, their blocks stay apart.

A deferred tool (`defer_loading`) is not in the beginning of the prompt. A `tool_reference` or a
`tool_addition` names it; from there on its definition is in the conversation, behind what was
cached, and the model may call it. Naming one thus loses no prefix.
"""

from base64 import b64decode
from binascii import Error as Base64Error
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.protocol import Message as PromptMessage
from engine.protocol import Part, Prompt, TextPart, ThinkingPart, ToolResultPart, ToolUsePart
from engine.protocol import Tool as PromptTool
from gateway.base.errors import InvalidRequest
from gateway.base.grants import AutoCache
from gateway.dialects.anthropic.request import (
    Base64Source,
    Block,
    CacheControl,
    Compaction,
    ContentSource,
    CountTokensRequest,
    Document,
    FileSource,
    ForeignTool,
    Image,
    Message,
    Nested,
    Nonce,
    RedactedThinking,
    SearchResult,
    Text,
    TextSource,
    Thinking,
    Tool,
    ToolAddition,
    ToolReference,
    ToolRemoval,
    ToolResult,
    ToolUse,
    UrlSource,
)
from gateway.prompt.ignored import Notepad
from gateway.prompt.layout import Layout, Slot, check_json
from gateway.prompt.media import Kind, Media, Unreadable, stand_in
from gateway.prompt.plan import Plan, make_plan
from gateway.prompt.plan_memory import PlanMemory

_NO_CITATIONS = "this model cites nothing"


def search_text(path: str, block: SearchResult, notepad: Notepad) -> str:
    if block.citations and block.citations.enabled:
        notepad.ignore(f"{path}.search_result.citations", _NO_CITATIONS)
    lines = [block.title, block.source, *(text.text for text in block.content)]
    return "\n".join(line for line in lines if line)


def image_text(path: str, block: Image, unreadable: Unreadable, notepad: Notepad) -> str:
    return stand_in(path, _media("image", block.source), unreadable, notepad)


def document_text(path: str, block: Document, unreadable: Unreadable, notepad: Notepad) -> str:
    """Title, context and text. A PDF, an address or a file's id has a placeholder for its text."""
    if block.citations and block.citations.enabled:
        notepad.ignore(f"{path}.document.citations", _NO_CITATIONS)
    body = _body(f"{path}.document.source", block.source, unreadable, notepad)
    text = "\n".join(line for line in (block.title, block.context, body) if line)
    if not text.strip():
        raise InvalidRequest(f"{path}.document.source: the document is empty")
    return text


def _body(
    path: str,
    source: TextSource | ContentSource | Base64Source | UrlSource | FileSource,
    unreadable: Unreadable,
    notepad: Notepad,
) -> str:
    match source:
        case TextSource():
            return source.data
        case ContentSource(content=str(text)):
            return text
        case ContentSource(content=list(blocks)):
            return "\n".join(
                block.text
                if isinstance(block, Text)
                else image_text(f"{path}.content.{index}", block, unreadable, notepad)
                for index, block in enumerate(blocks)
            )
        case Base64Source(media_type=kind) if kind.startswith("text/"):
            return _decoded(path, source)
        case Base64Source() | UrlSource() | FileSource():
            return stand_in(path, _media("document", source), unreadable, notepad)
    raise AssertionError(source)


def _decoded(path: str, source: Base64Source) -> str:
    try:
        return b64decode(source.data, validate=True).decode()
    except (Base64Error, ValueError):
        raise InvalidRequest(f"{path}.data: Input should be base64 of UTF-8") from None


def _media(kind: Kind, source: Base64Source | UrlSource | FileSource) -> Media:
    match source:
        case Base64Source():
            return Media(kind, source.media_type, source.data)
        case UrlSource():
            return Media(kind, name=source.url)
        case FileSource():
            return Media(kind, name=source.file_id)


def foreign_text(path: str, block: Block, unreadable: Unreadable, notepad: Notepad) -> str:
    """A block that only the vendor's servers write and read."""
    kind = block.__struct_config__.tag
    if unreadable == "refuse":
        raise InvalidRequest(
            f"{path}: content blocks of type '{kind}' are not supported by this server"
        )
    notepad.ignore(path, f"not shown to this model: {kind}")
    return f"[{kind}: not shown to this model]"


_encode = msgspec.json.Encoder().encode
MAX_NAMED = 512
_SEARCH = "tool_search_tool"
_NO_SERVER = "this server runs no tools of its own, and the model knows no such tool"


class Tools:
    """Read the conversation in its order: what a reference shows depends on those before it."""

    def __init__(self, tools: list[Tool], notepad: Notepad) -> None:
        self._tools = tools
        self._notepad = notepad
        self._waiting: dict[str, PromptTool] = {}
        self._names = {tool.name for tool in tools}
        self._named: dict[str, PromptTool] = {}
        self._defers = self._may_defer()

    @property
    def named(self) -> list[PromptTool]:
        """The deferred tools that the conversation names, in its order, `MAX_NAMED` at most."""
        return list(islice(self._named.values(), MAX_NAMED))

    def shown(self, index: int, tool: Tool) -> PromptTool | None:
        """The tool as the prompt begins with it; None for one that is not in its beginning."""
        path = f"tools.{index}"
        if isinstance(tool, ForeignTool):
            what = _NO_SERVER
            if tool.name.startswith(_SEARCH):
                what = "this server searches no tools: deferred tools are shown from the start"
            self._notepad.ignore(path, f"{tool.name[:64]}: {what}")
            return None
        made = self._checked(path, tool)
        if "direct" not in tool.allowed_callers:
            self._notepad.ignore(path, "no server tool can call it here, so it is left out")
            return None
        if not tool.defer_loading or not self._defers:
            return made
        self._waiting[tool.name] = made
        return None

    def name(self, path: str, name: str) -> str:
        """The text of a reference: the tool's definition where it is named for the first time."""
        tool = self._waiting.pop(name, None)
        if tool is not None:
            return self._show(tool)
        if name not in self._names:
            self._notepad.ignore(path, "there is no such tool in `tools`")
        return f"Tool: {name}"

    def add(self, path: str, tool: dict[str, Any]) -> str:
        """The text of an addition: of a tool by its name, or by its definition."""
        match tool:
            case {"type": "tool_reference", "name": str(name)}:
                return self.name(path, name)
            case {"type": "tool_definition", "definition": {"name": str(name)} as definition}:
                schema = definition.get("input_schema")
                if isinstance(schema, dict) and definition.get("type") in (None, "custom"):
                    check_json(schema, f"{path}.tool.definition.input_schema")
                    about = definition.get("description")
                    description = about if isinstance(about, str) else None
                    return self._show(PromptTool(name, schema, description))
        self._notepad.ignore(path, _NO_SERVER)
        return "[tool_addition: not shown to this model]"

    def remove(self, path: str, tool: dict[str, Any]) -> str:
        name = tool.get("name")
        if not isinstance(name, str):
            self._notepad.ignore(path, _NO_SERVER)
            return "[tool_removal: not shown to this model]"
        self._named.pop(name, None)
        self._notepad.ignore(path, "the model is told, and may still call it")
        return f"The tool {name} is not available any more."

    def _show(self, tool: PromptTool) -> str:
        self._named.pop(tool.name, None)
        self._named[tool.name] = tool
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema
        return "Tool: " + _encode({"type": "function", "function": function}).decode()

    def _may_defer(self) -> bool:
        """Whether somebody names the deferred tools, and the template shows how to call one."""
        if any(isinstance(t, ForeignTool) and t.name.startswith(_SEARCH) for t in self._tools):
            return False
        own = [tool for tool in self._tools if not isinstance(tool, ForeignTool)]
        if not any(tool.defer_loading for tool in own):
            return True
        if all(tool.defer_loading for tool in own):
            self._notepad.ignore(
                "tools", "all are deferred, and a model learns from one how to call: all are shown"
            )
            return False
        return True

    def _checked(self, path: str, tool: Tool) -> PromptTool:
        if tool.defer_loading and tool.cache_control:
            raise InvalidRequest(
                f"Tool '{tool.name[:64]}' cannot have both defer_loading=true and cache_control"
                " set. Tools with defer_loading cannot use prompt caching."
            )
        if not tool.name:
            raise InvalidRequest(f"{path}.name: String should have at least 1 character")
        if tool.input_examples:
            self._notepad.ignore(f"{path}.input_examples", "not shown to this model")
        if tool.allowed_callers != ["direct"]:
            self._notepad.ignore(f"{path}.allowed_callers", "only the model itself calls tools")
        return PromptTool(tool.name, tool.input_schema, tool.description, strict=tool.strict)


_ROLE_OF = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user"}
_IN_SYSTEM = (Text, ToolAddition, ToolRemoval)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What reading one request gathers."""

    notepad: Notepad
    unreadable: Unreadable
    tools: Tools
    slots: list[Slot]


def lay_out(
    request: CountTokensRequest,
    notepad: Notepad | None = None,
    unreadable: Unreadable = "placeholder",
) -> Layout:
    """Raise InvalidRequest for content that can't be sent to an engine."""
    pad = Notepad() if notepad is None else notepad
    reading = _Reading(pad, unreadable, Tools(request.tools, pad), [])
    tools = _tools(request, reading)
    system = _system(request, reading.slots)
    messages: list[PromptMessage] = []
    for index, message in enumerate(request.messages):
        if message.only_sets_effort:
            continue
        parts = _parts(index, message, reading)
        if messages and messages[-1].role == message.role:
            messages[-1].parts.extend(parts)
        else:
            messages.append(PromptMessage(message.role, parts))
    prompt = Prompt(messages, tools, system, named_tools=reading.tools.named)
    return Layout(prompt, reading.slots)


def _tools(request: CountTokensRequest, reading: _Reading) -> list[PromptTool]:
    shown: list[PromptTool] = []
    for index, tool in enumerate(request.tools):
        slot, made = _slot(f"tools.{index}", tool.cache_control), reading.tools.shown(index, tool)
        if made is None:
            slot = replace(slot, can_carry=False, is_absent=True)
        else:
            shown.append(made)
        reading.slots.append(slot)
    return shown


def _system(request: CountTokensRequest, slots: list[Slot]) -> list[TextPart]:
    system = request.system or []
    blocks = [Text(text=system)] if isinstance(system, str) else system
    for index, block in enumerate(blocks):
        path = f"system.{index}"
        if not block.text:
            if block.cache_control:
                raise InvalidRequest(f"{path}: cache_control cannot be set for empty text blocks")
            raise InvalidRequest("system: text content blocks must be non-empty")
        slot = _slot(path, block.cache_control)
        if isinstance(block, Nonce):
            slot = replace(slot, can_carry=False, is_absent=True)
        slots.append(slot)
    return [TextPart(block.text) for block in blocks if not isinstance(block, Nonce)]


def _parts(index: int, message: Message, reading: _Reading) -> list[Part]:
    if isinstance(message.content, str):
        path = f"messages.{index}.content.0"
        _check_text(path, message.content, None)
        reading.slots.append(Slot(path=path))
        return [TextPart(message.content)]
    if not message.content:
        raise InvalidRequest(f"messages.{index}: all messages must have non-empty content")
    return [
        _part(f"messages.{index}.content.{position}", message, block, reading)
        for position, block in enumerate(message.content)
    ]


def _part(path: str, message: Message, block: Block, reading: _Reading) -> Part:
    kind = block.__struct_config__.tag
    wanted = _ROLE_OF.get(str(kind), message.role)
    if wanted != message.role or (message.role == "system" and not isinstance(block, _IN_SYSTEM)):
        where = f"`{wanted}`" if wanted != message.role else "`user` and `assistant`"
        raise InvalidRequest(f"{path}: `{kind}` blocks can only be in {where} messages")
    slots = reading.slots
    match block:
        case Text():
            _check_text(path, block.text, block.cache_control)
            slots.append(_slot(path, block.cache_control))
            return TextPart(block.text)
        case Thinking():
            slots.append(Slot(path=path, can_carry=False))
            return ThinkingPart(block.thinking)
        case RedactedThinking():
            slots.append(Slot(path=path, can_carry=False))
            reading.notepad.ignore(path, "this model can't read another one's redacted thinking")
            return ThinkingPart("")
        case ToolUse():
            check_json(block.input, f"{path}.tool_use.input")
            slots.append(_slot(path, block.cache_control))
            return ToolUsePart(block.id, block.name, block.input)
        case ToolResult():
            nested = [] if isinstance(block.content, str) else block.content
            slots.append(_slot(path, block.cache_control, _nested_markers(path, nested)))
            text = _flatten(path, block, reading)
            return ToolResultPart(block.tool_use_id, text, block.is_error)
        case Document():
            slots.append(_slot(path, block.cache_control, _document_markers(path, block)))
        case _:
            slots.append(_slot(path, block.cache_control))
    return TextPart(_text_of(path, block, reading))


def _text_of(path: str, block: Block, reading: _Reading) -> str:
    """The text of a block that becomes one."""
    match block:
        case Text():
            return block.text
        case SearchResult():
            return search_text(path, block, reading.notepad)
        case Document():
            return document_text(path, block, reading.unreadable, reading.notepad)
        case Image():
            return image_text(path, block, reading.unreadable, reading.notepad)
        case ToolReference():
            return reading.tools.name(path, block.tool_name)
        case ToolAddition():
            check_json(block.tool, f"{path}.tool_addition.tool")
            return reading.tools.add(path, block.tool)
        case ToolRemoval():
            return reading.tools.remove(path, block.tool)
        case Compaction(content=str(summary)) if summary.strip():
            return summary
        case _:
            return foreign_text(path, block, reading.unreadable, reading.notepad)


def _check_text(path: str, text: str, marker: CacheControl | None) -> None:
    if not text:
        if marker:
            raise InvalidRequest(f"{path}.text: cache_control cannot be set for empty text blocks")
        raise InvalidRequest("messages: text content blocks must be non-empty")
    if text.isspace():
        raise InvalidRequest("messages: text content blocks must contain non-whitespace text")


def _slot(path: str, marker: CacheControl | None, nested: list[CacheControl] | None = None) -> Slot:
    """A marker on the last nested block counts as one on its parent."""
    if marker is None and not nested:
        return Slot(path=path)
    markers = [found for found in (marker, *(nested or [])) if found]
    if len({found.ttl for found in markers}) > 1:
        raise InvalidRequest(
            f"{path}.cache_control.ttl: must match the ttl of the marker on its last nested block"
        )
    return Slot(path=path, marker=markers[0].ttl if markers else None, num_markers=len(markers))


def _nested_markers(path: str, blocks: list[Nested]) -> list[CacheControl]:
    """The markers inside a tool result, also in a document. Only the last block may have any."""
    for index, block in enumerate(blocks[:-1]):
        if block.cache_control:
            raise InvalidRequest(
                f"{path}.tool_result.content.{index}.cache_control: only the last block of"
                " `content` may carry cache_control"
            )
    if not blocks:
        return []
    last = blocks[-1]
    where = f"{path}.tool_result.content.{len(blocks) - 1}"
    if isinstance(last, Text) and not last.text and last.cache_control:
        raise InvalidRequest(f"{where}.text: cache_control cannot be set for empty text blocks")
    inner = _document_markers(where, last) if isinstance(last, Document) else []
    return [marker for marker in (last.cache_control, *inner) if marker]


def _document_markers(path: str, document: Document) -> list[CacheControl]:
    source = document.source
    if not isinstance(source, ContentSource) or isinstance(source.content, str):
        return []
    for index, block in enumerate(source.content[:-1]):
        if block.cache_control:
            raise InvalidRequest(
                f"{path}.document.source.content.{index}.cache_control: only the last block of"
                " `content` may carry cache_control"
            )
    return [block.cache_control for block in source.content[-1:] if block.cache_control]


def _flatten(path: str, result: ToolResult, reading: _Reading) -> str:
    if isinstance(result.content, str):
        return result.content
    return "\n".join(
        _text_of(f"{path}.tool_result.content.{index}", block, reading)
        for index, block in enumerate(result.content)
    )


def plan_of(
    request: CountTokensRequest,
    scope: str,
    notepad: Notepad | None = None,
    unreadable: Unreadable = "placeholder",
    memory: PlanMemory | None = None,
    policy: AutoCache | None = None,
) -> Plan:
    """Raise InvalidRequest for content that can't be sent to an engine.

    `memory` has what earlier plans made of the same prefixes. `policy` is for a request in which
    nothing is marked.
    """
    layout = lay_out(request, notepad, unreadable)
    if not layout.prompt.messages:
        raise InvalidRequest("messages: at least one message is required")
    automatic = request.cache_control.ttl if request.cache_control else None
    if policy and (automatic or any(slot.num_markers for slot in layout.slots)):
        policy = None
    plan = make_plan(layout, automatic, scope, policy, memory)
    _check_roles(layout.prompt.messages)
    if plan.has_calls:
        _check_tool_results(layout.prompt.messages)
    return plan


def _check_roles(messages: list[PromptMessage]) -> None:
    if messages[0].role == "system":
        raise InvalidRequest("messages.0: role 'system' cannot come first")
    for index, message in enumerate(messages):
        if message.role != "system":
            continue
        if messages[index - 1].role != "user":
            raise InvalidRequest(f"messages.{index}: role 'system' must follow a user turn")
        if index + 1 < len(messages) and messages[index + 1].role != "assistant":
            raise InvalidRequest(
                f"messages.{index}: role 'system' must be last or followed by an assistant turn"
            )
    if messages[-1].role == "assistant":
        raise InvalidRequest(
            "This model does not support assistant message prefill. The conversation must end with"
            " a user message."
        )


def _check_tool_results(messages: list[PromptMessage]) -> None:
    """Check that the next merged turn answers each tool call, and nothing else."""
    pending: list[str] = []
    for index, message in enumerate(messages):
        if message.role == "system":
            continue
        answered = [p.tool_use_id for p in message.parts if isinstance(p, ToolResultPart)]
        if not (pending or answered):
            pending = [p.id for p in message.parts if isinstance(p, ToolUsePart)]
            continue
        expected, given = set(pending), set(answered)
        for position, tool_use_id in enumerate(answered):
            if tool_use_id not in expected:
                raise InvalidRequest(
                    f"messages.{index}.content.{position}: unexpected `tool_use_id` found in"
                    f" `tool_result` blocks: {tool_use_id[:64]}"
                )
        missing = [call for call in pending if call not in given]
        if missing:
            raise InvalidRequest(
                f"messages.{index}: `tool_use` ids were found without `tool_result` blocks"
                f" immediately after: {', '.join(call[:64] for call in missing[:8])}"
            )
        pending = [p.id for p in message.parts if isinstance(p, ToolUsePart)]
