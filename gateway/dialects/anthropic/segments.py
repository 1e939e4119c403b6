"""From a Messages request's content to the engine's prompt: an ordered list of segments.

Tools come first, then system blocks, then message blocks, whatever the order of the JSON keys.
Every tool and every content block is exactly one segment; a string is one text block. Messages
of one role that follow each other are merged, their blocks stay apart.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from engine.protocol import (
    Message as PromptMessage,
)
from engine.protocol import (
    Part,
    Prompt,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolUsePart,
)
from engine.protocol import (
    Tool as PromptTool,
)
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.content import (
    Block,
    CacheControl,
    Compaction,
    ContentSource,
    Document,
    Image,
    Nested,
    Nonce,
    RedactedThinking,
    SearchResult,
    Text,
    Thinking,
    ToolAddition,
    ToolReference,
    ToolRemoval,
    ToolResult,
    ToolUse,
)
from gateway.dialects.anthropic.placed import (
    document_text,
    foreign_text,
    image_text,
    search_text,
)
from gateway.dialects.anthropic.request import CountTokensRequest, Message
from gateway.dialects.anthropic.tools import Tools
from gateway.prompt.ignored import Notepad
from gateway.prompt.layout import Layout, Slot, check_json
from gateway.prompt.media import Unreadable

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
