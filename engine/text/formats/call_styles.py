"""How each format writes calls, as grammar rules for forcing one.

A forced call is written as the template writes it, so that a replayed one has the tokens that were
sampled. Inputs that are no JSON get rules of their own, argument by argument.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine.errors import SchemaRefused
from engine.protocol import Tool
from engine.text.formats.argument_types import ALL_TYPES, types_of
from engine.text.formats.call_format import CallFormat, Written
from engine.text.formats.call_stream import CallStream
from engine.text.formats.literal_input import LiteralSyntax
from engine.text.formats.model_formats import ModelFormats
from engine.text.formats.patterns import Maybe, Space, Word
from engine.text.formats.proof import LAST_WORD, ProvenCalls
from engine.text.formats.tagged_input import TagSyntax
from engine.text.formats.tool_calls import Llama3Calls
from engine.text.free_calls import find_starts
from engine.text.grammar import CallStyle, GrammarWriter, json_rule

_ID = "/[a-zA-Z0-9]{9}/"
_PLACES = {
    "{digits}": "/[0-9]{1,4}/",
    "{id}": _ID,
    "{more}": f'({json.dumps(", " + json.dumps("id") + ": ")} /"/ {_ID} /"/)?',
}
_PLACE = re.compile(r"(\{name\}|\{input\}|\{digits\}|\{id\}|\{more\})")
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
# What a schema of an object may say that rules of one argument after the other don't hold.
_UNHELD = ("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas",
           "minProperties", "maxProperties", "allOf", "anyOf", "oneOf", "not", "if",
           "$ref")  # fmt: skip


def find_call_style(formats: ModelFormats, writer: GrammarWriter) -> CallStyle | None:
    """The style of a model's calls; None where it has no format, or one that can't be written."""
    of = formats.call_format
    if of is None or not of.written:
        return None
    written = _written_as_shown(of, formats.calls)
    shown = "" if formats.calls is None else formats.calls.shown

    def call(name: str, input_rule: str) -> str:
        return _lark(writer, written.call, name, input_rule)

    rules: Callable[[Tool, str], list[str]] | None = None
    arguments = of.arguments
    if isinstance(arguments, TagSyntax):
        tag = _shown_tag(arguments, shown)
        written = _with_end(written, arguments, tag[1], shown)
        tagged = _Tagged(writer, tag, arguments, is_python="True" in shown)
        rules = tagged.rules

    elif isinstance(arguments, LiteralSyntax):
        rules = _Literal(writer, arguments, shown).rules

    return CallStyle(
        call=call,
        begin=_lark(writer, written.begin),
        separator=_lark(writer, written.separator),
        end=_lark(writer, written.end),
        input_rules=rules,
        starts=find_starts(_starts_of(of), written.begin + written.call),
    )


def _starts_of(of: CallFormat) -> tuple[str, ...]:
    """The texts at which the format's parser looks for a call; none where it needs no such text."""
    parser = of.new_parser(str, [])
    if isinstance(parser, Llama3Calls) or not isinstance(parser, CallStream):
        return ()
    return parser.starts


def _written_as_shown(of: CallFormat, proven: ProvenCalls | None) -> Written:
    """The variant that the template renders; its numbers and ids may be any."""
    shown = "" if proven is None else proven.shown
    for written in of.written:
        parts = [p for p in _PLACE.split(written.begin + written.call + written.end) if p]
        pattern = "".join(_SHOWN.get(part) or re.escape(part) for part in parts)
        if re.search(pattern, shown, re.DOTALL):
            return written
    if proven is not None and proven.written is not None and of.arguments is None:
        return proven.written
    return of.written[0]


def _with_end(written: Written, syntax: TagSyntax, gap: str, shown: str) -> Written:
    """With the white space that the template writes behind the last argument alone."""
    last = shown.rfind(syntax.close, 0, shown.rfind(syntax.end))
    between = shown[last + len(syntax.close) : shown.rfind(syntax.end)] if last >= 0 else ""
    more = between.removeprefix(gap)
    if not more or more.strip():
        return written
    return replace(written, call=written.call.replace("{input}", "{input}" + more))


_SHOWN = {
    "{more}": '(, "id": "[^"]*")?',
    "{name}": r"[\w.\-]+",
    "{input}": ".*",
    "{digits}": r"\d+",
    "{id}": "[a-zA-Z0-9]{9}",
}


def _lark(writer: GrammarWriter, text: str, name: str = "", input_rule: str = "") -> str:
    """A text with places as a sequence of Lark; control tokens in it are those tokens."""
    items: list[str] = []
    for part in _PLACE.split(text):
        match part:
            case "{name}":
                # Names in JSON are written as JSON; those of tools need no escapes elsewhere.
                items += writer.texts(json.dumps(name, ensure_ascii=False)[1:-1])
            case "{input}":
                items.append(input_rule)
            case _ if part in _PLACES:
                items.append(_PLACES[part])
            case _:
                items += writer.texts(part)
    return " ".join(items)


