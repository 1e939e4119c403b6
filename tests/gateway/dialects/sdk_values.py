"""Values of an SDK's own types: for each type as many as it takes to have every member of its
unions once, at any depth."""

import types
from collections.abc import Iterator, Mapping
from datetime import datetime
from enum import Enum
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

MAX_NESTED = 2
"""So often a type may be inside itself."""
_NOW = "2026-01-01T00:00:00Z"
_SIMPLE: dict[Any, list[Any]] = {
    str: ["x"],
    int: [1],
    float: [0.5],
    bool: [True],
    bytes: ["eA=="],
    object: [{}],
    Any: [{}],
    type(None): [None],
    datetime: [_NOW],
}
_WRAPPERS = (Annotated, Required, NotRequired)
_UNIONS = (Union, types.UnionType)


class Sampler:
    """Makes the values. `named` are those of fields whose type does not say what they hold."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named

    def values(self, hint: Any, open_types: tuple[Any, ...] = ()) -> list[Any]:
        origin = get_origin(hint)
        if origin in _WRAPPERS:
            return self.values(get_args(hint)[0], open_types)
        if origin in _UNIONS:
            parts = get_args(hint)
            return [value for part in parts for value in self.values(part, open_types)]
        if origin is Literal:
            return [*get_args(hint)]
        if isinstance(hint, TypeVar):
            return [{}]
        if is_typeddict(hint) or _is_model(hint):
            if open_types.count(hint) >= MAX_NESTED:
                return []
            return [*self._objects(hint, (*open_types, hint))]
        if isinstance(hint, type) and issubclass(hint, Enum):
            return [member.value for member in hint]
        if hint in _SIMPLE:
            return _SIMPLE[hint]
        if origin in (dict, Mapping):
            return [{}]
        items = get_args(hint)
        if items:
            return [[value] for value in self.values(items[0], open_types)] or [[]]
        raise TypeError(hint)

    def _objects(self, kind: Any, open_types: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
        """An object with each field, one with those that it must have, and for each other value of
        a field one with it."""
        choices = {
            name: [self._named[name]] if name in self._named else self.values(hint, open_types)
            for name, hint in _fields_of(kind).items()
        }
        whole = {name: values[0] for name, values in choices.items() if values}
        yield whole
        yield {name: value for name, value in whole.items() if name in _required(kind)}
        for name, values in choices.items():
            for value in values[1:]:
                yield {**whole, name: value}


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def _fields_of(kind: Any) -> dict[str, Any]:
    if is_typeddict(kind):
        return get_type_hints(kind, include_extras=True)
    return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}


def _required(kind: Any) -> frozenset[str]:
    if is_typeddict(kind):
        # The annotations are texts, so that the class itself does not know which are required.
        hints = get_type_hints(kind, include_extras=True)
        return frozenset(
            name
            for name, hint in hints.items()
            if get_origin(hint) is Required
            or (kind.__total__ and get_origin(hint) is not NotRequired)
        )
    return frozenset(n for n, field in kind.model_fields.items() if field.is_required())
