"""Brings a JSON body to the names and forms that the request's types have.

The rules are those of the JSON form of protocol buffers, which Google's servers parse: a field has
two names (`systemInstruction` and `system_instruction`), null is a field that is not there, and
an object may stand where a list of one is meant. An unknown name is an error. What is below a free
field (a function's arguments, a schema) stays as it is. Pure; linear in the body.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from gateway.base.errors import InvalidRequest
from gateway.dialects.gemini.content import Shape

_MAX_SHOWN = 64


@dataclass(frozen=True, slots=True)
class _Field:
    """`shape` is the type of its value, or of each item of a list; None for anything else."""

    name: str
    shape: type[Shape] | None
    is_list: bool


def named(value: Any, shape: type[Shape], path: str = "") -> dict[str, Any]:
    """The value of a message, by the names of `shape`. Raise InvalidRequest that names the path."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}: must be an object" if path else "the body must be an object")
    fields = _fields(shape)
    made: dict[str, Any] = {}
    for key, item in value.items():
        field = fields.get(key)
        where = f"{path}.{key}" if path else key
        if field is None:
            raise _unknown(key[:_MAX_SHOWN], path)
        if item is None:
            continue
        if field.name in made:
            raise InvalidRequest(f"{where}: is given twice, by both of its names")
        made[field.name] = _valued(item, field, where)
    return made


def _unknown(name: str, path: str) -> InvalidRequest:
    """In the words of Google's parser."""
    place = f" at '{path}'" if path else ""
    message = f'Invalid JSON payload received. Unknown name "{name}"{place}: Cannot find field.'
    return InvalidRequest(message, f"{path}.{name}" if path else name)


def _valued(item: Any, field: _Field, path: str) -> Any:
    if field.is_list and not isinstance(item, list):
        item = [item]
    if field.shape is None:
        return item
    if not field.is_list:
        return named(item, field.shape, path)
    return [named(each, field.shape, f"{path}[{index}]") for index, each in enumerate(item)]


@cache
def _fields(shape: type[Shape]) -> Mapping[str, _Field]:
    hints = get_type_hints(shape)
    found: dict[str, _Field] = {}
    for field in msgspec.structs.fields(shape):
        kind, is_list = _plain(hints[field.name]), False
        if get_origin(kind) is list:
            kind, is_list = _plain(get_args(kind)[0]), True
        inner = kind if isinstance(kind, type) and issubclass(kind, Shape) else None
        found[field.encode_name] = found[field.name] = _Field(field.encode_name, inner, is_list)
    return found


def _plain(hint: Any) -> Any:
    """The type without `| None` and annotations."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        rest = [each for each in get_args(hint) if each is not type(None)]
        return _plain(rest[0]) if len(rest) == 1 else hint
    return hint
