"""GET /openapi.json: the HTTP API described from the very types that decode and encode it.

Bodies are decoded from raw bytes, so a framework could not see their types: `operations.py` names
them. A test compares the described paths with the served ones and drives them from the description.
"""

from collections.abc import Iterable, Mapping
from typing import Any, get_args

import msgspec
from litestar import Controller, Response, get

from gateway.admin.operation import EVENT_STREAM, Dialect, Operation
from gateway.admin.operations import OPERATIONS
from gateway.base.errors import GatewayError
from gateway.dialects.anthropic.events import Event
from gateway.dialects.anthropic.response import ErrorBody
from gateway.dialects.openai import errors as openai
from gateway.dialects.openai.request import (
    IGNORED,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    ChatRequest,
    CompletionRequest,
)

_WIRE = "gateway.dialects."
_ENVELOPES: dict[Dialect, Any] = {"anthropic": ErrorBody, "openai": openai.ErrorBody}
_ID_HEADERS: dict[Dialect, str] = {"anthropic": "request-id", "openai": "x-request-id"}
# Fields that these bodies have besides their types', see `wire/openai/request.py`.
_REFUSED: dict[Any, Mapping[str, tuple[Any, ...]]] = {
    ChatRequest: REFUSED_IN_CHAT,
    CompletionRequest: REFUSED_IN_COMPLETIONS,
}
_DATA = {"type": "string", "contentMediaType": "application/json"}
# One server-sent event; the names are the tags of `wire/anthropic/events.py`.
_NAMED_EVENT = {
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
        "data": _DATA,
    },
}
# The last one is `[DONE]`.
_BARE_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
_EVENTS: dict[Dialect, dict[str, Any]] = {"anthropic": _NAMED_EVENT, "openai": _BARE_EVENT}


def describe(operations: Iterable[Operation] = OPERATIONS) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    listed = list(operations)
    kinds: list[Any] = list(_ENVELOPES.values())
    for operation in listed:
        found = (*operation.replies, operation.body, operation.unready)
        kinds += [kind for kind in found if kind is not None]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(map(repr, kinds), schemas, strict=True))
    for body, refused in _REFUSED.items():
        if repr(body) in schema_of:
            name = schema_of[repr(body)]["$ref"].removeprefix("#/components/schemas/")
            _add_fields(components[name], refused)
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


def _add_fields(schema: dict[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> None:
    """What OpenAI's bodies may hold besides: fields without effect, fields that are refused but for
    what changes nothing, and null for whatever may be left out."""
    properties, required = schema["properties"], schema.get("required", [])
    for name in properties.keys() - set(required):
        if properties[name].get("default", ...) is None:
            continue  # null is one of its values
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    properties |= {name: {} for name in sorted(IGNORED)}
    properties |= {name: {"enum": [*neutral, None]} for name, neutral in sorted(refused.items())}


def _operation(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.other == EVENT_STREAM:
        content[EVENT_STREAM] = {"schema": _any_of(_EVENTS[d] for d in operation.dialects)}
    elif operation.other is not None:
        content[operation.other] = {"schema": {"type": "string"}}
    if operation.replies:
        content["application/json"] = {
            "schema": _any_of(schema_of[repr(kind)] for kind in operation.replies)
        }
    responses = {"200": _response(operation, "Done.", content)}
    if operation.unready is not None:
        body = {"application/json": {"schema": schema_of[repr(operation.unready)]}}
        responses["503"] = _response(operation, "Not ready.", body)
    for status, error, found in _errors(operation, schema_of):
        body = {"application/json": {"schema": _any_of(found)}}
        responses[status] = _response(operation, error.default, body)
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


def _errors(
    operation: Operation, schema_of: dict[str, Any]
) -> Iterable[tuple[str, type[GatewayError], list[Any]]]:
    """Each status with the envelopes that it comes in."""
    found: dict[str, tuple[type[GatewayError], list[Any]]] = {}
    for error in operation.errors:
        for dialect in operation.dialects:
            is_openai = dialect == "openai"
            status = openai.status_of(error()) if is_openai else error.status
            envelope = schema_of[repr(_ENVELOPES[dialect])]
            if not is_openai:
                kind = {"properties": {"error": {"properties": {"type": {"const": error.type}}}}}
                envelope = {"allOf": [envelope, kind]}
            found.setdefault(str(status), (error, []))[1].append(envelope)
    return [(status, error, envelopes) for status, (error, envelopes) in found.items()]


def _any_of(schemas: Iterable[Any]) -> Any:
    found = list(schemas)
    return found[0] if len(found) == 1 else {"anyOf": found}


def _response(operation: Operation, description: str, content: dict[str, Any]) -> dict[str, Any]:
    reference = {"$ref": "#/components/headers/RequestId"}
    headers = {_ID_HEADERS[dialect]: reference for dialect in operation.dialects}
    return {"description": description, "headers": headers, "content": content}


class OpenApiController(Controller):
    @get("/openapi.json", sync_to_thread=False)
    def openapi(self) -> Response[dict[str, Any]]:
        return Response(describe(), media_type="application/json")
