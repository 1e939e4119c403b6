"""Decoding of bodies of /v1/messages and of its count_tokens.

Whatever the bytes are, the outcome is a request, InvalidRequest or TooLarge.
"""

from contextlib import suppress
from typing import TypeVar

import msgspec
from msgspec import UNSET, Raw

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest, ThreadNotFound
from gateway.dialects.anthropic.client_tools import described
from gateway.dialects.anthropic.complaints import explained, path_of
from gateway.dialects.anthropic.request import (
    FIELDS,
    NOT_HERE,
    UNUSED,
    CacheBreakpoint,
    CacheControl,
    CountTokensRequest,
    ForeignTool,
    MessagesRequest,
    ReducedMessagesRequest,
    ThreadContinue,
    Tool,
)
from gateway.dialects.bodies import check_values, decode_with_foreign_tools, read
from gateway.dialects.unknown import UnknownFields

_OWN_TYPES = ("custom",)
_messages = msgspec.json.Decoder(MessagesRequest)
_count_tokens = msgspec.json.Decoder(CountTokensRequest)
_tool = msgspec.json.Decoder(Tool)
_UNKNOWN = UnknownFields(
    MessagesRequest,
    ("messages", "system", "tools"),
    markers=("cache_control", "prompt_cache_breakpoint"),
    marker_types=(CacheControl, CacheBreakpoint),
    is_read=lambda name, item: name != "tools" or item.get("type", "custom") == "custom",
)
RequestT = TypeVar("RequestT", bound=CountTokensRequest)


class _Declared(msgspec.Struct):
    type: str
    name: str = ""
    cache_control: CacheControl | None = None


declared_tool = msgspec.json.Decoder(_Declared).decode
_open = msgspec.json.Decoder(dict[str, Raw])
_encode = msgspec.json.Encoder().encode
_OPTIONS = ("max_characters",)
"""Fields of a client's tool that only the client uses."""


def decode_messages(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> MessagesRequest:
    """Raise InvalidRequest that names the field, or TooLarge."""
    request, left_out = _decode(_messages, body, bounds)
    if left_out:
        return ReducedMessagesRequest(**msgspec.structs.asdict(request), left_out=left_out)
    return request


def decode_count_tokens(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> CountTokensRequest:
    """Raise InvalidRequest that names the field, or TooLarge."""
    return _decode(_count_tokens, body, bounds)[0]


def _decode(
    decoder: msgspec.json.Decoder[RequestT], body: bytes, bounds: RequestBounds
) -> tuple[RequestT, list[str]]:
    """The request, and the paths of unknown fields that were left out of it."""
    check_values(body, bounds.max_json_values, bounds.max_object_keys)
    left_out: list[str] = []

    def typed() -> RequestT:
        try:
            return decode_with_foreign_tools(decoder, body, _OWN_TYPES, _tool.decode, _foreign)
        except msgspec.ValidationError:
            # A body that is no object keeps its first error.
            with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
                rest, places = _UNKNOWN.leave_out(_open.decode(body))
                document = msgspec.json.decode(body)
                left_out.extend(path_of(document, [*place]) for place in places)
            if not left_out:
                raise
        return decode_with_foreign_tools(decoder, _encode(rest), _OWN_TYPES, _tool.decode, _foreign)

    request = read(typed, lambda complaint: InvalidRequest(explained(complaint, body)))
    FIELDS.check(request, bounds)
    # Raise InvalidRequest for the first field that would make the answer another one.
    if request.compaction not in (None, *UNUSED[1:]):
        raise InvalidRequest(f"compaction: {NOT_HERE}")
    if isinstance(request, MessagesRequest) and isinstance(request.thread, ThreadContinue):
        raise ThreadNotFound
    for index, message in enumerate(request.messages):
        if message.role == "system":
            continue
        if message.content is UNSET:
            raise InvalidRequest(f"messages.{index}.content: Field required")
        for field in ("clear_at", "output_config"):
            if getattr(message, field) is not None:
                raise InvalidRequest(
                    f"messages.{index}.{field}: only permitted on messages of role 'system'"
                )
    for index, edit in enumerate(request.edits):
        if not isinstance(edit.get("type"), str):
            raise InvalidRequest(
                f"context_management.edits.{index}: Unable to extract tag using discriminator"
                " 'type'"
            )
    return request, left_out


def _foreign(tool: Raw) -> Tool:
    declared = declared_tool(tool)
    description = described(declared.type)
    if description is not None:
        about, schema = description
        fields = {
            name: value
            for name, value in _open.decode(tool).items()
            if name not in ("type", *_OPTIONS)
        }
        return _tool.decode(_encode({**fields, "description": about, "input_schema": schema}))
    marker = declared.cache_control
    return ForeignTool(declared.type, {}, description=declared.name, cache_control=marker)
