"""From raw bytes to a request, or to one error that names the field.

Whatever the bytes are, the outcome is a request or InvalidRequest. A top-level field that is null
is a field that is not there.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gateway.base.errors import InvalidRequest
from gateway.dialects.openai.explain import validation_error
from gateway.dialects.openai.request import (
    IGNORED,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    ChatRequest,
    CompletionRequest,
)

_document = msgspec.json.Decoder()
Request = TypeVar("Request", ChatRequest, CompletionRequest)


def decode_chat(body: bytes) -> ChatRequest:
    return _decode(body, ChatRequest, REFUSED_IN_CHAT)


def decode_completion(body: bytes) -> CompletionRequest:
    return _decode(body, CompletionRequest, REFUSED_IN_COMPLETIONS)


def _decode(body: bytes, kind: type[Request], refused: Mapping[str, tuple[Any, ...]]) -> Request:
    document = _fields(body)
    given: dict[str, Any] = {}
    for name, value in document.items():
        if value is None or name in IGNORED:
            continue
        if name not in refused:
            given[name] = value
        elif not any(_is_same(value, neutral) for neutral in refused[name]):
            raise InvalidRequest(f"{name}: this value is not supported by this server", name)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply") from None


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
