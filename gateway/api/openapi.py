"""GET /openapi.json: the HTTP API described from the very types that decode and encode it.

Bodies are decoded from raw bytes, so a framework could not see their types: this module names them.
A test compares the described paths with the served ones and drives them from the description.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from litestar import Controller, Response, get

from gateway.api.admin import EngineReport, Lease, Overview, TurnDivergence
from gateway.api.health import Readiness
from gateway.errors import (
    EngineTimeout,
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
from gateway.ledger.queries import Turn
from gateway.wire.anthropic.events import Event
from gateway.wire.anthropic.request import VERSIONS, CountTokensRequest, MessagesRequest
from gateway.wire.anthropic.response import ErrorBody, Message, ModelInfo, ModelList, TokenCount

_WIRE = "gateway.wire.anthropic."
_READING = (InvalidRequest, Unauthenticated, NotFound, MethodNotAllowed, GatewayError, Overloaded)
_ASKING = (*_READING, Forbidden, TooLarge, UnsupportedMedia, EngineTimeout)
_Security = tuple[dict[str, list[str]], ...]
_KEYS: _Security = ({"apiKey": []}, {"bearer": []})
_ADMIN_KEYS: _Security = ({"adminKey": []}, {"bearer": []})
_VERSION = {
    "name": "anthropic-version",
    "in": "header",
    "required": True,
    "schema": {"type": "string", "enum": list(VERSIONS)},
}
_HEADERS = [
    {
        "name": "anthropic-beta",
        "in": "header",
        "schema": {"type": "string"},
        "description": "Names of betas, separated by commas; every one is accepted.",
    },
    {
        "name": "anthropic-workspace-id",
        "in": "header",
        "schema": {"type": "string"},
        "description": "Must be the key's own workspace.",
    },
]

# One server-sent event; the names are the tags of `wire/anthropic/events.py`.
_EVENT = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "event": {
            "enum": [
                *(str(kind.__struct_config__.tag) for kind in get_args(Event)),
                "ping",
                "error",
            ]
        },
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}
_OTHER: dict[str, dict[str, Any]] = {
    "text/event-stream": _EVENT,
    "text/plain; version=0.0.4; charset=utf-8": {"type": "string"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `other` are content types of the 200 besides JSON, see `_OTHER`."""

    id: str
    method: str
    path: str
    summary: str
    reply: Any = None
    body: Any = None
    other: tuple[str, ...] = ()
    security: _Security = ()
    parameters: tuple[dict[str, Any], ...] = ()
    errors: tuple[type[GatewayError], ...] = ()
    unready: Any = None


