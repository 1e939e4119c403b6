"""Request bodies that tests start from."""

import copy
from typing import Any

import msgspec

from gateway.base.catalogue import CatalogueModel
from gateway.base.grants import AutoCache
from gateway.dialects.anthropic.decode import decode_messages
from gateway.dialects.anthropic.lower import count_ask_of
from gateway.dialects.lowering import RequestContext
from gateway.dialects.openai.lower import chat_ask_of
from gateway.dialects.openai.request import decode_chat
from gateway.prompt.ask import Ask, Principal

WHO = Principal("w", "k", "scope", auto_cache=AutoCache("off"))
ASKED = RequestContext(WHO, CatalogueModel(id="m", display_name="m"), 0.0, removes_nonces=True)
SHORT: dict[str, str] = {"type": "ephemeral"}
LONG: dict[str, str] = {"type": "ephemeral", "ttl": "1h"}


def text(value: str = "some text", marker: Any = None) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": value}
    return block if marker is None else {**block, "cache_control": marker}


def tool(name: str = "look", marker: Any = None) -> dict[str, Any]:
    body: dict[str, Any] = {"name": name, "input_schema": {"type": "object", "properties": {}}}
    return body if marker is None else {**body, "cache_control": marker}


def body(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": "holdfast-demo",
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "hi"}],
    }
    return copy.deepcopy({**base, **changes})


def lowered(request: Any, context: RequestContext = ASKED) -> Ask:
    """What a body of Messages comes to."""
    raw = request if isinstance(request, bytes) else msgspec.json.encode(request)
    return count_ask_of(decode_messages(raw), context, "2023-06-01")


def lowered_chat(request: Any, context: RequestContext = ASKED) -> Ask:
    return chat_ask_of(decode_chat(msgspec.json.encode(request)), context)


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    """A message of these blocks."""
    return {"role": role, "content": list(blocks)}


def conversation() -> dict[str, Any]:
    """Every supported kind of block, with four markers."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "caller": {"type": "direct"}}
    source = {"type": "text", "media_type": "text/plain", "data": "Notes."}
    results = [text("A hold."), text("On blocks.", SHORT)]
    return body(
        system=[text("You look things up. " * 40, LONG)],
        tools=[tool("look"), tool("listen", LONG)],
        tool_choice={"type": "auto"},
        messages=[
            said(text("What is a lease?"), text("Be short.", SHORT)),
            said(
                {"type": "thinking", "thinking": "I shall look.", "signature": "c2ln"},
                {"type": "text", "text": "Looking.", "citations": None},
                {**use, "input": {"b": 1, "a": [1.5, None, {"z": "é"}]}},
                role="assistant",
            ),
            said(
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": results},
                {"type": "document", "title": "Notes", "source": source},
            ),
        ],
    )


def told(message: Any) -> list[tuple[str, str]]:
    """The fields that an answer of either dialect says were ignored, with the reasons."""
    extension = message.model_extra["holdfast"]
    return [(field["path"], field["reason"]) for field in extension.get("ignored", [])]
