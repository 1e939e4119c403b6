"""What an operation of the HTTP API is."""

from dataclasses import dataclass
from typing import Any

from gateway.base.errors import (
    Forbidden,
    GatewayError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    TooLarge,
    Unauthenticated,
    UnsupportedMedia,
)
from gateway.prompt.ask import Dialect

Security = tuple[dict[str, list[str]], ...]
Errors = tuple[type[GatewayError], ...]

EVENT_STREAM = "text/event-stream"
READING: Errors = (
    InvalidRequest,
    Unauthenticated,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    GatewayError,
    Overloaded,
)
"""The errors of an operation that needs a key."""
SENDING: Errors = (*READING, TooLarge, UnsupportedMedia)
"""The errors of an operation that needs a key and takes a body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    `method` is in lower case. `replies` are the alternative types of the JSON answer, `other` is a
    content type of the answer besides JSON. `unready` is the type of a 503. `dialects` are those
    whose error envelopes, statuses and id headers the operation answers with. `is_lenient`: bodies
    are taken in more forms than the schema says, as Google's own parser takes them.
    """

    id: str
    method: str
    path: str
    summary: str
    replies: tuple[Any, ...] = ()
    body: Any = None
    other: str | None = None
    security: Security = ()
    parameters: tuple[dict[str, Any], ...] = ()
    errors: Errors = ()
    unready: Any = None
    dialects: tuple[Dialect, ...] = ("anthropic",)
    is_lenient: bool = False