def _shown_tag(syntax: TagSyntax, shown: str) -> tuple[str, str]:
    """What the template writes between an opening tag's parts, and behind a closing tag."""
    if "{key}" in syntax.close:
        return "", ""
    at = shown.find(syntax.close)
    behind = shown[at + len(syntax.close) :] if at >= 0 else "\n"
    gap = behind[: len(behind) - len(behind.lstrip())]
    inner = re.search(r"</arg_key>(\s*)<arg_value>", shown)
    return ("" if inner is None else inner.group(1), gap)


class _Arguments:
    """The rules of one tool's input, argument by argument in the order of its schema."""

    def __init__(self, writer: GrammarWriter) -> None:
        self._writer = writer

    def _properties(self, tool: Tool) -> tuple[dict[str, Any], set[str]]:
        """Raises SchemaRefused where the schema says what such rules can't hold."""
        schema = tool.input_schema
        unheld = next((key for key in _UNHELD if key in schema), None)
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        missing = [name for name in required if name not in properties]
        if unheld is not None or missing:
            what = f"`{unheld}`" if unheld else "`required` without a property"
            raise SchemaRefused(
                f"input_schema of `{tool.name}`: {what} can't be guaranteed in the way in which "
                "this model writes arguments"
            )
        return properties, set(required)

    def _json(self, schema: Mapping[str, Any], tool: Tool) -> str:
        whole = tool.input_schema
        root: dict[str, Any] = {k: whole[k] for k in ("$defs", "definitions") if k in whole}
        return json_rule({**root, **schema})

    def _types(self, schema: Any, tool: Tool) -> frozenset[str]:
        return types_of(schema, tool.input_schema)

    def _refuse_text(self, schema: Any, tool: Tool, name: str) -> None:
        """A string outside of JSON can be held to a list of values and to nothing else."""
        held = ("pattern", "format", "minLength", "maxLength", "not", "allOf", "anyOf", "oneOf")
        said = next((key for key in held if isinstance(schema, dict) and key in schema), None)
        if said is not None:
            raise SchemaRefused(
                f"input_schema of `{tool.name}`: `{said}` of `{name}` can't be guaranteed in the "
                "way in which this model writes strings"
            )


class _Tagged(_Arguments):
    def __init__(
        self, writer: GrammarWriter, shown: tuple[str, str], syntax: TagSyntax, *, is_python: bool
    ) -> None:
        super().__init__(writer)
        self._inner, self._gap = shown
        self._syntax = syntax
        self._is_python = is_python

    def rules(self, tool: Tool, rule: str) -> list[str]:
        properties, required = self._properties(tool)
        rules: list[str] = []
        items: list[str] = []
        for index, (name, schema) in enumerate(properties.items()):
            argument = f"{rule}_{index}"
            rules += self._argument(tool, argument, name, schema)
            items.append(argument if name in required else f"{argument}?")
        return [f"{rule}: {' '.join(items) or json.dumps('')}", *rules]

    def _argument(self, tool: Tool, rule: str, name: str, schema: Any) -> list[str]:
        types = self._types(schema, tool)
        line = "\n" if self._syntax.has_lines else ""
        opened = self._opened(name, self._kind(types, tool, name)) + line
        closed = line + self._syntax.close_of(name) + self._gap
        if self._syntax.elements and types & {"array", "object"}:
            raise SchemaRefused(
                f"input_schema of `{tool.name}`: a forced call can't have `{name}`, whose values "
                "may be lists or objects, in the way in which this model writes them"
            )
        if types == {"string"} or types == ALL_TYPES:
            return self._text(tool, rule, name, schema, opened, closed)
        parts = [*self._writer.texts(opened), f"{rule}_v", *self._writer.texts(closed)]
        return [f"{rule}: {' '.join(parts)}", f"{rule}_v: {self._value(tool, schema, types)}"]

    def _text(
        self, tool: Tool, rule: str, name: str, schema: Any, opened: str, closed: str
    ) -> list[str]:
        begin = " ".join(self._writer.texts(opened))
        end = " ".join(self._writer.texts(closed))
        choices = _choices(schema)
        if choices is not None:
            values = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            return [f"{rule}: {begin} ({values}) {end}"]
        self._refuse_text(schema, tool, name)
        first, *more = self._writer.texts(closed)
        if first.startswith("<["):
            value = f"{rule}_v: /(.|\\n)*/ {first}"
        else:
            value = f"{rule}_v[lazy]: /(.|\\n)*/ {first}"
        return [f"{rule}: {begin} {rule}_v {' '.join(more)}", value]

    def _value(self, tool: Tool, schema: Any, types: frozenset[str]) -> str:
        if not self._is_python or not types <= {"boolean", "null"} or _choices(schema, str):
            return self._json(schema if isinstance(schema, dict) else {}, tool)
        words = (['"True"', '"False"'] if "boolean" in types else []) + (
            ['"None"'] if "null" in types else []
        )
        return " | ".join(words)

    def _kind(self, types: frozenset[str], tool: Tool, name: str) -> str:
        """The word in the tag for an argument's type."""
        kinds = self._syntax.kinds
        words = {kinds[kind] for kind in types} if kinds else {""}
        if len(words) == 1:
            return words.pop()
        # A tag that only tells strings from all else takes a value of either as JSON.
        if words == set(kinds.values()) and len(words) == 2:
            return kinds["null"]
        raise SchemaRefused(
            f"input_schema of `{tool.name}`: a forced call can't have `{name}`, whose values may "
            "be of several types, in the way in which this model writes them"
        )

    def _opened(self, key: str, kind: str) -> str:
        if self._syntax.written:
            return self._syntax.written.replace("{key}", key).replace("{kind}", kind)
        pieces: list[str] = []
        for element in self._syntax.open:
            match element:
                case str():
                    pieces.append(element)
                case Word(key="key"):
                    pieces.append(key)
                case Word():
                    pieces.append(kind)
                case Space():
                    pieces.append(self._inner)
                case Maybe():
                    pass
        return "".join(pieces)


