"""From raw bytes to a request, or to one error that names the field.

Whatever the bytes are, the outcome is a request, InvalidRequest or TooLarge. A top-level field that
is null is a field that is not there.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.openai.bounds import check_bounds, check_metadata
from gateway.dialects.openai.explain import validation_error
from gateway.dialects.openai.request import (
    IGNORED,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    ChatRequest,
    CompletionRequest,
)
from gateway.dialects.weigh import check_values

_document = msgspec.json.Decoder()
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
    check_values(body, bounds.max_json_values)
    document = _fields(body)
    check_metadata(document.get("metadata"), bounds)
    given: dict[str, Any] = {}
    for name, value in document.items():
        if value is None or name in IGNORED:
            continue
        if name not in refused:
            given[name] = value
        elif not any(_is_same(value, neutral) for neutral in refused[name]):
            raise InvalidRequest(f"{name}: this value is not supported by this server", name)
    try:
        request = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply") from None
    check_bounds(request, bounds)
    return request


def _fields(body: bytes) -> dict[str, Any]:
    try:
        document = _document.decode(body)
    except msgspec.MsgspecError:
        raise InvalidRequest("The request body is not valid JSON") from None
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply") from None
    if not isinstance(document, dict):
        raise InvalidRequest("The request body must be a JSON object")
    return document


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal, and of one kind: true is not 1, but 1.0 is."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
