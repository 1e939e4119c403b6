"""From raw bytes to a request, or to one error that names the field.

Whatever the bytes are, the outcome is a request, InvalidRequest or TooLarge. A top-level field that
is null is a field that is not there. The fields are parted first, then decoded into their types.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.openai.bounds import check_bounds, check_metadata
from gateway.dialects.openai.explain import validation_error
from gateway.dialects.openai.foreign import decode_foreign_tools
from gateway.dialects.openai.request import (
    IGNORED,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    ChatRequest,
    CompletionRequest,
)
from gateway.dialects.weigh import check_values

_document = msgspec.json.Decoder(dict[str, Raw])
_messages = msgspec.json.Decoder(list[dict[str, Raw]])
_MAX_NEUTRAL_BYTES = 1024
Request = TypeVar("Request", ChatRequest, CompletionRequest)


def decode_chat(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> ChatRequest:
    return _decode(body, ChatRequest, REFUSED_IN_CHAT, bounds)


def decode_completion(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> CompletionRequest:
    return _decode(body, CompletionRequest, REFUSED_IN_COMPLETIONS, bounds)


def _decode(
    body: bytes,
    kind: type[Request],
    refused: Mapping[str, tuple[Any, ...]],
    bounds: RequestBounds,
) -> Request:
    check_values(body, bounds.max_json_values, bounds.max_object_keys)
    fields = fields_of(body)
    given: dict[str, Raw] = {}
    for name, value in fields.items():
        if name == "metadata":
            check_metadata(len(value), bounds)
        if bytes(value) == b"null" or name in IGNORED:
            continue
        if name not in refused:
            given[name] = value
        elif not is_neutral(value, refused[name]):
            raise InvalidRequest(f"{name}: this value is not supported by this server", name)
    whole = body if len(given) == len(fields) else _object_of(given)
    try:
        request = _read(whole, given, kind)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from None
    check_bounds(request, bounds)
    return request


def _read(whole: bytes, given: dict[str, Raw], kind: type[Request]) -> Request:
    try:
        return msgspec.json.decode(whole, type=kind)
    except msgspec.ValidationError:
        if (bare := _without_private(given)) is not None:
            return _read(_object_of(bare), bare, kind)
        tools = decode_foreign_tools(bytes(given.get("tools", b"null")))
        if tools is None:
            raise
        request = msgspec.json.decode(_object_of({**given, "tools": Raw(b"[]")}), type=kind)
        if isinstance(request, ChatRequest):
            request.tools = tools
        return request


def _without_private(given: Mapping[str, Raw]) -> dict[str, Raw] | None:
    """The fields, without those of messages whose names begin with `_`; None where none do.

    Such a field is a note of the client's own, which it should have kept: Copilot CLI sends
    `__copilotMessageSource` in a session that goes on.
    """
    raw = given.get("messages", Raw())
    if b'"_' not in memoryview(raw).tobytes():
        return None
    try:
        messages = _messages.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not any(name.startswith("_") for message in messages for name in message):
        return None
    made = [
        {name: value for name, value in message.items() if not name.startswith("_")}
        for message in messages
    ]
    return {**given, "messages": Raw(msgspec.json.encode(made))}


def _object_of(fields: Mapping[str, Raw]) -> bytes:
    """A JSON object of these fields. An encoder would copy large values once more as it grows."""
    pieces: list[bytes | Raw] = []
    for name, value in fields.items():
        pieces += (b"," if pieces else b"{", msgspec.json.encode(name), b":", value)
    return b"".join([*pieces, b"}"] if pieces else [b"{}"])


def fields_of(body: bytes) -> dict[str, Raw]:
    """The fields of a body that is an object, as they came. Raise InvalidRequest for others."""
    try:
        return _document.decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest("The request body must be a JSON object") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from None


def unreadable(error: Exception) -> InvalidRequest:
    """The error of bytes that are no JSON."""
    match error:
        case UnicodeDecodeError():
            return InvalidRequest("The request body is not valid UTF-8")
        case RecursionError():
            return InvalidRequest("The request body is nested too deeply")
        case _:
            return InvalidRequest("The request body is not valid JSON")


def is_neutral(value: Raw, allowed: tuple[Any, ...]) -> bool:
    """Whether the value is one of these. They are short, so a longer value is not decoded."""
    if len(value) > _MAX_NEUTRAL_BYTES:
        return False
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from None
    return any(_is_same(decoded, neutral) for neutral in allowed)


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether two values are equal and of one kind: true is not 1, but 1.0 is."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
