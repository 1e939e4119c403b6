"""Values that a format writes as elements: `<rows><item>x</item></rows>`, each tag behind a prefix.

Only prefixed tags are markup, so texts need no escapes. What an element without elements stands for
is told by the tool's schema, and so is whether elements are a list or an object.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.text.formats.argument_types import resolve, types_of, value_of

_ITEM = "item"
TAGS = (f"<{_ITEM}>", f"</{_ITEM}>")
"""Around each value of a list."""
_MAX_DEPTH = 64
_STRING = frozenset({"string"})


def value_of_elements(text: str, prefix: str, schema: Any, root: dict[str, Any]) -> Any:
    """The value of what stands between an argument's tags. `root` is the tool's whole schema."""
    return _Elements(prefix, root).value(text, schema, 0)


@dataclass(frozen=True, slots=True)
class _Elements:
    """Reads one argument. A schema is looked at once, however many elements of it there are."""

    prefix: str
    root: dict[str, Any]
    _types: dict[int, frozenset[str]] = field(default_factory=dict)

    def value(self, text: str, schema: Any, depth: int) -> Any:
        types = self._types_of(schema)
        is_plain = depth > _MAX_DEPTH or types == _STRING
        children = None if is_plain else _children(text, self.prefix)
        if children is None:
            if not text.strip() and "string" not in types and types & {"array", "object"}:
                return [] if "array" in types else {}
            return value_of(text, types)
        inner = resolve(schema, self.root) if isinstance(schema, dict) else {}
        if "array" in types and all(name == _ITEM for name, _ in children):
            items = inner.get("items")
            return [self.value(each, items, depth + 1) for _, each in children]
        properties = inner.get("properties")
        known: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        return {name: self.value(each, known.get(name), depth + 1) for name, each in children}

    def _types_of(self, schema: Any) -> frozenset[str]:
        # The root keeps its parts alive, so no other schema gets the id of one.
        if id(schema) not in self._types:
            self._types[id(schema)] = types_of(schema, self.root)
        return self._types[id(schema)]


def _children(text: str, prefix: str) -> list[tuple[str, str]] | None:
    """The elements that a text consists of, with what is in them; None where it has other text."""
    found: list[tuple[str, str]] = []
    open_names: list[str] = []
    begin = end = 0
    for tag in re.finditer(rf"{re.escape(prefix)}<(/?)([^<>/]{{1,128}})>", text):
        is_end, name = bool(tag[1]), tag[2]
        if not is_end:
            if not open_names:
                if text[end : tag.start()].strip():
                    return None
                begin = tag.end()
            open_names.append(name)
        elif not open_names or open_names.pop() != name:
            return None
        elif not open_names:
            found.append((name, text[begin : tag.start()]))
            end = tag.end()
    return found if found and not open_names and not text[end:].strip() else None
