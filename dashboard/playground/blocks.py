"""A prompt as a list of blocks that are added, moved and marked, and its Messages body. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["tool", "system", "user", "assistant"]
KINDS: tuple[Kind, ...] = ("tool", "system", "user", "assistant")
TTLS = {"No marker": None, "5 minutes": "5m", "1 hour": "1h"}
MAX_BLOCKS = 40


class NotBlocks(ValueError):
    """The body has what blocks of text can't show: it is sent as it is."""


@dataclass(frozen=True, slots=True)
class Block:
    """`text` is a tool's JSON, or a text. `ttl` None has no marker at its end."""

    kind: Kind
    text: str
    ttl: str | None = None

    @property
    def name(self) -> str:
        if self.kind != "tool":
            return self.kind.capitalize()
        try:
            return f"Tool {json.loads(self.text)['name']}"
        except (ValueError, KeyError, TypeError):
            return "Tool"


def in_order(blocks: Sequence[Block]) -> list[Block]:
    """The blocks as the prompt has them: tools, system, then the messages."""
    ranks = {"tool": 0, "system": 1}
    return sorted(blocks, key=lambda block: ranks.get(block.kind, 2))


def body_of(blocks: Sequence[Block], model: str, max_tokens: int) -> dict[str, Any]:
    """The body of a Messages request. Raise ValueError for a tool that is no JSON object.

    Neighbours of one role are one message. Blocks without text are left out.
    """
    told = [block for block in in_order(blocks) if block.text.strip()]
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens}
    if tools := [_tool(block) for block in told if block.kind == "tool"]:
        body["tools"] = tools
    if system := [_text(block) for block in told if block.kind == "system"]:
        body["system"] = system
    messages: list[dict[str, Any]] = []
    for block in told:
        if block.kind in ("tool", "system"):
            continue
        if not messages or messages[-1]["role"] != block.kind:
            messages.append({"role": block.kind, "content": []})
        messages[-1]["content"].append(_text(block))
    return {**body, "messages": messages}


def _text(block: Block) -> dict[str, Any]:
    return {"type": "text", "text": block.text} | _marker(block)


def _tool(block: Block) -> dict[str, Any]:
    try:
        found = json.loads(block.text)
    except ValueError:
        raise ValueError("A tool is not valid JSON.") from None
    if not isinstance(found, dict):
        raise ValueError("A tool must be a JSON object with name, description and input_schema.")
    return found | _marker(block)


def _marker(block: Block) -> dict[str, Any]:
    if block.ttl is None:
        return {}
    return {"cache_control": {"type": "ephemeral", "ttl": block.ttl}}


def blocks_of(body: Mapping[str, Any]) -> list[Block]:
    """Take a Messages body apart. Raise NotBlocks where it has more than text and tools."""
    found: list[Block] = []
    for tool in body.get("tools") or []:
        plain = {name: value for name, value in tool.items() if name != "cache_control"}
        found.append(Block("tool", json.dumps(plain, indent=2), _ttl(tool)))
    found += [_block("system", each) for each in _content(body.get("system") or [])]
    for message in body.get("messages") or []:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise NotBlocks(f"a message of the role {role!r:.20}")
        found += [_block(role, each) for each in _content(message.get("content") or [])]
    if len(found) > MAX_BLOCKS:
        raise NotBlocks(f"more than {MAX_BLOCKS} blocks")
    return found


def _content(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _block(kind: Kind, each: Any) -> Block:
    if not isinstance(each, dict) or each.get("type") != "text":
        raise NotBlocks("content other than text")
    return Block(kind, str(each.get("text", "")), _ttl(each))


def _ttl(each: Mapping[str, Any]) -> str | None:
    marker = each.get("cache_control")
    return str(marker.get("ttl", "5m")) if isinstance(marker, dict) else None
