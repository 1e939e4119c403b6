"""What the text of one argument stands for, by the tool's JSON schema.

Formats that write each argument between tags write strings as they are and everything else as
JSON, or, by templates that use Jinja's `string` filter, as Python: `True`, `None`, `{'a': 1}`.
"""

import ast
import json
import math
from typing import Any

from engine.protocol import Tool

_MAX_REFERENCES = 32
_MAX_PYTHON_CHARACTERS = 65_536
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_TYPE_OF = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})


class ArgumentTypes:
    """The JSON types that a tool's schema allows for each of its arguments."""

    def __init__(self, tool: Tool | None) -> None:
        self._schema: dict[str, Any] = {} if tool is None else tool.input_schema

    def of(self, name: str) -> frozenset[str]:
        """All types where the schema says nothing of the argument."""
        properties = resolve(self._schema, self._schema).get("properties")
        if isinstance(properties, dict) and name in properties:
            return types_of(properties[name], self._schema)
        return ALL_TYPES

    def schema_of(self, name: str) -> tuple[Any, dict[str, Any]]:
        """An argument's own schema, None where there is none, and the tool's."""
        properties = resolve(self._schema, self._schema).get("properties")
        return (properties.get(name) if isinstance(properties, dict) else None), self._schema


def types_of(schema: Any, root: dict[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types of the values that a schema may accept; a superset where it is involved."""
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return ALL_TYPES
    schema = resolve(schema, root)
    found = ALL_TYPES
    declared = schema.get("type")
    if isinstance(declared, str):
        found &= {declared}
    elif isinstance(declared, list):
        found &= {kind for kind in declared if isinstance(kind, str)}
    if "const" in schema:
        found &= {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= {type_of(value) for value in schema["enum"]}
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            found &= frozenset().union(*(types_of(b, root, depth + 1) for b in branches))
    for branch in schema.get("allOf") or ():
        found &= types_of(branch, root, depth + 1)
    if schema.get("nullable") is True and declared is not None:
        found |= {"null"}
    return found or ALL_TYPES


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    return _TYPE_OF.get(type(value), "string")


def value_of(text: str, types: frozenset[str]) -> Any:
    """The value that a text stands for. A text that is none of the types' is a string.

    If the schema allows only strings, the text is the string. If it allows other types too, a text
    that is a value of one of those types is that value.
    """
    if types == {"string"}:
        return text
    value = _read(text.strip())
    kind = type_of(value)
    if not isinstance(value, str):
        if kind == "integer" and "integer" not in types and "number" in types:
            return value
        if kind == "number" and "number" not in types and value == int(value):
            return int(value) if "integer" in types else text
        if kind in types:
            return value
    return text


def _read(text: str) -> Any:
    """The text as JSON, or else as Python; the text itself where it is neither."""
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    if not text or not (text[0] in "[{-" or text[0].isdigit() or text in ("true", "false", "null")):
        return text
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    else:
        # A number beyond what a double holds becomes no number.
        return text if isinstance(value, float) and not math.isfinite(value) else value
    if text[0] not in "[{" or len(text) > _MAX_PYTHON_CHARACTERS:
        return text
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, dict | list) else text


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def resolve(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Follow local references (`#/$defs/…`); a reference that leads nowhere is an empty schema."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        target: Any = root
        for step in reference.removeprefix("#").strip("/").split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if step:
                target = target.get(step) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            return {}
        schema = target
    return {}