class _Literal(_Arguments):
    """`key=value, …`; a list of optional arguments has its commas right by rules for its tail."""

    def __init__(self, writer: GrammarWriter, syntax: LiteralSyntax, shown: str) -> None:
        super().__init__(writer)
        self._syntax = syntax
        quoted = re.search(rf"\bword=(['\"]){LAST_WORD}", shown)
        self._string_quote = '"' if quoted is None else quoted.group(1)
        self._quotes_all = f"ratio={self._string_quote}" in shown

    def rules(self, tool: Tool, rule: str) -> list[str]:
        properties, required = self._properties(tool)
        names = sorted(properties, key=lambda name: name not in required)
        num_required = sum(name in required for name in names)
        rules: list[str] = []
        for index, name in enumerate(names):
            rules += self._argument(tool, f"{rule}_{index}", name, properties[name])
        comma = json.dumps("," if self._syntax.quote else ", ")
        for index in range(len(names) - 1, 0, -1):
            following = f" {rule}_t{index + 1}" if index + 1 < len(names) else ""
            one = f"{comma} {rule}_{index}"
            one = one if index < num_required else f"({one})?"
            rules.append(f"{rule}_t{index}: {one}{following}")
        firsts = range(1 if num_required else len(names))
        starts = [
            f"{rule}_{i}" + (f" {rule}_t{i + 1}" if i + 1 < len(names) else "") for i in firsts
        ]
        if not num_required:
            starts.append('""')
        return [f"{rule}: {' | '.join(starts)}", *rules]

    def _argument(self, tool: Tool, rule: str, name: str, schema: Any) -> list[str]:
        begin = " ".join(self._writer.texts(name + self._syntax.assign))
        types = self._types(schema, tool)
        quote = self._syntax.quote
        if types == {"string"} and quote:
            opening, choices = " ".join(self._writer.texts(quote)), _choices(schema)
            if choices is not None:
                values = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
                return [f"{rule}: {begin} {opening} ({values}) {opening}"]
            self._refuse_text(schema, tool, name)
            lazy = "" if opening.startswith("<[") else "[lazy]"
            return [
                f"{rule}: {begin} {opening} {rule}_v",
                f"{rule}_v{lazy}: /(.|\\n)*/ {opening}",
            ]
        if not quote:
            return self._python(tool, rule, begin, schema)
        if types <= _SCALARS:
            return [f"{rule}: {begin} {rule}_v", f"{rule}_v: {self._json(schema, tool)}"]
        raise SchemaRefused(
            f"input_schema of `{tool.name}`: a forced call can't have `{name}`, whose values may "
            "be lists or objects, in the way in which this model writes them"
        )

    def _python(self, tool: Tool, rule: str, begin: str, schema: Any) -> list[str]:
        """A value as the template writes it: strings in its quotes, numbers in some as well."""
        types = self._types(schema, tool)
        mark = json.dumps(self._string_quote)
        around = mark if self._quotes_all and types <= _SCALARS else ""
        if types == {"boolean"}:
            return [f'{rule}: {begin} {around} ("True" | "False") {around}']
        if types == {"string"} and self._string_quote == "'":
            choices = _choices(schema)
            if choices is None:
                self._refuse_text(schema, tool, rule)
                return [f"{rule}: {begin} /'[^'\\\\\\n]*'/"]
            values = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            return [f"{rule}: {begin} {mark} ({values}) {mark}"]
        return [f"{rule}: {begin} {around} {rule}_v {around}",
                f"{rule}_v: {self._json(schema, tool)}"]  # fmt: skip


def _choices(schema: Any, kind: type = str) -> list[str] | None:
    """The strings that a schema lists, None where it lists none or lists other values."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    return values if all(isinstance(value, kind) for value in values) else None
