"""Errors in each dialect's envelope: the three shapes, and OpenAI's and Google's words.

Anthropic's types and statuses are those of `base/errors.py`. In the other dialects the status is
503 for a server that is full or whose engines are away, and 429 for a used-up spend limit.
"""

import re
from collections.abc import Sequence
from typing import Any

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
    RateLimited,
    ResponseNotKept,
    SpendLimitReached,
    ThreadNotFound,
    Unauthenticated,
)
from gateway.prompt.ask import Dialect


class AnthropicDetails(msgspec.Struct, frozen=True):
    error_code: str


class AnthropicDetail(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: AnthropicDetails | UnsetType = UNSET


class AnthropicError(msgspec.Struct, frozen=True, tag="error"):
    """The body of an error, and the last event of a stream that failed."""

    error: AnthropicDetail
    request_id: str


class OpenAIDetail(msgspec.Struct, frozen=True):
    """`request_id` is an addition: SDKs print the whole body, but no header, of a failed stream."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    request_id: str | UnsetType = UNSET


class OpenAIError(msgspec.Struct, frozen=True):
    error: OpenAIDetail


class GeminiDetail(msgspec.Struct, frozen=True):
    """`details` are Google's own types: BadRequest, ErrorInfo, RetryInfo, RequestInfo."""

    code: int
    message: str
    status: str
    details: list[dict[str, Any]] = []


class GeminiError(msgspec.Struct, frozen=True):
    error: GeminiDetail


ErrorBody = AnthropicError | OpenAIError | GeminiError
ENVELOPES: dict[Dialect, type[ErrorBody]] = {
    "anthropic": AnthropicError,
    "openai": OpenAIError,
    "gemini": GeminiError,
}
_TOOL = re.compile(r"^tools\[(\d+)\]\.input_schema\b")
_SCHEMA = re.compile(r"^output_schema\b")
_PATTERN = re.compile(r"^output_pattern\b")
_PATH = re.compile(r"^([A-Za-z_]\w*(?:\[\d+\]|\.\w+)*): ")
# Each dialect's names for the engine protocol's `tools[0].input_schema` and `output_schema`.
_DEMANDED: dict[Dialect, tuple[str, str]] = {
    "anthropic": (r"tools.\1.input_schema", "output_config.format.schema"),
    "openai": (r"tools[\1].function.parameters", "response_format"),
    "gemini": (r"tools[\1].input_schema", "generationConfig.responseSchema"),
}
_INVALID = "invalid_request_error"
# OpenAI's type and code for a class of errors. The first class that fits counts.
_CODES: tuple[tuple[type[GatewayError], str, str | None], ...] = (
    (MissingKey, _INVALID, None),
    (Unauthenticated, _INVALID, "invalid_api_key"),
    (PromptTooLong, _INVALID, "context_length_exceeded"),
    (ResponseNotKept, _INVALID, "previous_response_not_found"),
    (ModelNotFound, _INVALID, "model_not_found"),
    (Overloaded, "server_error", "overloaded"),
    (SpendLimitReached, "insufficient_quota", "insufficient_quota"),
    (RateLimited, "rate_limit_error", "rate_limit_exceeded"),
)
# The dialects' messages for a missing and for a wrong key.
_KEYS: dict[Dialect, tuple[str, str]] = {
    "openai": (
        "You didn't provide an API key: send `Authorization: Bearer <key>`.",
        "Incorrect API key provided.",
    ),
    "gemini": (
        "API key is missing: send it as x-goog-api-key.",
        "API key not valid. Please pass a valid API key.",
    ),
}
_GOOGLE = "type.googleapis.com/google.rpc."
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
    426: "UNIMPLEMENTED",
    429: "RESOURCE_EXHAUSTED",
    431: "INVALID_ARGUMENT",
    499: "CANCELLED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def status_of(failure: GatewayError, dialect: Dialect) -> int:
    if dialect == "anthropic":
        return failure.status
    match failure:
        case Overloaded():
            return 503
        case SpendLimitReached():
            return 429
    return failure.status


def body_of(failure: GatewayError, request_id: str, dialect: Dialect) -> ErrorBody:
    if dialect == "anthropic":
        return anthropic_error(failure, request_id)
    if dialect == "openai":
        detail = openai_detail(failure)
        return OpenAIError(msgspec.structs.replace(detail, request_id=request_id))
    return gemini_error(failure, request_id)


def gemini_error(failure: GatewayError, request_id: str) -> GeminiError:
    message = _message(failure, "gemini")
    details = list[dict[str, Any]]()
    match failure:
        case Unauthenticated():
            is_missing = isinstance(failure, MissingKey)
            reason = "API_KEY_MISSING" if is_missing else "API_KEY_INVALID"
            details = [_google("ErrorInfo", reason=reason, domain="googleapis.com")]
        case ModelNotFound():
            words = failure.told("; ")
            message = f"models/{failure.requested} is not found for this server{words}."
        case InvalidRequest():
            param = None if isinstance(failure, DemandRefused) else failure.param
            field = param or _path_in(message)
            if field is not None:
                violation = {"field": field, "description": message}
                details = [_google("BadRequest", fieldViolations=[violation])]
        case RateLimited(retry_after=int(seconds)) | Overloaded(retry_after=seconds):
            details = [_google("RetryInfo", retryDelay=f"{seconds}s")]
    code = status_of(failure, "gemini")
    details.append(_google("RequestInfo", requestId=request_id))
    return GeminiError(GeminiDetail(code, message, _STATUSES.get(code, "UNKNOWN"), details))


def anthropic_error(failure: GatewayError, request_id: str) -> AnthropicError:
    code = failure.code if isinstance(failure, ThreadNotFound) else None
    details = AnthropicDetails(code) if code else UNSET
    message = _message(failure, "anthropic")
    return AnthropicError(AnthropicDetail(failure.type, message, details), request_id)


def openai_detail(failure: GatewayError) -> OpenAIDetail:
    message = _message(failure, "openai")
    param = failure.param
    other = ("server_error" if failure.status >= 500 else _INVALID), None
    kind, code = next((row[1:] for row in _CODES if isinstance(failure, row[0])), other)
    match failure:
        case PromptTooLong(num_tokens=tokens, max_tokens=most):
            param = param or "messages"
            if tokens and most:
                message = (
                    f"This model's maximum context length is {most} tokens. However, your prompt"
                    f" resulted in {tokens} tokens."
                )
        case ModelNotFound():
            param = "model"
            message = f"The model `{failure.requested}` does not exist{failure.told('; ')}."
        case DemandRefused():
            # A tool's name may follow its path.
            field = message.split(" ", 1)[0].rstrip(":")
            named = ("tools[", "response_format", "structured_outputs")
            param = field if field.startswith(named) else None
        case InvalidRequest():
            param = param or _path_in(message)
        case _:
            param = None
    return OpenAIDetail(message, kind, param, code)


def _google(kind: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"{_GOOGLE}{kind}", **fields}


def _message(failure: GatewayError, dialect: Dialect) -> str:
    """The message in the dialect's words. It names a refused tool or schema as the dialect does."""
    message = str(failure)
    if isinstance(failure, DemandRefused):
        tool, schema = _DEMANDED[dialect]
        message = _PATTERN.sub("structured_outputs", message)
        return _SCHEMA.sub(schema, _TOOL.sub(tool, message))
    if isinstance(failure, Unauthenticated) and dialect in _KEYS:
        missing, wrong = _KEYS[dialect]
        return missing if isinstance(failure, MissingKey) else wrong
    return message


def _path_in(message: str) -> str | None:
    """The path at the beginning of a message about one field."""
    match = _PATH.match(message)
    return match[1] if match else None


def in_responses_names(
    failure: GatewayError, paths: Sequence[str], schema: str = "text.format.schema"
) -> GatewayError:
    """The failure in the names of an API whose prompt is `input`, such as Responses. `paths` are
    the segments' paths, tools first. `schema` is the path of the answer's schema."""

    def named(match: re.Match[str]) -> str:
        index = int(match[1])
        return f"{paths[index]}.parameters" if index < len(paths) else match[0]

    if isinstance(failure, PromptTooLong):
        failure.param = "input"
    elif isinstance(failure, DemandRefused):
        message = _SCHEMA.sub(schema, _TOOL.sub(named, str(failure)))
        renamed = InvalidRequest(message, message.split(" ", 1)[0].rstrip(":"))
        renamed.is_recorded = failure.is_recorded
        return renamed
    return failure
