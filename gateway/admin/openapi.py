"""GET /openapi.json: the OpenAPI 3.1 description of the HTTP API.

Operations are as handlers declare them, or as the table of the model APIs says. msgspec, which
decodes and encodes them, makes JSON Schema of the types of bodies and parameters. Litestar's own
generator leaves out bounds of 0, defaults and docstrings, and calls an optional parameter nullable.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from litestar import Controller, Litestar, MediaType, Response, get
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import ParameterKwarg
from litestar.response import Stream
from litestar.response.base import ASGIResponse
from litestar.routes import HTTPRoute
from litestar.typing import FieldDefinition

from gateway.admin.controller import JsonBody
from gateway.base import errors
from gateway.dialects.anthropic import response as batches
from gateway.dialects.anthropic.batch import CreateBatch
from gateway.dialects.anthropic.request import VERSIONS, CountTokensRequest, MessagesRequest
from gateway.dialects.anthropic.response import EVENTS, Message, ModelInfo, ModelList, TokenCount
from gateway.dialects.errors import ENVELOPES, status_of
from gateway.dialects.fields import Fields
from gateway.dialects.gemini import response as gemini
from gateway.dialects.gemini.request import CreateRequest, GenerateRequest, UpdateRequest
from gateway.dialects.interactions import response as interactions
from gateway.dialects.interactions.request import InteractionRequest
from gateway.dialects.openai import response as openai
from gateway.dialects.openai.request import CHAT, COMPLETIONS, ChatRequest, CompletionRequest
from gateway.dialects.responses import response as responses
from gateway.dialects.responses.compaction import CompactedResponse
from gateway.dialects.responses.request import FIELDS as RESPONSES
from gateway.dialects.responses.request import ConversationRequest, ResponsesRequest
from gateway.http import cache_entries
from gateway.http.auth import AdminAuth
from gateway.http.query import NO_NUL
from gateway.http.speaking import ID_HEADERS, dialect_of_path
from gateway.prompt.ask import Dialect

EVENT_STREAM = "text/event-stream"
_JSON = "application/json"
Schema = dict[str, Any]
Errors = tuple[type[errors.GatewayError], ...]
_KEYED: Errors = (
    errors.InvalidRequest,
    errors.Unauthenticated,
    errors.Forbidden,
    errors.NotFound,
    errors.MethodNotAllowed,
    errors.GatewayError,
    errors.Overloaded,
)
_SENDING: Errors = (*_KEYED, errors.TooLarge, errors.UnsupportedMedia)
_ASKING: Errors = (*_SENDING, errors.EngineTimeout)
_TURNS: Errors = (*_ASKING, errors.RateLimited, errors.SpendLimitReached)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    id: str
    # The method in lower case.
    method: str
    path: str
    summary: str
    # The alternative types of the JSON answer.
    replies: tuple[Any, ...] = ()
    body: Any = None
    # A content type of answers besides JSON.
    other: str | None = None
    # The security schemes, of which one is enough.
    keys: tuple[str, ...] = ()
    parameters: tuple[Schema, ...] = ()
    errors: Errors = ()
    # The type of the answer with status 503.
    unready: Any = None
    # The dialects whose error envelopes, statuses and id headers it answers with.
    dialects: tuple[Dialect, ...] = ("anthropic",)
    # Whether the body may have more forms than the schema says.
    is_lenient: bool = False


_TEXT: Schema = {"type": "string"}


def _given(name: str, schema: Schema, where: str = "query", **more: Any) -> Schema:
    if where == "query" and schema["type"] == "string" and "enum" not in schema:
        # Texts go to the database, and PostgreSQL takes no NUL.
        schema = {**schema, "pattern": NO_NUL}
    return {"name": name, "in": where, "required": False, "schema": schema, **more}


def operations_of(app: Litestar) -> list[Operation]:
    """Every operation that the application serves, by path and method."""
    by_hand = {(call.path, call.method): call for call in _model_apis()}
    operations = []
    for route in app.routes:
        if not isinstance(route, HTTPRoute):
            continue
        for method, (handler, _) in route.route_handler_map.items():
            place = route.path_format, method.lower()
            if handler.resolve_include_in_schema():
                id = handler.operation_id
                id = id(handler, method, route.path_components) if callable(id) else id
                operations.append(by_hand.get(place) or _declared(handler, *place, str(id)))
    return sorted(operations, key=lambda operation: (operation.path, operation.method))


def _declared(handler: HTTPRouteHandler, path: str, method: str, id: str) -> Operation:
    dependencies = handler.resolve_dependencies()
    body = next(
        (
            dependency.kind
            for dependency in dependencies.values()
            if isinstance(dependency, JsonBody)
        ),
        None,
    )
    needs_key = AdminAuth in handler.resolve_middleware()
    # A handler that returns a Response may leave the media type to it.
    is_json = handler.media_type in ("", MediaType.JSON)
    unready = (handler.responses or {}).get(503)
    return Operation(
        id=id,
        method=method,
        path=path,
        summary=handler.summary or "",
        replies=_replies(handler) if is_json else (),
        body=body,
        other=None if is_json else str(handler.media_type),
        keys=("adminKey", "bearer") if needs_key else (),
        parameters=(*_path_parameters(path), *_query_parameters(handler, handler).values()),
        errors=(_KEYED if body is None else _SENDING) if needs_key else (),
        unready=unready.data_container if unready else None,
    )


def _replies(handler: HTTPRouteHandler) -> tuple[Any, ...]:
    """The alternative types of the 200, from the return annotation or the declared response."""
    declared = (handler.responses or {}).get(200)
    if declared:
        return (declared.data_container,)
    returned = handler.parsed_fn_signature.return_type.raw
    if get_origin(returned) is Response:
        (returned,) = get_args(returned)
    if returned in (Stream, ASGIResponse):
        return ()
    return get_args(returned) if get_origin(returned) in (Union, UnionType) else (returned,)


def _path_parameters(path: str) -> tuple[Schema, ...]:
    return tuple(
        _given(name, _TEXT, "path", required=True) for name in re.findall(r"{(\w+)}", path)
    )


def _query_parameters(handler: HTTPRouteHandler, owner: Any) -> dict[str, Schema]:
    """The query parameters of a handler or a dependency, with those of its own dependencies."""
    dependencies = handler.resolve_dependencies()
    schemas = dict[str, Schema]()
    fields: dict[str, FieldDefinition] = owner.parsed_fn_signature.parameters
    for name, field in fields.items():
        kwarg = field.kwarg_definition
        if name in dependencies:
            schemas |= _query_parameters(handler, dependencies[name])
        elif isinstance(kwarg, ParameterKwarg) and kwarg.param_type == "query":
            schema = _query_schema(field, kwarg)
            required = not field.has_default
            schemas[name] = _given(kwarg.name or name, schema, required=required)
    return schemas


def _query_schema(field: FieldDefinition, kwarg: ParameterKwarg) -> Schema:
    """The schema of a parameter's value. It leaves null out, since a query string has none."""
    kind = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(member for member in get_args(kind) if member is not type(None))
    limits = {
        "ge": kwarg.ge,
        "le": kwarg.le,
        "min_length": kwarg.min_length if kwarg.min_items is None else kwarg.min_items,
        "max_length": kwarg.max_length if kwarg.max_items is None else kwarg.max_items,
    }
    bounds: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    schema: Schema = msgspec.json.schema(Annotated[kind, msgspec.Meta(**bounds)])
    is_list = get_origin(kind) is list
    item = get_args(kind)[0] if is_list else kind
    place = schema["items"] if is_list else schema
    if get_origin(item) is Literal:
        # The values keep the order of their declaration. msgspec would sort them.
        place |= {"type": "string", "enum": list(get_args(item))}
    if field.has_default and field.default is not None:
        schema["default"] = field.default
    return schema


