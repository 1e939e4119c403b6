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
    # Whether the message tells only of the request's own fields, so that its client may read it.
    is_public: bool = False
    # Whether it was `overloaded` for this request, and others may be taken.
    only_this: bool = False
