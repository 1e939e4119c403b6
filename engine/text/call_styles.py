"""Writes the calls of a model's format as rules of a grammar (`CallStyle`).

The markup around calls is the markup that the model's template writes. Inputs that are no JSON get
rules of their own, argument by argument.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import SchemaRefused
from engine.protocol import Tool
from engine.text.formats.arguments import ALL_TYPES, LiteralSyntax, TagSyntax, types_of
from engine.text.formats.proof import LAST_WORD, ModelFormats
from engine.text.formats.table import CallFormat
from engine.text.grammar import CallStyle, GrammarWriter, is_control, json_rule
from engine.text.template.messages import CallTexts

_ID = "/[a-zA-Z0-9]{9}/"
_PLACES = {
    "{digits}": "/[0-9]{1,4}/",
    "{id}": _ID,
    "{more}": f'({json.dumps(", " + json.dumps("id") + ": ")} /"/ {_ID} /"/)?',
}
_PLACE_PATTERNS = {
    "{more}": '(, "id": "[^"]*")?',
    "{name}": r"[\w.\-]+",
    "{input}": ".*",
    "{digits}": r"\d+",
    "{id}": "[a-zA-Z0-9]{9}",
}
_MIN_START = 3
"""The least characters of a text by which calls are found among free text."""
_PLACE = re.compile(r"(\{name\}|\{input\}|\{digits\}|\{id\}|\{more\})")
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
# The keys of an object's schema that rules for one argument after another can't guarantee.
_NOT_GUARANTEED = ("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas",
           "minProperties", "maxProperties", "allOf", "anyOf", "oneOf", "not", "if",
           "$ref")  # fmt: skip
# A string outside of JSON can be constrained only to a list of values. So these keys of its schema
# can't be guaranteed.
_NOT_GUARANTEED_IN_TEXT = (
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "not",
    "allOf",
    "anyOf",
    "oneOf",
)


def find_call_style(formats: ModelFormats, writer: GrammarWriter) -> CallStyle | None:
    """The style of a model's calls; None if the model has no format of calls."""
    call_format = formats.call_format
    proven = formats.calls
    if call_format is None:
        return None
    turn = "" if proven is None else proven.turn
    call_texts = call_format.call_texts[0]
    if proven is not None and proven.call_texts is not None and call_format.arguments is None:
        call_texts = proven.call_texts
    call_texts = next((way for way in call_format.call_texts if _renders(way, turn)), call_texts)
    rules: Callable[[Tool, str], list[str]] | None = None
    if isinstance(call_format.arguments, TagSyntax):
        tags = _spaced(call_format.arguments, turn)
        gap, last_gap = _gaps(tags, turn)
        call_texts = replace(
            call_texts, call=call_texts.call.replace("{input}", "{input}" + last_gap)
        )
        rules = _TaggedRules(writer, tags, gap, is_python="True" in turn).rules
    elif isinstance(call_format.arguments, LiteralSyntax):
        quoted = re.search(rf"\bword=(['\"]){LAST_WORD}", turn)
        mark = '"' if quoted is None else quoted.group(1)
        rules = _LiteralRules(
            writer,
            call_format.arguments,
            mark,
            quotes_all=f"ratio={mark}" in turn,
            is_json="flag=true" in turn,
            comma="," if call_format.arguments.quote or "count=3,flag" in turn else ", ",
        ).rules

    return CallStyle(
        call=lambda name, input_rule: _lark(writer, call_texts.call, name, input_rule),
        begin=_lark(writer, call_texts.begin),
        separator=_lark(writer, call_texts.separator),
        end=_lark(writer, call_texts.end),
        input_rules=rules,
        starts=_free_starts(call_format, call_texts),
    )


def _renders(way: CallTexts, turn: str) -> bool:
    """Whether the template's turn has a call in this way of writing, with any number or id."""
    parts = filter(None, _PLACE.split(way.begin + way.call + way.end))
    pattern = "".join(_PLACE_PATTERNS.get(part) or re.escape(part) for part in parts)
    return re.search(pattern, turn, re.DOTALL) is not None


def _spaced(tags: TagSyntax, turn: str) -> TagSyntax:
    """The tags with the white space that the template writes within an opening tag."""
    before, line, behind = tags.open.partition("\n")
    last_text = re.escape(before.rpartition("}")[2])
    spacing = re.search(rf"{last_text}(\s*){re.escape(behind)}", turn) if line else None
    if spacing is None:
        return tags
    return replace(tags, open=before + spacing.group(1) + behind)