# The model APIs.

_MODEL_APIS = Path(__file__).with_name("model_apis.toml")
_LIMIT = _given("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20})
_PAGE = (_given("after_id", _TEXT), _given("before_id", _TEXT), _LIMIT)
_VERSION = _given("anthropic-version", {**_TEXT, "enum": list(VERSIONS)}, "header", required=True)
# Both SDKs list models. Anthropic's clients must send this header, OpenAI's do not.
_VERSION_OF_EITHER = _given("anthropic-version", _TEXT, "header")
_BETAS = "Names of betas, separated by commas; every one is accepted."
_WORKSPACE = "Must be the key's own workspace."
_HEADERS = (
    _VERSION,
    _given("anthropic-beta", _TEXT, "header", description=_BETAS),
    _given("anthropic-workspace-id", _TEXT, "header", description=_WORKSPACE),
)
_GOOGLE_PAGE = (
    _given("pageSize", {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}),
    _given("pageToken", _TEXT),
)
_CACHE_PAGE = (
    _given("after_id", _TEXT),
    _given(
        "limit",
        {"type": "integer", "minimum": 1, "maximum": cache_entries.MAX_PAGE, "default": 100},
    ),
    _given("message_id", _TEXT),
)
_ITEMS = (
    _given("after", _TEXT),
    _given("order", {**_TEXT, "enum": ["asc", "desc"]}),
    _given("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
)
_INTERACTION = (
    _given("include_input", {"type": "boolean"}),
    _given("stream", {"type": "boolean"}),
)
_CALL = "The model's id, `:` and one of `generateContent`, `streamGenerateContent`, `countTokens`."
_CALLED = (
    _given("model_id", _TEXT, "path", required=True, description=_CALL),
    _given("alt", {"type": "string", "enum": ["json", "sse"]}),
)
_EITHER: tuple[Dialect, ...] = ("anthropic", "openai", "gemini")


def _is(*replies: Any, **more: Any) -> dict[str, Any]:
    return {"replies": replies, **more}


# What the table of the model APIs does not say, by the operation's id without the suffix `AtV1`.
_KINDS: dict[str, dict[str, Any]] = {
    "createMessageBatch": _is(batches.MessageBatch, body=CreateBatch, parameters=(_VERSION,)),
    "listMessageBatches": _is(batches.MessageBatchList, parameters=_PAGE),
    "getMessageBatch": _is(batches.MessageBatch),
    "deleteMessageBatch": _is(batches.DeletedBatch),
    "cancelMessageBatch": _is(batches.MessageBatch),
    "getMessageBatchResults": _is(other="application/x-jsonl"),
    "createCachedContent": _is(gemini.CachedContent, body=CreateRequest),
    "listCachedContents": _is(gemini.CachedContentList, parameters=_GOOGLE_PAGE),
    "getCachedContent": _is(gemini.CachedContent),
    "updateCachedContent": _is(gemini.CachedContent, body=UpdateRequest),
    "deleteCachedContent": _is(gemini.Nothing),
    "listCacheEntries": _is(cache_entries.CacheEntryList, parameters=_CACHE_PAGE, dialects=_EITHER),
    "deleteCacheEntry": _is(cache_entries.DeletedCacheEntry, dialects=_EITHER),
    "createInteraction": _is(interactions.Interaction, body=InteractionRequest, other=EVENT_STREAM),
    "getInteraction": _is(interactions.Interaction, parameters=_INTERACTION),
    "deleteInteraction": _is(gemini.Nothing),
    "cancelInteraction": _is(interactions.Interaction),
    "createMessage": _is(Message, body=MessagesRequest, other=EVENT_STREAM, parameters=_HEADERS),
    "countTokens": _is(TokenCount, body=CountTokensRequest, parameters=_HEADERS, errors=_ASKING),
    "createChatCompletion": _is(openai.ChatCompletion, body=ChatRequest, other=EVENT_STREAM),
    "createCompletion": _is(openai.Completion, body=CompletionRequest, other=EVENT_STREAM),
    "createResponse": _is(responses.Response, body=ResponsesRequest, other=EVENT_STREAM),
    "countInputTokens": _is(responses.InputTokens, body=ResponsesRequest, errors=_ASKING),
    "compactResponses": _is(CompactedResponse, body=ResponsesRequest),
    "getResponse": _is(responses.Response),
    "deleteResponse": _is(responses.Deleted),
    "listInputItems": _is(responses.ItemList, parameters=_ITEMS),
    "createConversation": _is(responses.ConversationShown, body=ConversationRequest),
    "getKeptConversation": _is(responses.ConversationShown),
    "updateConversation": _is(responses.ConversationShown, body=ConversationRequest),
    "deleteConversation": _is(responses.Deleted),
    "listConversationItems": _is(responses.ItemList, parameters=_ITEMS),
    "addConversationItems": _is(responses.ItemList, body=ConversationRequest),
    "getConversationItem": _is(other="application/json"),
    "deleteConversationItem": _is(responses.ConversationShown),
    "listModels": _is(
        ModelList,
        openai.ModelList,
        gemini.ModelList,
        parameters=(_VERSION_OF_EITHER, *_PAGE),
        dialects=_EITHER,
    ),
    "getModel": _is(
        ModelInfo,
        openai.Model,
        gemini.Model,
        parameters=(_VERSION_OF_EITHER,),
        dialects=_EITHER,
    ),
    "callGeminiModel": _is(
        gemini.GenerateContentResponse,
        gemini.TokenCount,
        list[gemini.GenerateContentResponse],
        body=GenerateRequest,
        other=EVENT_STREAM,
        parameters=_CALLED,
        dialects=("gemini",),
    ),
    "listGeminiModels": _is(gemini.ModelList),
    "getGeminiModel": _is(gemini.Model),
}


def _model_apis() -> Iterator[Operation]:
    """The operations of the model APIs. Dialect, keys, path parameters and errors follow from path
    and body."""
    operations = tomllib.loads(_MODEL_APIS.read_text("utf-8"))
    for id, (method, path, summary) in operations.items():
        kinds = {"dialects": (dialect_of_path(path),), **_KINDS[id.removesuffix("AtV1")]}
        is_google = kinds["dialects"] == ("gemini",)
        has_body = "body" in kinds
        parameters = kinds.pop("parameters", ())
        in_path = () if parameters is _CALLED else _path_parameters(path)
        values: dict[str, Any] = {
            "keys": ("apiKey", "googleKey", "bearer") if is_google else ("apiKey", "bearer"),
            "errors": _TURNS if has_body else _KEYED,
            "is_lenient": is_google and has_body,
            "parameters": (*in_path, *parameters),
            **kinds,
        }
        yield Operation(id=id, method=method, path=path, summary=summary, **values)


# Where two types have one name, msgspec puts their modules before it. The package is left out,
# because it says nothing to a reader.
_PACKAGES = re.compile(rb"gateway\.(?:(?:dialects|admin|ledger|http)\.)?(?=[a-z])")
# The types whose bodies may have further fields, refused ones and ones without effect. See
# `request.py` of their dialects.
_MORE_FIELDS: dict[Any, Fields] = {
    ChatRequest: CHAT,
    CompletionRequest: COMPLETIONS,
    ResponsesRequest: RESPONSES,
}
_DATA = {"type": "string", "contentMediaType": "application/json"}
# One server-sent event. `dialects/anthropic/response.py` has the names.
_NAMED_EVENT = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {"event": {"enum": [*EVENTS, "ping", "error"]}, "data": _DATA},
}
# The last event's data is `[DONE]`.
_BARE_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
_EVENTS = {"anthropic": _NAMED_EVENT, "openai": _BARE_EVENT, "gemini": _BARE_EVENT}


def describe(operations: Iterable[Operation]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    listed = list(operations)
    kinds: list[Any] = list(ENVELOPES.values())
    for operation in listed:
        kinds_there = (*operation.replies, operation.body, operation.unready)
        kinds += [kind for kind in kinds_there if kind is not None]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    for component in components.values():
        if "description" in component:
            component["description"] = cleandoc(component["description"])
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
    """Describe what OpenAI's bodies may hold besides the fields of their types: fields without
    effect, fields that must be neutral, and null for every optional one."""
    properties = schema["properties"]
    required = schema.get("required", [])
    for name in properties.keys() - set(required):
        if properties[name].get("default", ...) is None:
            continue  # null is one of its values
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    properties |= {name: {} for name in sorted(fields.silent.union(fields.told))}
    properties |= {
        name: {"enum": [*neutral, None]} for name, neutral in sorted(fields.refused.items())
    }


def _operation(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    reference = {"$ref": "#/components/headers/RequestId"}
    headers = {ID_HEADERS[dialect]: reference for dialect in operation.dialects}

    def response(description: str, **content: list[Any]) -> dict[str, Any]:
        """A response. `content` has the alternative schemas of the body by media type."""
        schemas_told = {
            media: {"schema": schema[0] if len(schema) == 1 else {"anyOf": schema}}
            for media, schema in content.items()
        }
        return {"description": description, "headers": headers, "content": schemas_told}

    content: dict[str, list[Any]] = {}
    if operation.other == EVENT_STREAM:
        content[EVENT_STREAM] = [_EVENTS[dialect] for dialect in operation.dialects]
    elif operation.other is not None:
        content[operation.other] = [_TEXT]
    if operation.replies:
        content[_JSON] = [schema_of[repr(kind)] for kind in operation.replies]
    responses = {"200": response("Done.", **content)}
    if operation.unready is not None:
        responses["503"] = response("Not ready.", **{_JSON: [schema_of[repr(operation.unready)]]})
    # Each status with the envelopes that it comes in.
    envelopes: dict[str, list[Any]] = {}
    for error in operation.errors:
        for dialect in operation.dialects:
            status = str(status_of(error(), dialect))
            envelope = schema_of[repr(ENVELOPES[dialect])]
            if dialect == "anthropic":
                kind = {"properties": {"error": {"properties": {"type": {"const": error.type}}}}}
                envelope = {"allOf": [envelope, kind]}
            errors_there = envelopes.setdefault(status, [])
            errors_there.append(envelope)
            description = (
                responses[status]["description"] if len(errors_there) > 1 else error.default
            )
            responses[status] = response(description, **{_JSON: errors_there})
    documented: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "parameters": list(operation.parameters),
        "responses": responses,
        "security": [{name: []} for name in operation.keys],
    }
    if operation.body is not None:
        body = {_JSON: {"schema": schema_of[repr(operation.body)]}}
        documented["requestBody"] = {"required": True, "content": body}
    return documented


class OpenApiController(Controller):
    @get(
        "/openapi.json",
        operation_id="getDescription",
        summary="This description.",
        responses={200: ResponseSpec(dict[str, Any], description="The description.")},
        sync_to_thread=False,
    )
    def openapi(self, state: State) -> ASGIResponse:
        return ASGIResponse(body=state.openapi, media_type="application/json")


def describe_once(app: Litestar) -> None:
    """Set two values of the application's state: `openapi`, the document in bytes, and
    `declared_queries`, the parameters against which queries are checked."""
    document = describe(operations_of(app))
    app.state.openapi = msgspec.json.encode(document)
    app.state.declared_queries = {
        (path, method): [
            parameter for parameter in operation["parameters"] if parameter["in"] == "query"
        ]
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
