"""Fields inside messages and tools that no type here has: left out, and reported to the client.

An agent sends its whole conversation with each turn, and with it what SDKs, gateways and other
vendors' models have put there. One field that is refused would end the conversation for good. At
the top level of a request an unknown field stays an error, and so does a marker where none can be.

A body is walked only if its strict decoder refused it. It is walked once, in a time that is linear
in its size.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

import msgspec
from msgspec import Raw, inspect

UNKNOWN = "this server does not know this field"
Step = str | int
Steps = tuple[Step, ...]


class UnknownFields:
    """Finds the fields of one kind of request that are unknown.

    `lists` are the top-level fields that are walked. `is_read` tells whether an object in one of
    them is read by the types here. `markers` are names, and the types of their values, that are
    never left out.
    """

    def __init__(
        self,
        request: type[msgspec.Struct],
        lists: Collection[str],
        *,
        markers: Collection[str],
        marker_types: Collection[type],
        is_read: Callable[[str, Mapping[str, Any]], bool],
    ) -> None:
        self._request = request
        self._lists = lists
        self._markers = frozenset(markers)
        self._marker_types = frozenset(marker_types)
        self._is_read = is_read
        self._fields: dict[type, dict[str, inspect.Type]] = {}

    @cached_property
    def _types(self) -> dict[str, inspect.Type]:
        info = inspect.type_info(self._request)
        assert isinstance(info, inspect.StructType)
        return {
            field.encode_name: field.type
            for field in info.fields
            if field.encode_name in self._lists
        }

    def leave_out(self, fields: Mapping[str, Raw]) -> tuple[dict[str, Raw], list[Steps]]:
        """The fields of a body without what is unknown in its lists, and where that stood.

        Raise what msgspec raises for JSON that it can't read.
        """
        rest = dict(fields)
        left_out: list[Steps] = []
        for name, kind in self._types.items():
            if name not in fields:
                continue
            value = msgspec.json.decode(fields[name])
            num_before = len(left_out)
            items = enumerate(value) if isinstance(value, list) else ()
            for index, item in items:
                if isinstance(item, dict) and self._is_read(name, item):
                    left_out += self._walk(item, _item_of(kind), (name, index))
            if len(left_out) > num_before:
                rest[name] = Raw(msgspec.json.encode(value))
        return rest, left_out

    def _walk(self, value: Any, kind: inspect.Type | None, path: Steps) -> Iterator[Steps]:
        """Take the unknown fields out of a value, and yield where they stood."""
        if kind is None:
            return
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from self._walk(item, _item_of(kind), (*path, index))
        elif isinstance(value, dict):
            struct = _struct_of(kind, value)
            if struct is None or struct.cls in self._marker_types:
                return
            types = self._fields_of(struct)
            for name in [*value]:
                if name in types:
                    yield from self._walk(value[name], types[name], (*path, name))
                elif name == struct.tag_field or name in self._markers:
                    continue
                elif struct.forbid_unknown_fields:
                    del value[name]
                    yield (*path, name)

    def _fields_of(self, struct: inspect.StructType) -> dict[str, inspect.Type]:
        fields = self._fields.get(struct.cls)
        if fields is None:
            fields = {field.encode_name: field.type for field in struct.fields}
            self._fields[struct.cls] = fields
        return fields


def _parts_of(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The types that a type is a union of; the type itself where it is no union."""
    if isinstance(kind, inspect.Metadata):
        yield from _parts_of(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for part in kind.types:
            yield from _parts_of(part)
    else:
        yield kind


def _item_of(kind: inspect.Type) -> inspect.Type | None:
    """The type of the items of a list; None where the type has no list of its own types."""
    for part in _parts_of(kind):
        if isinstance(part, inspect.ListType):
            return part.item_type
    return None


def _struct_of(kind: inspect.Type, value: Mapping[str, Any]) -> inspect.StructType | None:
    """The type of an object, by its tag where there are several."""
    for part in _parts_of(kind):
        if isinstance(part, inspect.StructType):
            if part.tag_field is None or value.get(part.tag_field) == part.tag:
                return part
    return None


def written(steps: Steps) -> str:
    """A path as OpenAI writes it: `messages[1].content[0].name`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)[1:]
