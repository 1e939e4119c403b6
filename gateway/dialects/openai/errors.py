"""OpenAI's error envelope, its statuses and codes.

A server that is full or whose engines are away is a 503 here, and a used-up spend limit a 429: 529
and 402 are the other dialect's own.
"""

import re

import msgspec
from msgspec import UNSET, UnsetType

from gateway.base.errors import (
    DemandRefused,
    GatewayError,
    InvalidRequest,
    MissingKey,
    ModelNotFound,
    Overloaded,
    PromptTooLong,
    ResponseNotKept,
    SpendLimitReached,
    Unauthenticated,
)

_TOOL = re.compile(r"^tools\[(\d+)\]\.input_schema\b")
_SCHEMA = re.compile(r"^output_schema\b")
_PATH = re.compile(r"^([a-z_]\w*(?:\[\d+\]|\.\w+)*): ")


class ErrorDetail(msgspec.Struct, frozen=True):
    """`request_id` is an addition: SDKs print the whole body, but no header, of a failed stream."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    request_id: str | UnsetType = UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def status_of(failure: GatewayError) -> int:
    match failure:
        case Overloaded():
            return 503
        case SpendLimitReached():
            return 429
        case _:
            return failure.status


def body_of(failure: GatewayError, request_id: str) -> ErrorBody:
    return ErrorBody(msgspec.structs.replace(detail_of(failure), request_id=request_id))


def message_of(failure: GatewayError) -> str:
    return detail_of(failure).message


def detail_of(failure: GatewayError) -> ErrorDetail:
    kind, message = "invalid_request_error", str(failure)
    field = failure.param or "messages"
    match failure:
        case MissingKey():
            message = "You didn't provide an API key: send `Authorization: Bearer <key>`."
            return ErrorDetail(message, kind)
        case Unauthenticated():
            return ErrorDetail("Incorrect API key provided.", kind, None, "invalid_api_key")
        case PromptTooLong(num_tokens=tokens, max_tokens=most) if tokens and most:
            message = (
                f"This model's maximum context length is {most} tokens. However, your prompt"
                f" resulted in {tokens} tokens."
            )
            return ErrorDetail(message, kind, field, "context_length_exceeded")
        case PromptTooLong():
            return ErrorDetail(message, kind, field, "context_length_exceeded")
        case ResponseNotKept():
            return ErrorDetail(message, kind, field, "previous_response_not_found")
        case ModelNotFound():
            message = f"The model `{failure.requested}` does not exist{failure.told('; ')}."
            return ErrorDetail(message, kind, "model", "model_not_found")
        case DemandRefused():
            message = _TOOL.sub(r"tools[\1].function.parameters", message)
            message = _SCHEMA.sub("response_format", message)
            return ErrorDetail(message, kind, _field_in(message))
        case InvalidRequest():
            return ErrorDetail(message, kind, failure.param or _path_in(message))
        case Overloaded():
            return ErrorDetail(message, "server_error", None, "overloaded")
        case SpendLimitReached():
            return ErrorDetail(message, "insufficient_quota", None, "insufficient_quota")
        case _ if failure.status == 429:
            return ErrorDetail(message, "rate_limit_error", None, "rate_limit_exceeded")
        case _ if failure.status < 500:
            return ErrorDetail(message, kind)
        case _:
            return ErrorDetail(message, "server_error")


def _field_in(message: str) -> str | None:
    """The path at the beginning of a demand's refusal. A tool's name may follow it."""
    field = message.split(" ", 1)[0].rstrip(":")
    return field if field.startswith(("tools[", "response_format")) else None


def _path_in(message: str) -> str | None:
    """The path at the beginning of a message about one field."""
    match = _PATH.match(message)
    return match[1] if match else None