def _gaps(tags: TagSyntax, turn: str) -> tuple[str, str]:
    """The white space that the template writes behind each argument, and further white space that
    it writes only behind the last one."""
    at = turn.rfind(tags.end)
    last = turn.rfind(tags.close, 0, at)
    gap = ""
    if "{key}" not in tags.close:
        behind = turn[turn.find(tags.close) + len(tags.close) :] if last >= 0 else "\n"
        gap = behind[: len(behind) - len(behind.lstrip())]
    if last < 0:
        return gap, ""
    last_gap = turn[last + len(tags.close) : at].removeprefix(gap)
    return gap, "" if last_gap.strip() else last_gap


def _free_starts(call_format: CallFormat, call_texts: CallTexts) -> tuple[str, ...]:
    """The texts with which calls begin. The first is the template's own.

    The result is empty if the template's call begins with none of them. It is also empty if any of
    them is so short or so plain that ordinary text may have it.
    """
    whole = call_texts.begin + call_texts.call
    starts = tuple(sorted(call_format.starts, key=lambda start: not whole.startswith(start)))
    if not starts or not whole.startswith(starts[0]):
        return ()
    for start in starts:
        is_plain = start[0].isalnum() and not start.endswith("[")
        if len(start) < _MIN_START or is_plain:
            return ()
    return starts


def _lark(writer: GrammarWriter, text: str, name: str = "", input_rule: str = "") -> str:
    """A text with places as a sequence of Lark. Texts of control tokens become those tokens."""
    items: list[str] = []
    for part in _PLACE.split(text):
        match part:
            case "{name}":
                # A name may stand in JSON. Elsewhere names of tools need no escapes.
                items += writer.texts(json.dumps(name, ensure_ascii=False)[1:-1])
            case "{input}":
                items.append(input_rule)
            case _ if part in _PLACES:
                items.append(_PLACES[part])
            case _:
                items += writer.texts(part)
    return " ".join(items)


@dataclass(frozen=True, slots=True)
class _InputRules:
    """Writes the rules of a tool's input, argument by argument in the order of its schema."""

    writer: GrammarWriter

    def properties(self, tool: Tool) -> tuple[dict[str, Any], set[str]]:
        """The properties of the tool's schema, and the names of the required ones.

        Raises SchemaRefused if such rules can't guarantee the schema.
        """
        schema = tool.input_schema
        unheld = next((f"`{key}`" for key in _NOT_GUARANTEED if key in schema), "")
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        if unheld or required - properties.keys():
            fault = unheld or "`required` without a property"
            raise _refused(tool, f"{fault} can't be guaranteed", "arguments")
        return properties, required

    def json_of(self, schema: Any, tool: Tool) -> str:
        """The right side of a rule for JSON of an argument's schema."""
        whole = tool.input_schema
        root: dict[str, Any] = {k: whole[k] for k in ("$defs", "definitions") if k in whole}
        return json_rule({**root, **(schema if isinstance(schema, Mapping) else {})})

    def text(
        self, tool: Tool, rule: str, name: str, schema: Any, around: tuple[str, str]
    ) -> list[str]:
        """The rules of a string that stands between two texts without escapes."""
        begin = " ".join(self.writer.texts(around[0]))
        (first, *more) = self.writer.texts(around[1])
        choices = _choices(schema)
        if choices is not None:
            return [f"{rule}: {begin} ({choices}) {' '.join((first, *more))}"]
        self.check_text(tool, name, schema)
        lazy = "" if is_control(first) else "[lazy]"
        return [
            f"{rule}: {begin} {rule}_v {' '.join(more)}",
            f"{rule}_v{lazy}: /(.|\\n)*/ {first}",
        ]

    def check_text(self, tool: Tool, name: str, schema: Any) -> None:
        """Raise SchemaRefused if the schema of a string can't be guaranteed outside of JSON."""
        for key in _NOT_GUARANTEED_IN_TEXT:
            if isinstance(schema, dict) and key in schema:
                raise _refused(tool, f"`{key}` of `{name}` can't be guaranteed", "strings")


