"""From a Messages request's content to the engine's prompt: an ordered list of segments.

Tools come first, then system blocks, then message blocks, whatever the order of the JSON keys.
Every tool and every content block is exactly one segment; a string is one text block. Messages
of one role that follow each other are merged, their blocks stay apart.
"""

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
    ContentSource,
    Document,
    Nested,
    Nonce,
    SearchResult,
    Text,
    Thinking,
    Tool,
    ToolResult,
    ToolUse,
)
from gateway.dialects.anthropic.request import CountTokensRequest, Message
from gateway.prompt.layout import Layout, Slot, check_json

_ROLE_OF = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user"}


def lay_out(request: CountTokensRequest) -> Layout:
    slots: list[Slot] = []
    tools = [_tool(index, tool, slots) for index, tool in enumerate(request.tools)]
    system = _system(request, slots)
    messages: list[PromptMessage] = []
    for index, message in enumerate(request.messages):
        parts = [
            _part(f"messages.{index}.content.{position}", message, block, slots)
            for position, block in enumerate(_blocks(index, message))
        ]
        if messages and messages[-1].role == message.role:
            messages[-1].parts.extend(parts)
        else:
            messages.append(PromptMessage(message.role, parts))
    return Layout(Prompt(messages, tools, system), slots)


def _tool(index: int, tool: Tool, slots: list[Slot]) -> PromptTool:
    path = f"tools.{index}"
    if tool.defer_loading and tool.cache_control:
        raise InvalidRequest(
            f"Tool '{tool.name}' cannot have both defer_loading=true and cache_control set."
            " Tools with defer_loading cannot use prompt caching."
        )
    refused = {
        "defer_loading": tool.defer_loading,
        "input_examples": bool(tool.input_examples),
        "allowed_callers": tool.allowed_callers != ["direct"],
    }
    for field, is_set in refused.items():
        if is_set:
            raise InvalidRequest(f"{path}.{field}: not supported by this server")
    if not tool.name:
        raise InvalidRequest(f"{path}.name: String should have at least 1 character")
    check_json(tool.input_schema, f"{path}.input_schema")
    slots.append(_slot(path, tool.cache_control))
    return PromptTool(tool.name, tool.input_schema, tool.description)


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


def _blocks(index: int, message: Message) -> list[Block]:
    if isinstance(message.content, str):
        return [Text(text=message.content)]
    if not message.content:
        raise InvalidRequest(f"messages.{index}: all messages must have non-empty content")
    return message.content


def _part(path: str, message: Message, block: Block, slots: list[Slot]) -> Part:
    kind = block.__struct_config__.tag
    wanted = _ROLE_OF.get(str(kind), message.role)
    if wanted != message.role or (message.role == "system" and not isinstance(block, Text)):
        where = f"`{wanted}`" if wanted != message.role else "`user` and `assistant`"
        raise InvalidRequest(f"{path}: `{kind}` blocks can only be in {where} messages")
    match block:
        case Text():
            _check_text(path, block)
            slots.append(_slot(path, block.cache_control))
            return TextPart(block.text)
        case Thinking():
            slots.append(Slot(path=path, can_carry=False))
            return ThinkingPart(block.thinking)
        case ToolUse():
            check_json(block.input, f"{path}.tool_use.input")
            slots.append(_slot(path, block.cache_control))
            return ToolUsePart(block.id, block.name, block.input)
        case ToolResult():
            nested = [] if isinstance(block.content, str) else block.content
            slots.append(_slot(path, block.cache_control, _nested_markers(path, nested)))
            return ToolResultPart(block.tool_use_id, _flatten(path, block), block.is_error)
        case SearchResult():
            slots.append(_slot(path, block.cache_control))
            return TextPart(_search_text(path, block))
        case Document():
            slots.append(_slot(path, block.cache_control, _document_markers(path, block)))
            return TextPart(_document_text(path, block))


def _check_text(path: str, block: Text) -> None:
    if not block.text:
        if block.cache_control:
            raise InvalidRequest(f"{path}.text: cache_control cannot be set for empty text blocks")
        raise InvalidRequest("messages: text content blocks must be non-empty")
    if block.text.isspace():
        raise InvalidRequest("messages: text content blocks must contain non-whitespace text")


def _slot(path: str, marker: CacheControl | None, nested: list[CacheControl] | None = None) -> Slot:
    """A marker on the last nested block counts as one on its parent."""
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


def _flatten(path: str, result: ToolResult) -> str:
    if isinstance(result.content, str):
        return result.content
    return "\n".join(
        _nested_text(f"{path}.tool_result.content.{index}", block)
        for index, block in enumerate(result.content)
    )


def _nested_text(path: str, block: Nested) -> str:
    match block:
        case Text():
            return block.text
        case SearchResult():
            return _search_text(path, block)
        case Document():
            return _document_text(path, block)


def _search_text(path: str, block: SearchResult) -> str:
    if block.citations and block.citations.enabled:
        raise InvalidRequest(f"{path}.search_result.citations: not supported by this server")
    lines = [block.title, block.source, *(text.text for text in block.content)]
    return "\n".join(line for line in lines if line)


def _document_text(path: str, block: Document) -> str:
    if block.citations and block.citations.enabled:
        raise InvalidRequest(f"{path}.document.citations: not supported by this server")
    source = block.source
    if isinstance(source, ContentSource):
        inner = source.content
        body = inner if isinstance(inner, str) else "\n".join(text.text for text in inner)
    else:
        body = source.data
    text = "\n".join(line for line in (block.title, block.context, body) if line)
    if not text.strip():
        raise InvalidRequest(f"{path}.document.source: the document is empty")
    return text
