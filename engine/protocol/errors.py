"""Refusals: their codes, and the HTTP status of each."""

from typing import Literal, get_args

import msgspec

ErrorCode = Literal[
    "invalid_request",
    "unauthorized",
    "prompt_too_long",
    "too_costly",
    "duplicate_request",
    "unsupported",
    "not_found",
    "overloaded",
    "not_ready",
    "cancelled",
    "internal",
]

STATUS_OF: dict[ErrorCode, int] = dict.fromkeys(get_args(ErrorCode), 400) | {
    "unauthorized": 401,
    "not_found": 404,
    "duplicate_request": 409,
    "cancelled": 499,
    "internal": 500,
    "not_ready": 503,
    "overloaded": 529,
}


class ErrorReply(msgspec.Struct, frozen=True, omit_defaults=True):
    code: ErrorCode
    message: str
    # Whether the client may read the message, because it is about the request's own fields alone.
    is_public: bool = False
    # Whether `overloaded` is about this request alone. The engine may then take other requests.
    only_this: bool = False
