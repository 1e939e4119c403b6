"""Query parameters are checked against the description of the API before a handler reads them.

The framework's own conversion is lenient: it takes `null` for an absent number, `1` for true, and
the last of several values. Here a parameter is refused unless it is what `GET /openapi.json` says.
Parameters that no handler declares are ignored.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from litestar import Request

from gateway.base.errors import InvalidRequest, NotFound

Parameter = Mapping[str, Any]
"""A parameter of the OpenAPI document: `name`, `in`, `required` and `schema`."""
DeclaredQueries = Mapping[tuple[str, str], Sequence[Parameter]]
"""The query parameters of each route: by path template and method in lower case."""

NO_NUL = r"^[^\x00]*$"
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)


async def check_query(request: Request[Any, Any, Any]) -> None:
    """Raise InvalidRequest with one `name: reason` for each parameter that is wrong. Raise NotFound
    for a path with NUL, since no name and no id has one.

    Controllers have this as `before_request`. The application's state holds the declarations.
    """
    if "\0" in request.scope["path"]:
        raise NotFound("path: there is nothing whose name has a NUL")
    declared: DeclaredQueries = request.app.state.declared_queries
    route = str(request.scope.get("path_template")), request.method.lower()
    values: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        values.setdefault(name, []).append(value)
    problems = query_problems(declared.get(route, ()), values)
    if problems:
        raise InvalidRequest("; ".join(problems))


def query_problems(declared: Sequence[Parameter], sent: Mapping[str, Sequence[str]]) -> list[str]:
    """One `name: reason` for each declared parameter that is missing or has wrong values."""
    problems = []
    for parameter in declared:
        values = sent.get(parameter["name"], ())
        schema = parameter["schema"]
        item_schema = schema.get("items", schema)
        rule, is_right = _rule(item_schema)
        if not values:
            reason = f"is required; it {rule}" if parameter["required"] else None
        elif len(values) > 1 and item_schema is schema:
            reason = f"is given {len(values)} times"
        elif item_schema["type"] == "string" and any("\0" in value for value in values):
            reason = "must not have a NUL"
        else:
            reason = None if all(map(is_right, values)) else rule
        if reason is not None:
            problems.append(f"{parameter['name']}: {reason}")
    return problems


def _rule(schema: Mapping[str, Any]) -> tuple[str, Callable[[str], bool]]:
    """What a value must be, in words, and a function that checks a value."""
    if "enum" in schema:
        return f"must be one of {', '.join(schema['enum'])}", schema["enum"].__contains__
    if schema["type"] == "boolean":
        return "must be true or false", ("true", "false").__contains__

    def is_integer(value: str) -> bool:
        if _WHOLE_NUMBER.fullmatch(value) is None:
            return False
        number = int(value)
        return bool(schema.get("minimum", number) <= number <= schema.get("maximum", number))

    def is_text(value: str) -> bool:
        return bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))

    if schema["type"] == "integer":
        return "must be a whole number" + _bounds(schema, "minimum", "maximum"), is_integer
    return "must be a text" + _bounds(schema, "minLength", "maxLength", " characters"), is_text


def _bounds(schema: Mapping[str, Any], low: str, high: str, unit: str = "") -> str:
    if high not in schema:
        return f" of at least {schema[low]}{unit}" if low in schema else ""
    limits = f"{schema[low]} to {schema[high]}" if low in schema else f"at most {schema[high]}"
    return f" of {limits}{unit}" if unit else f" from {limits}"
