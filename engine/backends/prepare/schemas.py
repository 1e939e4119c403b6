"""The bounds of schemas that constrain an output, checked before a grammar is compiled of them."""

from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

import msgspec

from engine.errors import SchemaRefused

MAX_SCHEMA_BYTES = 262_144
"""The most bytes of all schemas that constrain one output, as JSON."""
MAX_SCHEMA_PROPERTIES = 1_024
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NESTING = 1_536
"""The most levels of a schema, together with those of all that its references name."""
MAX_SCHEMA_PATTERNS = 32
MAX_SCHEMA_MULTIPLE = 100_000
"""The largest `multipleOf`, read without its decimal point."""


class _SchemaSize:
    """The sizes of one schema that are bounded, and its references."""

    def __init__(self, schema: dict[str, Any]) -> None:
        # The number of nested levels.
        self.depth = 0
        self.num_properties = 0
        # The number of `patternProperties`.
        self.num_patterns = 0
        # The largest `multipleOf`, read without its decimal point (`_digits`).
        self.multiple = 0
        # The value of each `$ref`.
        self.references: set[str] = set()
        for level in _levels(schema):
            self.depth += 1
            for value in level:
                if isinstance(value, dict):
                    self._add(value)

    def _add(self, value: dict[str, Any]) -> None:
        self.num_properties += _size(value.get("properties"))
        self.num_patterns += _size(value.get("patternProperties"))
        self.multiple = max(self.multiple, _digits(value.get("multipleOf")))
        reference = value.get("$ref")
        if isinstance(reference, str):
            self.references.add(reference)


def check_schemas(schemas: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Raise SchemaRefused if schemas are too large. It names the schema, its size and the bound.

    Each schema comes with its field. All of them constrain one output together.

    llguidance (1.9) does not bound three things:

    - It compiles the target of a `$ref` inside of the schema that names it, with 4 KB of its
      thread's stack for each level. 8 MiB end the process.
    - `multipleOf` becomes an automaton with a state for each remainder. A million takes ten seconds
      and 400 MB.
    - It compares each of an object's `patternProperties` with each of its other properties.
    """
    num_bytes = 0
    num_properties = 0
    num_patterns = 0
    for where, schema in schemas:
        num_bytes += len(msgspec.json.encode(schema))
        size = _SchemaSize(schema)
        num_properties += size.num_properties
        num_patterns += size.num_patterns
        for value, most, unit in (
            (size.depth, MAX_SCHEMA_DEPTH, "levels"),
            (num_bytes, MAX_SCHEMA_BYTES, "bytes of schemas"),
            (num_properties, MAX_SCHEMA_PROPERTIES, "properties of schemas"),
            (num_patterns, MAX_SCHEMA_PATTERNS, "`patternProperties` of schemas"),
            (size.multiple, MAX_SCHEMA_MULTIPLE, "as the digits of `multipleOf`"),
        ):
            if value > most:
                raise SchemaRefused(f"{where}: {value} {unit} > {most} maximum")
        # Add the levels of all that references name. Many references may name the same value, so
        # each value is measured only once.
        depths = {id(schema): size.depth}
        nested = size.depth
        for target in _targets(schema, size.references):
            if id(target) not in depths:
                depths[id(target)] = sum(1 for _ in _levels(target))
            nested += depths[id(target)]
        if nested > MAX_SCHEMA_NESTING:
            raise SchemaRefused(
                f"{where}: {nested} levels with all that `$ref` names"
                f" > {MAX_SCHEMA_NESTING} maximum"
            )
        if size.references and not _can_end(schema):
            raise SchemaRefused(
                f"{where}: can't be guaranteed: what it requires refers to itself without an end"
            )


def _can_end(schema: dict[str, Any]) -> bool:
    """Whether a value of finite length can follow the schema.

    Its references may require each other without an end. The search begins with subschemas that
    need no other one. It goes on to those that need only these. Each need is looked at once.
    """
    # By subschema, the numbers of its lists of which no choice is known to be finite yet.
    lacking: dict[int, set[int]] = {}
    # By subschema, each other one that has it as a choice, and the number of that list.
    needed_by: dict[int, list[tuple[int, int]]] = {}
    waiting: list[Any] = [schema]
    finite: list[int] = []
    while waiting:
        subschema = waiting.pop()
        if id(subschema) in lacking:
            continue
        needs = list(_needs(schema, subschema)) if isinstance(subschema, dict) else []
        lacking[id(subschema)] = set(range(len(needs)))
        if not needs:
            finite.append(id(subschema))
        for number, choices in enumerate(needs):
            for choice in choices:
                needed_by.setdefault(id(choice), []).append((id(subschema), number))
                waiting.append(choice)
    while finite:
        for user, number in needed_by.pop(finite.pop(), ()):
            if number in lacking[user]:
                lacking[user].remove(number)
                if not lacking[user]:
                    finite.append(user)
    return not lacking[id(schema)]


def _needs(schema: dict[str, Any], subschema: dict[str, Any]) -> Iterator[list[Any]]:
    """Lists of schemas. A value of `subschema` must contain or follow one schema of each list."""

    def listed(name: str) -> list[Any]:
        value = subschema.get(name)
        return value if isinstance(value, list) else []

    reference = subschema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        yield [*_targets(schema, [reference])]
    yield from ([branch] for branch in listed("allOf"))
    yield from filter(None, (listed("anyOf"), listed("oneOf")))
    properties = subschema.get("properties")
    if subschema.get("type") == "object" and isinstance(properties, dict):
        required = filter(properties.__contains__, map(str, listed("required")))
        yield from ([properties[name]] for name in required)
    if subschema.get("type") == "array" and subschema.get("minItems"):
        yield [subschema.get("items")]


def _size(value: Any) -> int:
    return len(value) if isinstance(value, dict) else 0


def _levels(value: Any) -> Iterator[list[Any]]:
    """The objects and lists of a JSON value by level, the outermost first."""
    level = [value] if isinstance(value, dict | list) else []
    while level:
        yield level
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]


def _digits(number: Any) -> int:
    """The digits of a number as an integer: 25 of 0.25, 250 of 250, and 1 of any power of ten."""
    if not isinstance(number, int | float) or isinstance(number, bool):
        return 0
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    if not isinstance(exponent, int):
        return 0  # no JSON has such a number
    text = "".join(map(str, digits)) + "0" * min(max(exponent, 0), 400)
    return 1 if text.rstrip("0") == "1" else int(text)


def _targets(schema: Any, references: Iterable[str]) -> Iterator[Any]:
    """The parts of the schema that references name. A wrong reference names the whole schema.

    The library compiles each part once, at worst one inside of another.
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
