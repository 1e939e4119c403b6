"""The OpenAPI 3.1 document of the HTTP API, made from its operations.

The schemas come from the types that decode and encode the bodies.
"""

import re
from collections.abc import Iterable
from typing import Any, get_args

import msgspec

from gateway.admin.openapi.operations import EVENT_STREAM, Operation
from gateway.base.errors import GatewayError
from gateway.dialects.anthropic.response import Event
from gateway.dialects.errors import ENVELOPES, status_of
from gateway.dialects.fields import Fields
from gateway.dialects.openai.request import CHAT, COMPLETIONS, ChatRequest, CompletionRequest
from gateway.dialects.responses import request as responses
from gateway.http.query import NO_NUL
from gateway.http.speaking import ID_HEADERS
from gateway.prompt.ask import Dialect

# Two types of one name are told apart by their modules, whose package says nothing to a reader.
_PACKAGES = re.compile(rb"gateway\.(?:dialects|admin|ledger|http)\.")
# Fields of these bodies besides those of their types: refused ones, and those without effect. See
# `request.py` of their dialects.
_MORE_FIELDS: dict[Any, Fields] = {
    ChatRequest: CHAT,
    CompletionRequest: COMPLETIONS,
    responses.ResponsesRequest: responses.FIELDS,
}
_DATA = {"type": "string", "contentMediaType": "application/json"}
# One server-sent event; the names are the tags of `dialects/anthropic/response.py`.
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
_EVENTS: dict[Dialect, dict[str, Any]] = {
    "anthropic": _NAMED_EVENT,
    "openai": _BARE_EVENT,
    "gemini": _BARE_EVENT,
}


def describe(operations: Iterable[Operation]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    listed = list(operations)
    kinds: list[Any] = list(ENVELOPES.values())
    for operation in listed:
        found = (*operation.replies, operation.body, operation.unready)
        kinds += [kind for kind in found if kind is not None]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(map(repr, kinds), schemas, strict=True))
    for body, fields in _MORE_FIELDS.items():
        if repr(body) in schema_of:
            name = schema_of[repr(body)]["$ref"].removeprefix("#/components/schemas/")
            _add_fields(components[name], fields)
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
                "googleKey": {"type": "apiKey", "in": "header", "name": "x-goog-api-key"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
        },
    }
    plain: dict[str, Any] = msgspec.json.decode(_PACKAGES.sub(b"", msgspec.json.encode(document)))
    return plain


def _add_fields(schema: dict[str, Any], fields: Fields) -> None:
    """Describe what OpenAI's bodies may hold besides the fields of their types.

    There are fields without effect, fields that are refused except for their neutral values, and
    null for every field that may be left out.
    """
    properties, required = schema["properties"], schema.get("required", [])
    for name in properties.keys() - set(required):
        if properties[name].get("default", ...) is None:
            continue  # null is one of its values
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    properties |= {name: {} for name in sorted(fields.silent.union(fields.told))}
    properties |= {
        name: {"enum": [*neutral, None]} for name, neutral in sorted(fields.refused.items())
    }


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
        "parameters": [_without_nul(parameter) for parameter in operation.parameters],
        "responses": responses,
        "security": [{name: []} for name in operation.keys],
    }
    if operation.body is not None:
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[repr(operation.body)]}},
        }
    return made


def _without_nul(parameter: dict[str, Any]) -> dict[str, Any]:
    """Texts go to databases, of which PostgreSQL takes no NUL."""
    schema = parameter["schema"]
    if parameter["in"] != "query" or schema["type"] != "string" or "enum" in schema:
        return parameter
    return {**parameter, "schema": {**schema, "pattern": NO_NUL}}


def _errors(
    operation: Operation, schema_of: dict[str, Any]
) -> Iterable[tuple[str, type[GatewayError], list[Any]]]:
    """Each status with the envelopes that it comes in."""
    found: dict[str, tuple[type[GatewayError], list[Any]]] = {}
    for error in operation.errors:
        for dialect in operation.dialects:
            status = status_of(error(), dialect)
            envelope = schema_of[repr(ENVELOPES[dialect])]
            if dialect == "anthropic":
                kind = {"properties": {"error": {"properties": {"type": {"const": error.type}}}}}
                envelope = {"allOf": [envelope, kind]}
            found.setdefault(str(status), (error, []))[1].append(envelope)
    return [(status, error, envelopes) for status, (error, envelopes) in found.items()]


def _any_of(schemas: Iterable[Any]) -> Any:
    found = list(schemas)
    return found[0] if len(found) == 1 else {"anyOf": found}


def _response(operation: Operation, description: str, content: dict[str, Any]) -> dict[str, Any]:
    reference = {"$ref": "#/components/headers/RequestId"}
    headers = {ID_HEADERS[dialect]: reference for dialect in operation.dialects}
    return {"description": description, "headers": headers, "content": content}
