"""What an operation of the HTTP API is, and what many of them share."""

from dataclasses import dataclass
from typing import Any, Literal

from gateway.base.errors import (
    Forbidden,
    GatewayError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    Unauthenticated,
)

Dialect = Literal["anthropic", "openai"]
Security = tuple[dict[str, list[str]], ...]
EVENT_STREAM = "text/event-stream"
PLAIN_TEXT = "text/plain; version=0.0.4; charset=utf-8"
READING = (
    InvalidRequest,
    Unauthenticated,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    GatewayError,
    Overloaded,
)
ADMIN_KEYS: Security = ({"adminKey": []}, {"bearer": []})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `replies` are alternatives; `other` is a content type of the 200
    besides JSON; `dialects` whose error envelopes, statuses and id headers it answers with."""

    id: str
    method: str
    path: str
    summary: str
    replies: tuple[Any, ...] = ()
    body: Any = None
    other: str | None = None
    security: Security = ()
    parameters: tuple[dict[str, Any], ...] = ()
    errors: tuple[type[GatewayError], ...] = ()
    unready: Any = None
    dialects: tuple[Dialect, ...] = ("anthropic",)


def query(name: str, schema: dict[str, Any], *, required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": required, "schema": schema}


def path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
