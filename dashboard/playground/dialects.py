"""A body of any dialect as blocks, in the order that the prompt has them. Pure."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dashboard.playground.blocks import MAX_BLOCKS, Block, Kind, NotBlocks, blocks_of
from dashboard.playground.paste import Pasted

_ROLES: dict[str, Kind] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "model": "assistant",
}
_TEXT_TYPES = ("text", "input_text", "output_text")


def blocks_of_any(pasted: Pasted) -> list[Block]:
    """Take a body apart. Raise NotBlocks where it has more than text and tools.

    Only the Messages API has markers of its own, so the blocks of the others have none.
    """
    body = pasted.body
    try:
        match pasted.dialect:
            case "messages":
                return blocks_of(body)
            case "chat":
                found = [*_functions(body.get("tools")), *_turns(body.get("messages"))]
            case "responses":
                found = [*_functions(body.get("tools")), *_responses(body)]
            case "gemini":
                found = [*_declarations(body.get("tools")), *_gemini(body)]
            case "completions":
                found = [Block("user", _string(body.get("prompt")))]
    except (AttributeError, TypeError, KeyError):
        raise NotBlocks("fields of another shape") from None
    if len(found) > MAX_BLOCKS:
        raise NotBlocks(f"more than {MAX_BLOCKS} blocks")
    return found


def _responses(body: Mapping[str, Any]) -> Iterable[Block]:
    if body.get("instructions"):
        yield Block("system", _string(body["instructions"]))
    said = body.get("input")
    yield from [Block("user", said)] if isinstance(said, str) else _turns(said)


def _turns(messages: Any) -> Iterable[Block]:
    """Messages of a role and a content, as Chat Completions and Responses have them."""
    for message in messages or []:
        if message.get("type", "message") != "message" or message.get("tool_calls"):
            raise NotBlocks("calls of tools")
        kind, content = _kind(message.get("role")), message.get("content")
        if isinstance(content, str):
            yield Block(kind, content)
            continue
        for part in content or []:
            if part.get("type") not in _TEXT_TYPES:
                raise NotBlocks("content other than text")
            yield Block(kind, _string(part["text"]))


def _gemini(body: Mapping[str, Any]) -> Iterable[Block]:
    system = body.get("systemInstruction") or body.get("system_instruction") or {}
    yield from (Block("system", text) for text in _parts(system))
    for content in body.get("contents") or []:
        kind = _kind(content.get("role", "user"))
        yield from (Block(kind, text) for text in _parts(content))


def _parts(content: Mapping[str, Any]) -> Iterable[str]:
    for part in content.get("parts") or []:
        if "text" not in part:
            raise NotBlocks("content other than text")
        yield _string(part["text"])


def _kind(role: Any) -> Kind:
    if role not in _ROLES:
        raise NotBlocks(f"a message of the role {role!r:.20}")
    return _ROLES[role]


def _functions(tools: Any) -> Iterable[Block]:
    """OpenAI's functions; Responses has their fields beside the type, Chat below `function`."""
    for tool in tools or []:
        if tool.get("type") != "function":
            raise NotBlocks("tools other than functions")
        yield _tool(tool.get("function", tool))


def _declarations(tools: Any) -> Iterable[Block]:
    for tool in tools or []:
        found = tool.get("functionDeclarations") or tool.get("function_declarations")
        if found is None:
            raise NotBlocks("tools other than functions")
        yield from (_tool(each) for each in found)


def _tool(function: Mapping[str, Any]) -> Block:
    told = {
        "name": _string(function["name"]),
        "description": function.get("description") or "",
        "input_schema": function.get("parameters") or {"type": "object"},
    }
    return Block("tool", json.dumps(told, indent=2))


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise NotBlocks("content other than text")
    return value
