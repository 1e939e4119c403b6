"""Google's error envelope: a code, a message, a status, and details that name the field.

A server that is full or whose engines are away is a 503 here, and a used-up spend limit a 429.
"""

import re
from typing import Any

import msgspec

from gateway.base.errors import (
    DemandRefused,
    GatewayError,
    InvalidRequest,
    MissingKey,
    ModelNotFound,
    Overloaded,
    RateLimited,
    SpendLimitReached,
    Unauthenticated,
)

_TYPES = "type.googleapis.com/google.rpc."
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    431: "INVALID_ARGUMENT",
    499: "CANCELLED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_SCHEMA = re.compile(r"^output_schema\b")
_PATH = re.compile(r"^([A-Za-z_]\w*(?:\[\d+\]|\.\w+)*): ")


class ErrorDetail(msgspec.Struct, frozen=True):
    """`details` are Google's own types: BadRequest, ErrorInfo, RetryInfo, RequestInfo."""

    code: int
    message: str
    status: str
    details: list[dict[str, Any]] = []


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


def message_of(failure: GatewayError) -> str:
    return _explained(failure)[0]


def body_of(failure: GatewayError, request_id: str) -> ErrorBody:
    code = status_of(failure)
    message, details = _explained(failure)
    details.append({"@type": f"{_TYPES}RequestInfo", "requestId": request_id})
    return ErrorBody(ErrorDetail(code, message, _STATUSES.get(code, "UNKNOWN"), details))


def _explained(failure: GatewayError) -> tuple[str, list[dict[str, Any]]]:
    message = str(failure)
    match failure:
        case MissingKey():
            return "API key is missing: send it as x-goog-api-key.", [_reason("API_KEY_MISSING")]
        case Unauthenticated():
            message = "API key not valid. Please pass a valid API key."
            return message, [_reason("API_KEY_INVALID")]
        case ModelNotFound():
            named = f"models/{failure.requested} is not found for this server"
            return f"{named}{failure.told('; ')}.", []
        case DemandRefused():
            return _violated(_SCHEMA.sub("generationConfig.responseSchema", message), None)
        case InvalidRequest():
            return _violated(message, failure.param)
        case RateLimited(retry_after=int(seconds)) | Overloaded(retry_after=seconds):
            return message, [{"@type": f"{_TYPES}RetryInfo", "retryDelay": f"{seconds}s"}]
        case _:
            return message, []


def _violated(message: str, param: str | None) -> tuple[str, list[dict[str, Any]]]:
    match = _PATH.match(message)
    field = param or (match[1] if match else None)
    if field is None:
        return message, []
    violation = {"field": field, "description": message}
    return message, [{"@type": f"{_TYPES}BadRequest", "fieldViolations": [violation]}]


def _reason(reason: str) -> dict[str, Any]:
    return {"@type": f"{_TYPES}ErrorInfo", "reason": reason, "domain": "googleapis.com"}