@dataclass(frozen=True, slots=True)
class _TaggedRules(_InputRules):
    """Writes the rules of arguments between tags."""

    tags: TagSyntax
    # The white space behind an argument.
    gap: str
    # Whether truth values and null are written as Python's words.
    is_python: bool

    def rules(self, tool: Tool, rule: str) -> list[str]:
        properties, required = self.properties(tool)
        rules: list[str] = []
        items: list[str] = []
        for index, (name, schema) in enumerate(properties.items()):
            argument = f"{rule}_{index}"
            rules += self._argument(tool, argument, name, schema)
            items.append(argument if name in required else f"{argument}?")
        return [f"{rule}: {' '.join(items) or json.dumps('')}", *rules]

    def _argument(self, tool: Tool, rule: str, name: str, schema: Any) -> list[str]:
        types = types_of(schema, tool.input_schema)
        line = "\n" if self.tags.has_lines else ""
        # The words in the tag for the argument's types. A tag may have one word for strings and one
        # for all other types. If both are possible, the value is JSON with the second word.
        kinds = self.tags.kinds
        words = {kinds[kind] for kind in types} if kinds else {""}
        if len(words) == 2 and words == set(kinds.values()):
            words = {kinds["null"]}
        if len(words) != 1:
            raise _refused(
                tool, f"a forced call can't have `{name}`, whose values may be of several types,"
            )
        (kind,) = words
        opened = self.tags.open.replace("{key}", name).replace("{kind}", kind) + line
        closed = line + self.tags.close_of(name) + self.gap
        if self.tags.elements and types & {"array", "object"}:
            raise _refused(
                tool, f"a forced call can't have `{name}`, whose values may be lists or objects,"
            )
        if types in ({"string"}, ALL_TYPES):
            return self.text(tool, rule, name, schema, (opened, closed))
        value = self.json_of(schema, tool)
        if self.is_python and types <= {"boolean", "null"} and _choices(schema) is None:
            python = {"boolean": '"True" | "False"', "null": '"None"'}
            value = " | ".join(word for name, word in python.items() if name in types)
        parts = [*self.writer.texts(opened), f"{rule}_v", *self.writer.texts(closed)]
        return [f"{rule}: {' '.join(parts)}", f"{rule}_v: {value}"]


@dataclass(frozen=True, slots=True)
class _LiteralRules(_InputRules):
    """Writes the rules of arguments as `key=value, …`.

    Rules for the tails of the list put the commas right where arguments are optional.
    """

    syntax: LiteralSyntax
    # The quote around strings, if they are Python's.
    mark: str
    # Whether numbers and words have the quote too.
    quotes_all: bool
    # Whether truth values and null are written as JSON's words.
    is_json: bool
    # The text between two arguments.
    comma: str

    def rules(self, tool: Tool, rule: str) -> list[str]:
        properties, required = self.properties(tool)
        names = sorted(properties, key=lambda name: name not in required)
        num_required = len(required)
        rules: list[str] = []
        for index, name in enumerate(names):
            rules += self._argument(tool, f"{rule}_{index}", name, properties[name])
        comma = json.dumps(self.comma)
        tails = [f" {rule}_t{i}" if i < len(names) else "" for i in range(len(names) + 1)]
        for index in range(len(names) - 1, 0, -1):
            argument = f"{comma} {rule}_{index}"
            if index >= num_required:
                argument = f"({argument})?"
            rules.append(f"{rule}_t{index}: {argument}{tails[index + 1]}")
        firsts = range(1 if num_required else len(names))
        starts = [f"{rule}_{i}{tails[i + 1]}" for i in firsts]
        if not num_required:
            starts.append('""')
        return [f"{rule}: {' | '.join(starts)}", *rules]

    def _argument(self, tool: Tool, rule: str, name: str, schema: Any) -> list[str]:
        opened = name + self.syntax.assign
        quote = self.syntax.quote
        begin = " ".join(self.writer.texts(opened))
        types = types_of(schema, tool.input_schema)
        if types == {"string"} and quote:
            return self.text(tool, rule, name, schema, (opened + quote, quote))
        if quote and not types <= _SCALARS:
            raise _refused(
                tool, f"a forced call can't have `{name}`, whose values may be lists or objects,"
            )
        mark = json.dumps(self.mark)
        around = mark if self.quotes_all and types <= _SCALARS and not quote else ""
        if types == {"boolean"} and not quote and not self.is_json:
            return [f'{rule}: {begin} {around} ("True" | "False") {around}']
        if types == {"string"} and self.mark == "'" and not quote:
            choices = _choices(schema)
            if choices is not None:
                return [f"{rule}: {begin} {mark} ({choices}) {mark}"]
            self.check_text(tool, name, schema)
            return [f"{rule}: {begin} /'[^'\\\\\\n]*'/"]
        value = self.json_of(schema, tool)
        return [f"{rule}: {begin} {around} {rule}_v {around}", f"{rule}_v: {value}"]


def _refused(tool: Tool, fault: str, notation: str = "them") -> SchemaRefused:
    return SchemaRefused(
        f"input_schema of `{tool.name}`: {fault} in the way in which this model writes {notation}"
    )


def _choices(schema: Any) -> str | None:
    """The strings that a schema lists, as Lark; None if it lists none or lists other values."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    if not all(isinstance(value, str) for value in values):
        return None
    return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
