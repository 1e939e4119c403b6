"""How the fields of a dialect are treated: a table for each dialect, and one check for all.

Fields of a request's type are honoured. A table also lists the fields that have no effect, the
fields that are left out and reported, and the fields that are refused unless they have a neutral
value. The bounds of names, schemas and inputs of calls, and of their number, stand in the types.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Raw

from engine.protocol import MAX_CHOICES, MAX_LOGPROBS
from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.bodies import check_schema, check_values, is_neutral
from gateway.prompt.ask import camel
from gateway.prompt.ignored import Notepad

_METADATA = ("metadata", "client_metadata")
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Style:
    """How a dialect's errors are written."""

    # The message for too many content blocks.
    too_many: str
    # Whether paths are `tools.0.name` instead of `tools[0].name`. A content block's type then
    # follows its position, as in `messages.0.content.1.tool_use.id`.
    is_dotted: bool = False
    # Whether names are in camel case.
    is_camel: bool = False

    def at(self, path: str, name: str) -> str:
        name = camel(name) if self.is_camel else name
        return f"{path}.{name}" if path else name

    def item(self, path: str, index: int, value: msgspec.Struct) -> str:
        if not self.is_dotted:
            return f"{path}[{index}]"
        kind = value.__struct_config__.tag if path.endswith("content") else None
        return f"{path}.{index}.{kind}" if kind else f"{path}.{index}"

    def must(self, what: str) -> str:
        return f"{what} should have" if self.is_dotted else "may have"


@dataclass(slots=True)
class Checking:
    """The check of one request, with what was counted so far."""

    bounds: RequestBounds
    style: Style
    num_blocks: int = 0
    num_tools: int = 0


Check = Callable[[Checking, Any, str], None]
Rules = Mapping[type[msgspec.Struct], Mapping[str, Check | None]]
"""The checks of each type's fields. A field with None has bounded fields only below it."""


def rules_of(*roots: type[msgspec.Struct]) -> Rules:
    """The checks of these types and of all types below: `Annotated[str, name]` has the check
    `name`."""
    of_types: dict[type[msgspec.Struct], dict[str, Check | None]] = {}

    def visit(kind: type[msgspec.Struct]) -> bool:
        if kind not in of_types:
            of_types[kind] = {}
            for field, hint in get_type_hints(kind, include_extras=True).items():
                parts = list(_parts_of(hint))
                checks = [part for part in parts if isinstance(part, FunctionType)]
                below = [part for part in parts if isinstance(part, type)]
                visited = [visit(part) for part in below if issubclass(part, msgspec.Struct)]
                if checks or any(visited):
                    of_types[kind][field] = checks[0] if checks else None
        return bool(of_types[kind])

    for root in roots:
        visit(root)
    return {kind: checked for kind, checked in of_types.items() if checked}


def _parts_of(hint: Any) -> Iterator[Any]:
    """The types and annotations that a type is made of."""
    yield from getattr(hint, "__metadata__", ())
    parts = get_args(hint)
    if not parts:
        yield hint
    elif get_origin(hint) is not Literal:
        for part in parts[:1] if get_origin(hint) is Annotated else parts:
            yield from _parts_of(part)


class Undone(NamedTuple):
    """A field of a request's type that only asks for an improvement, which is not made."""

    # The name of the request's field.
    name: str
    # The names that lead from there to the field that is meant.
    below: Sequence[str]
    # Why it is ignored.
    reason: str
    # The values that ask for nothing.
    neutral: Sequence[Any]


def undone_of(fields: Mapping[str, tuple[Any, ...]]) -> list[Undone]:
    """The fields of a table. It has, by path, the reason and then the neutral values."""
    undone: list[Undone] = []
    for path, (reason, *neutral) in fields.items():
        name, *below = path.split(".")
        undone.append(Undone(name, below, reason, neutral))
    return undone


@dataclass(frozen=True, slots=True)
class Fields:
    """One dialect's table. The fields that it calls silent, told and refused are not in the
    request's type."""

    style: Style
    rules: Rules
    # Fields without an effect.
    silent: frozenset[str] = frozenset()
    # Fields that are left out and reported, with the reason.
    told: Mapping[str, str] = field(default_factory=dict)
    # Fields that are refused, unless they have one of these values.
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Fields of the type that only ask for an improvement.
    undone: Sequence[Undone] = ()

    def part(
        self, fields: Mapping[str, Raw], bounds: RequestBounds, notepad: Notepad
    ) -> dict[str, Raw]:
        """The fields of a body that its type has."""
        typed: dict[str, Raw] = {}
        for name, value in fields.items():
            if name in _METADATA and len(value) > bounds.max_metadata_bytes:
                raise InvalidRequest(f"{name}: may have at most {bounds.max_metadata_bytes} bytes")
            if name in self.silent:
                continue
            if name in self.told:
                notepad.ignore(name, self.told[name])
            elif name not in self.refused:
                typed[name] = value
            elif not is_neutral(value, self.refused[name]):
                raise InvalidRequest(f"{name}: this value is not supported by this server", name)
        return typed

    def check(self, request: msgspec.Struct, bounds: RequestBounds) -> None:
        """Raise InvalidRequest with the first field beyond its bound. The time is linear in the
        request."""
        self._check(Checking(bounds, self.style), request, "")

    def _check(self, checking: Checking, value: msgspec.Struct, path: str) -> None:
        for name, check in self.rules.get(type(value), {}).items():
            part = getattr(value, name)
            if part is None or part is UNSET:
                continue
            where = self.style.at(path, name)
            if check is not None:
                check(checking, part, where)
            if isinstance(part, list):
                for index, item in enumerate(part):
                    if type(item) in self.rules:
                        self._check(checking, item, self.style.item(where, index, item))
            elif type(part) in self.rules:
                self._check(checking, part, where)

    def note(self, request: msgspec.Struct, notepad: Notepad) -> None:
        """Note the undone fields that ask for something."""
        for name, below, reason, neutral in self.undone:
            value: Any = getattr(request, name, None)
            if value is None:
                continue
            for inner in below:
                value = getattr(value, inner, None)
            if value is not None and value not in neutral:
                names = [name, *below]
                path_names = map(camel, names) if self.style.is_camel else names
                notepad.ignore(".".join(path_names), reason)