def _query(name: str, schema: dict[str, Any], *, required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": required, "schema": schema}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


OPERATIONS = (
    Operation(
        id="createMessage",
        method="post",
        path="/v1/messages",
        summary="Answer a prompt; with `stream` as server-sent events.",
        reply=Message,
        body=MessagesRequest,
        other=("text/event-stream",),
        security=_KEYS,
        parameters=(_VERSION, *_HEADERS),
        errors=_ASKING,
    ),
    Operation(
        id="countTokens",
        method="post",
        path="/v1/messages/count_tokens",
        summary="Count a prompt's tokens, exactly.",
        reply=TokenCount,
        body=CountTokensRequest,
        security=_KEYS,
        parameters=(_VERSION, *_HEADERS),
        errors=_ASKING,
    ),
    Operation(
        id="listModels",
        method="get",
        path="/v1/models",
        summary="The models that may be asked for.",
        reply=ModelList,
        security=_KEYS,
        parameters=(
            _query("after_id", {"type": "string"}),
            _query("before_id", {"type": "string"}),
            _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20}),
        ),
        errors=_READING,
    ),
    Operation(
        id="getModel",
        method="get",
        path="/v1/models/{model_id}",
        summary="One model.",
        reply=ModelInfo,
        security=_KEYS,
        parameters=(_path("model_id"),),
        errors=_READING,
    ),
    Operation(
        id="getOverview",
        method="get",
        path="/admin/v1/overview",
        summary="Totals, rates, savings and time buckets.",
        reply=Overview,
        security=_ADMIN_KEYS,
        parameters=(
            _query(
                "seconds",
                {"type": "integer", "minimum": 60, "maximum": 31_536_000, "default": 3600},
            ),
        ),
        errors=_READING,
    ),
    Operation(
        id="listEngines",
        method="get",
        path="/admin/v1/engines",
        summary="State, description and statistics of each engine.",
        reply=list[EngineReport],
        security=_ADMIN_KEYS,
        errors=_READING,
    ),
    Operation(
        id="listTurns",
        method="get",
        path="/admin/v1/turns",
        summary="The newest turns.",
        reply=list[Turn],
        security=_ADMIN_KEYS,
        parameters=(
            _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}),
        ),
        errors=_READING,
    ),
    Operation(
        id="getDivergence",
        method="get",
        path="/admin/v1/turns/{turn_id}/divergence",
        summary="Where a turn's prompt first differs from an earlier one's.",
        reply=TurnDivergence,
        security=_ADMIN_KEYS,
        parameters=(
            _path("turn_id"),
            _query("from", {"type": "string", "minLength": 1, "maxLength": 64}, required=True),
        ),
        errors=_READING,
    ),
    Operation(
        id="listLeases",
        method="get",
        path="/admin/v1/leases",
        summary="Live entries of all engines.",
        reply=list[Lease],
        security=_ADMIN_KEYS,
        errors=_READING,
    ),
    Operation(
        id="getHealth",
        method="get",
        path="/healthz",
        summary="The process serves.",
        reply=dict[str, str],
    ),
    Operation(
        id="getReadiness",
        method="get",
        path="/readyz",
        summary="Ready while at least one engine is.",
        reply=Readiness,
        unready=Readiness,
    ),
    Operation(
        id="getReadinessAsHealth",
        method="get",
        path="/health",
        summary="Ready while at least one engine is, under vLLM's name for it.",
        reply=Readiness,
        unready=Readiness,
    ),
    Operation(
        id="getMetrics",
        method="get",
        path="/metrics",
        summary="Prometheus metrics.",
        other=("text/plain; version=0.0.4; charset=utf-8",),
    ),
    Operation(
        id="getDescription",
        method="get",
        path="/openapi.json",
        summary="This description.",
        reply=dict[str, Any],
    ),
)


def describe(operations: Iterable[Operation] = OPERATIONS) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    listed = list(operations)
    kinds = [kind for o in listed for kind in (o.reply, o.body, o.unready) if kind is not None]
    kinds.append(ErrorBody)
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(map(repr, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in listed:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schema_of)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Holdfast", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": {"RequestId": {"schema": {"type": "string"}}},
            "securitySchemes": {
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "adminKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
        },
    }
    # Two types of one name are told apart by their modules; the package's own path says nothing.
    plain: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(document).replace(_WIRE.encode(), b"")
    )
    return plain


def _operation(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    content = {kind: {"schema": _OTHER[kind]} for kind in operation.other}
    if operation.reply is not None:
        content["application/json"] = {"schema": schema_of[repr(operation.reply)]}
    responses = {"200": _response("Done.", content)}
    if operation.unready is not None:
        body = {"application/json": {"schema": schema_of[repr(operation.unready)]}}
        responses["503"] = _response("Not ready.", body)
    for error in operation.errors:
        body = {"application/json": {"schema": _error_schema(error, schema_of)}}
        responses[str(error.status)] = _response(error.default, body)
    made: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "parameters": list(operation.parameters),
        "responses": responses,
        "security": list(operation.security),
    }
    if operation.body is not None:
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[repr(operation.body)]}},
        }
    return made


def _response(description: str, content: dict[str, Any]) -> dict[str, Any]:
    headers = {"request-id": {"$ref": "#/components/headers/RequestId"}}
    return {"description": description, "headers": headers, "content": content}


def _error_schema(error: type[GatewayError], schema_of: dict[str, Any]) -> dict[str, Any]:
    kind = {"properties": {"error": {"properties": {"type": {"const": error.type}}}}}
    return {"allOf": [schema_of[repr(ErrorBody)], kind]}


class OpenApiController(Controller):
    @get("/openapi.json", sync_to_thread=False)
    def openapi(self) -> Response[dict[str, Any]]:
        return Response(describe(), media_type="application/json")
