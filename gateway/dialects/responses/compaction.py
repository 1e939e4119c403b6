"""Compactions: a summary that replaces all of a conversation but the user's messages.

The model of the conversation writes the summary. It goes out sealed, as OpenAI's does: only this
installation accepts it back, for this workspace. The fields are those of
https://platform.openai.com/docs/api-reference/responses/compact.
"""

import dataclasses
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import EngineFailed, InvalidRequest
from gateway.dialects.collector import Holdfast
from gateway.dialects.lowering import RequestContext
from gateway.dialects.responses.lower import COMPACTION, Prepared, prepare, seal
from gateway.dialects.responses.request import FIELDS, Decoded, Message, decode_responses
from gateway.dialects.responses.response import MessageItem, Response, Usage

_PARAMETERS = """
model input instructions previous_response_id prompt_cache_key prompt_cache_options
prompt_cache_retention
"""
_KNOWN = frozenset(_PARAMETERS.split()) | FIELDS.silent | FIELDS.told.keys()
_WISH = (
    "Summarize this conversation, so that you can go on with it from your summary and the user's"
    " messages alone: what was decided and found out, the names, paths and values that are still"
    " needed, what is done and what is left to do. Answer with the summary and nothing else."
)
_OMITTED = ("id", "status", "phase")


class CompactionItem(msgspec.Struct, frozen=True, tag="compaction"):
    id: str
    encrypted_content: str


class CompactedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The items to go on with: the user's messages, and the compaction."""

    id: str
    created_at: int
    output: list[Any]
    usage: Usage
    object: Literal["response.compaction"] = "response.compaction"
    holdfast: Holdfast | UnsetType = UNSET


def decode_compaction(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> Decoded:
    """Decode a body. Raise InvalidRequest as for a response, and for a field that a compaction does
    not have."""
    decoded = decode_responses(body, bounds)
    for name in decoded.fields:
        if name not in _KNOWN:
            raise InvalidRequest(f"Unrecognized request argument supplied: {name[:64]}", name[:64])
    if decoded.request.is_prewarm:
        path = "prompt_cache_options.prewarm"
        raise InvalidRequest(f"{path}: a compaction is generated", path)
    return decoded


def prepare_compaction(decoded: Decoded, context: RequestContext) -> Prepared:
    """The turn in which the model summarizes the conversation. Raise InvalidRequest as `prepare`
    does."""
    wish = Message(role="user", content=_WISH)
    request = msgspec.structs.replace(decoded.request, input=[*_messages(decoded), wish])
    prepared = prepare(decoded._replace(request=request), context)
    return dataclasses.replace(prepared, decoded=decoded)


def compacted(decoded: Decoded, response: Response, scope: str) -> CompactedResponse:
    """The conversation's compaction, from the `response` that summarizes it. `scope` is the
    workspace's.

    Raise InvalidRequest where the summary did not end, EngineFailed where the model wrote none.
    """
    if response.status == "incomplete" or response.usage is None:
        raise InvalidRequest(
            "input: its summary did not end within the model's context: compact it earlier", "input"
        )
    texts = (
        part.text
        for item in response.output
        if isinstance(item, MessageItem)
        for part in item.content
    )
    summary = "\n\n".join(texts).strip()
    if not summary:
        raise EngineFailed
    sealed = seal(summary, scope, COMPACTION)
    stem = response.id.removeprefix("resp_")
    users = [item for item in _messages(decoded) if isinstance(item, Message)]
    shown_items = [_shown(item) for item in users if item.role == "user"]
    return CompactedResponse(
        id=response.id,
        created_at=response.created_at,
        output=[*shown_items, CompactionItem(f"cmp_{stem}", sealed)],
        usage=response.usage,
        holdfast=response.holdfast,
    )


def _messages(decoded: Decoded) -> list[Any]:
    """The items of the input. A text becomes a message."""
    items = decoded.request.input
    return [Message(role="user", content=items)] if isinstance(items, str) else items


def _shown(message: Message) -> dict[str, Any]:
    """The message as an output item: with the fields that it has, and its content as a list."""
    fields: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(message.content, str):
        fields["content"] = [{"type": "input_text", "text": message.content}]
    return {
        name: value for name, value in fields.items() if value is not None or name not in _OMITTED
    }