def _hold(number: int, most: int, subject: str, unit: str = "") -> None:
    if number > most:
        raise InvalidRequest(f"{subject} at most {most}{unit}")


def name(checking: Checking, value: str, path: str) -> None:
    """A name or an id."""
    most = checking.bounds.max_name_characters
    must = checking.style.must("String")
    _hold(len(value), most, f"{path}: {must}", " characters")


def schema(checking: Checking, value: dict[str, Any], path: str) -> None:
    check_schema(value, path, checking.bounds)


def call_input(checking: Checking, value: object, path: str) -> None:
    """The input of a call. Its keys were counted with the body."""
    most = checking.bounds.max_call_bytes
    _hold(len(_encode(value)), most, f"{path}: may have", " bytes of JSON")


def arguments(checking: Checking, value: str, path: str) -> None:
    """The input of a call, as JSON in a string. Raise TooLarge for an object of too many keys."""
    most = checking.bounds.max_call_bytes
    _hold(len(value), most, f"{path}: may have", " bytes of JSON")
    json = value.encode()
    _hold(len(json), most, f"{path}: may have", " bytes of JSON")
    check_values(json, len(json) + 1, checking.bounds.max_object_keys)


def content(checking: Checking, value: object, path: str) -> None:
    """Content blocks. Anything other than a list counts as one."""
    _count(checking, len(value) if isinstance(value, list) else 1)


def blocks(checking: Checking, value: object, path: str) -> None:
    """Blocks inside a block that was counted."""
    _count(checking, len(value) if isinstance(value, list) else 0)


def _count(checking: Checking, number: int) -> None:
    checking.num_blocks += number
    if checking.num_blocks > checking.bounds.max_blocks:
        raise InvalidRequest(checking.style.too_many.format(checking.bounds.max_blocks))


def tools(checking: Checking, value: list[Any], path: str) -> None:
    """Tools, wherever in the request they are."""
    checking.num_tools += len(value)
    must = checking.style.must("List")
    _hold(checking.num_tools, checking.bounds.max_tools, f"tools: {must}", " items")


def named_tools(checking: Checking, value: list[Any], path: str) -> None:
    """Tools that a choice names."""
    at_most(checking.bounds.max_tools)(checking, value, path)


def stops(checking: Checking, value: str | list[str], path: str) -> None:
    bounds = checking.bounds
    style = checking.style
    listed = [value] if isinstance(value, str) else value
    at_most(bounds.max_stop_sequences)(checking, listed, path)
    for index, stop in enumerate(listed):
        subject = f"{path}: a stop sequence may have"
        if style.is_dotted:
            subject = f"{path}.{index}: String should have"
        _hold(len(stop), bounds.max_stop_characters, subject, " characters")


def pattern(checking: Checking, value: str | list[str], path: str) -> None:
    """What a text must match, or the texts that it may be."""
    most = checking.bounds.max_schema_bytes
    _hold(sum(map(len, value)), most, f"{path}: may have", " characters")


def choices(checking: Checking, value: int, path: str) -> None:
    _hold(value, checking.bounds.max_choices, f"{path}: must be")


def metadata(checking: Checking, value: object, path: str) -> None:
    """A field that changes nothing and is not kept."""
    verb = "should" if checking.style.is_dotted else "may"
    most = checking.bounds.max_metadata_bytes
    _hold(len(_encode(value)), most, f"{path}: {verb} have", " bytes")


def at_most(most: int) -> Check:
    """The check of a list that may have `most` items."""

    def check(checking: Checking, value: list[Any], path: str) -> None:
        _hold(len(value), most, f"{path}: {checking.style.must('List')}", " items")

    return check


Name = Annotated[str, name]
Schema = Annotated[dict[str, Any], schema]
CallInput = Annotated[dict[str, Any], call_input]
CallText = Annotated[str, call_input]
Arguments = Annotated[str, arguments]

MAX_COUNT = 1_000_000_000
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES), choices]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
"""A cache salt, as in vLLM and SGLang. What is cached with a salt is read only with the same
one."""
Word = Annotated[str, msgspec.Meta(max_length=64)]
"""A word that only asks for an improvement, so no word is an error."""
