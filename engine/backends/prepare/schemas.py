"""What the schemas of one output may ask of the grammar library. Pure.

llguidance (1.9) bounds most of its own work. Three things it does not bound:

- It compiles what a `$ref` names inside of what names it, on the stack of its thread: 4 KB a level.
  Where 8 MiB of stack end the process ends with it.
- `multipleOf` becomes an automaton with a state for each remainder, in up to ten seconds and 400 MB
  at a million.
- It compares each of an object's `patternProperties` with each of its other properties.
"""

from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

import msgspec

from engine.backends.prepare.prepared import RequestLimits
from engine.errors import SchemaRefused


def check_schemas(schemas: Iterable[tuple[str, dict[str, Any]]], limits: RequestLimits) -> None:
    """Raise SchemaRefused that names the schema, the bound and how much was asked.

    Each schema comes with the field that it stands in. All of them bind one output together.
    """
    num_bytes = num_properties = num_patterns = 0
    for where, schema in schemas:
        num_bytes += len(msgspec.json.encode(schema))
        levels, multiple, references = list(_levels(schema)), 0, set[str]()
        depth = len(levels)
        for level in levels:
            for value in level:
                if isinstance(value, dict):
                    num_properties += _size(value.get("properties"))
                    num_patterns += _size(value.get("patternProperties"))
                    multiple = max(multiple, _digits(value.get("multipleOf")))
                    if isinstance(reference := value.get("$ref"), str):
                        references.add(reference)
        for value, bound, what in (
            (depth, limits.schema_depth, "levels"),
            (num_bytes, limits.schema_bytes, "bytes of schemas"),
            (num_properties, limits.schema_properties, "properties of schemas"),
            (num_patterns, limits.schema_patterns, "`patternProperties` of schemas"),
            (multiple, limits.schema_multiple, "as the digits of `multipleOf`"),
        ):
            if value > bound:
                raise SchemaRefused(f"{where}: {value} {what} > {bound} maximum")
        # The levels of all that references name. Many may name one value, which is measured once.
        depths, nested = {id(schema): depth}, depth
        for target in _targets(schema, references):
            if id(target) not in depths:
                depths[id(target)] = sum(1 for _ in _levels(target))
            nested += depths[id(target)]
        if nested > limits.schema_nesting:
            raise SchemaRefused(
                f"{where}: {nested} levels with all that `$ref` names"
                f" > {limits.schema_nesting} maximum"
            )


def _size(value: Any) -> int:
    return len(value) if isinstance(value, dict) else 0


def _levels(value: Any) -> Iterator[list[Any]]:
    """The objects and lists of each level, the outermost first."""
    level = [value] if isinstance(value, dict | list) else []
    while level:
        yield level
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]


def _digits(number: Any) -> int:
    """The digits of a number as an integer: 25 of 0.25, 250 of 250, and 1 of any power of ten."""
    if not isinstance(number, int | float) or isinstance(number, bool):
        return 0
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    if not isinstance(exponent, int):
        return 0  # no JSON has such a number
    written = "".join(map(str, digits)) + "0" * min(max(exponent, 0), 400)
    return 1 if written.rstrip("0") == "1" else int(written)


def _targets(schema: Any, references: Iterable[str]) -> Iterator[Any]:
    """What the references name; the whole schema for one that is no pointer into it.

    The library compiles each of them once, one inside of another at worst.
    """
    for reference in references:
        target = schema
        for step in reference.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                target = schema
                break
        yield target
