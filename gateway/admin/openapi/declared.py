"""Operations as the handlers of the application declare them.

Litestar parses each handler's signature, its dependencies and its options. The types of bodies and
parameters are turned into JSON Schema by msgspec, which decodes and encodes them. Litestar's own
generator is not used: it leaves out bounds of 0, defaults and docstrings, and it calls an optional
parameter of a query nullable.
"""

import re
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from litestar import Litestar, MediaType, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import ParameterKwarg
from litestar.response import Stream
from litestar.response.base import ASGIResponse
from litestar.routes import HTTPRoute
from litestar.types import Method
from litestar.typing import FieldDefinition

from gateway.admin.bodies import JsonBody
from gateway.admin.openapi.operation import READING, SENDING, Operation, Security
from gateway.http.auth import AdminAuth

_ADMIN_KEYS: Security = ({"adminKey": []}, {"bearer": []})
_PATH_PARAMETER = re.compile(r"{(\w+)}")


def declared_operations(app: Litestar, by_hand: Iterable[Operation] = ()) -> list[Operation]:
    """Every operation that the application serves, by path and method.

    Routes of `by_hand` are taken from there: their handlers read and write raw bytes.
    """
    known = {(operation.path, operation.method): operation for operation in by_hand}
    made = []
    for route in app.routes:
        if not isinstance(route, HTTPRoute):
            continue
        for method, (handler, _) in route.route_handler_map.items():
            if not handler.resolve_include_in_schema():
                continue
            place = route.path_format, method.lower()
            made.append(
                known.get(place) or _operation(handler, *place, _id_of(handler, method, route))
            )
    return sorted(made, key=lambda operation: (operation.path, operation.method))


def _id_of(handler: HTTPRouteHandler, method: Method, route: HTTPRoute) -> str:
    declared = handler.operation_id
    if callable(declared):
        return declared(handler, method, route.path_components)
    return str(declared)


def _operation(handler: HTTPRouteHandler, path: str, method: str, id: str) -> Operation:
    dependencies = handler.resolve_dependencies().values()
    body = next((each.kind for each in dependencies if isinstance(each, JsonBody)), None)
    needs_key = AdminAuth in handler.resolve_middleware()
    # A handler that returns a Response may leave its type to it.
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
        security=_ADMIN_KEYS if needs_key else (),
        parameters=tuple(_parameters(handler, path)),
        errors=(READING if body is None else SENDING) if needs_key else (),
        unready=unready.data_container if unready else None,
    )


def _replies(handler: HTTPRouteHandler) -> tuple[Any, ...]:
    """The alternative types of the 200, from the return annotation or the declared response."""
    if declared := (handler.responses or {}).get(200):
        return (declared.data_container,)
    found = handler.parsed_fn_signature.return_type.raw
    if get_origin(found) is Response:
        (found,) = get_args(found)
    if found in (Stream, ASGIResponse):
        return ()
    return get_args(found) if get_origin(found) in (Union, UnionType) else (found,)


def _parameters(handler: HTTPRouteHandler, path: str) -> Iterator[dict[str, Any]]:
    """The path's parameters, then those of the query, also of the handler's dependencies."""
    for name in _PATH_PARAMETER.findall(path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    fields = {field.name: field for field in _query_fields(handler, _fields_of(handler))}
    for field in fields.values():
        kwarg = field.kwarg_definition
        assert isinstance(kwarg, ParameterKwarg)
        yield {
            "name": kwarg.name or field.name,
            "in": "query",
            "required": not field.has_default,
            "schema": _query_schema(field, kwarg),
        }


def _fields_of(owner: Any) -> dict[str, FieldDefinition]:
    fields: dict[str, FieldDefinition] = owner.parsed_fn_signature.parameters
    return fields


def _query_fields(
    handler: HTTPRouteHandler, fields: dict[str, FieldDefinition]
) -> Iterator[FieldDefinition]:
    dependencies = handler.resolve_dependencies()
    for name, field in fields.items():
        if name in dependencies:
            yield from _query_fields(handler, _fields_of(dependencies[name]))
        elif isinstance(field.kwarg_definition, ParameterKwarg):
            if field.kwarg_definition.param_type == "query":
                yield field


def _query_schema(field: FieldDefinition, kwarg: ParameterKwarg) -> dict[str, Any]:
    """The schema of a parameter that is there: a query string has no null."""
    kind = _without_none(field.annotation)
    schema: dict[str, Any] = msgspec.json.schema(Annotated[kind, _limits(kwarg)])
    if get_origin(kind) is list:
        schema["items"] = _with_choices(get_args(kind)[0], schema["items"])
    schema = _with_choices(kind, schema)
    if field.has_default and field.default is not None:
        schema["default"] = field.default
    return schema


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    return next(kind for kind in get_args(annotation) if kind is not type(None))


def _limits(kwarg: ParameterKwarg) -> msgspec.Meta:
    found: dict[str, Any] = {
        "ge": kwarg.ge,
        "le": kwarg.le,
        "min_length": kwarg.min_length if kwarg.min_items is None else kwarg.min_items,
        "max_length": kwarg.max_length if kwarg.max_items is None else kwarg.max_items,
    }
    return msgspec.Meta(**{name: limit for name, limit in found.items() if limit is not None})


def _with_choices(kind: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """A Literal's words in the order of their declaration; msgspec sorts them."""
    if get_origin(kind) is not Literal:
        return schema
    return {"type": "string", "enum": list(get_args(kind))}
