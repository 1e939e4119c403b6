"""From Google's schemas (a subset of OpenAPI 3.0) to JSON Schema.

`OBJECT` becomes `object`, `nullable` becomes another type, `propertyOrdering` the order of the
properties, and counts that came as strings become numbers. Keywords of JSON Schema pass unchanged.
"""

from typing import Any

from gateway.base.errors import InvalidRequest

MAX_DEPTH = 64
_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_NAMES = {
    "additional_properties": "additionalProperties",
    "any_of": "anyOf",
    "defs": "$defs",
    "max_items": "maxItems",
    "max_length": "maxLength",
    "max_properties": "maxProperties",
    "min_items": "minItems",
    "min_length": "minLength",
    "min_properties": "minProperties",
    "property_ordering": "propertyOrdering",
    "ref": "$ref",
}
_UNSPECIFIED = "TYPE_UNSPECIFIED"


def json_schema(schema: dict[str, Any], path: str, depth: int = 0) -> dict[str, Any]:
    """Raise InvalidRequest, with `path` in front, for what is no schema or is nested too deep."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{path}: nested more than {MAX_DEPTH} levels deep")
    given = {_NAMES.get(key, key): value for key, value in schema.items() if value is not None}
    is_nullable = given.pop("nullable", False) is True
    order = given.pop("propertyOrdering", None)
    made: dict[str, Any] = {}
    for key, value in given.items():
        where = f"{path}.{key}"
        match key:
            case "type" if isinstance(value, str):
                if value != _UNSPECIFIED:
                    made["type"] = value.lower()
            case "properties" | "$defs" if isinstance(value, dict):
                made[key] = {
                    name: _inner(each, f"{where}.{name[:64]}", depth)
                    for name, each in value.items()
                }
            case "items" | "additionalProperties" if isinstance(value, dict):
                made[key] = _inner(value, where, depth)
            case "anyOf" if isinstance(value, list):
                made[key] = [
                    _inner(each, f"{where}[{index}]", depth) for index, each in enumerate(value)
                ]
            case _ if key in _COUNTS and isinstance(value, str) and value.isdecimal():
                made[key] = int(value[:18])
            case "example":
                pass
            case _:
                made[key] = value
    if isinstance(order, list) and isinstance(made.get("properties"), dict):
        made["properties"] = _ordered(made["properties"], order)
    return _or_null(made) if is_nullable else made


def _inner(schema: Any, path: str, depth: int) -> Any:
    return json_schema(schema, path, depth + 1) if isinstance(schema, dict) else schema


def _ordered(properties: dict[str, Any], order: list[Any]) -> dict[str, Any]:
    first = {
        name: properties[name] for name in order if isinstance(name, str) and name in properties
    }
    return {**first, **properties}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type")
    if isinstance(schema.get("anyOf"), list):
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    if not isinstance(kind, str):
        return schema
    made = {**schema, "type": [kind, "null"]}
    if isinstance(schema.get("enum"), list):
        made["enum"] = [*schema["enum"], None]
    return made
