"""How each format writes calls, as grammar rules for forcing one.

A forced call is written as the template writes it, so that a replayed one has the tokens that were
sampled. Inputs that are no JSON get rules of their own, argument by argument.
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
from engine.text.grammar import CallStyle, GrammarWriter, find_starts, json_rule

_ID = "/[a-zA-Z0-9]{9}/"
_PLACES = {
    "{digits}": "/[0-9]{1,4}/",
    "{id}": _ID,
    "{more}": f'({json.dumps(", " + json.dumps("id") + ": ")} /"/ {_ID} /"/)?',
}
_SHOWN = {
    "{more}": '(, "id": "[^"]*")?',
    "{name}": r"[\w.\-]+",
    "{input}": ".*",
    "{digits}": r"\d+",
    "{id}": "[a-zA-Z0-9]{9}",
}
_PLACE = re.compile(r"(\{name\}|\{input\}|\{digits\}|\{id\}|\{more\})")
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
# What a schema of an object may say that rules of one argument after the other don't hold.
_UNHELD = ("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas",
           "minProperties", "maxProperties", "allOf", "anyOf", "oneOf", "not", "if",
           "$ref")  # fmt: skip
# A string outside of JSON can be held to a list of values and to nothing else.
_UNHELD_IN_TEXT = ("pattern", "format", "minLength", "maxLength", "not", "allOf", "anyOf", "oneOf")


def find_call_style(formats: ModelFormats, writer: GrammarWriter) -> CallStyle | None:
    """The style of a model's calls; None where it has no format."""
    of, proven = formats.call_format, formats.calls
    if of is None:
        return None
    # Of the format's ways the one that the template renders; its numbers and ids may be any.
    shown = "" if proven is None else proven.shown
    written = of.written[0]
    if proven is not None and proven.written is not None and of.arguments is None:
        written = proven.written
    for way in of.written:
        parts = [p for p in _PLACE.split(way.begin + way.call + way.end) if p]
        pattern = "".join(_SHOWN.get(part) or re.escape(part) for part in parts)
        if re.search(pattern, shown, re.DOTALL):
            written = way
            break
    rules: Callable[[Tool, str], list[str]] | None = None
    if isinstance(of.arguments, TagSyntax):
        tags = _as_shown(of.arguments, shown)
        at = shown.rfind(tags.end)
        last = shown.rfind(tags.close, 0, at)
        # The white space that the template writes behind an argument, and behind the last alone.
        gap, more = "", ""
        if "{key}" not in tags.close:
            behind = shown[shown.find(tags.close) + len(tags.close) :] if last >= 0 else "\n"
            gap = behind[: len(behind) - len(behind.lstrip())]
        if last >= 0:
            more = shown[last + len(tags.close) : at].removeprefix(gap)
        if more and not more.strip():
            written = replace(written, call=written.call.replace("{input}", "{input}" + more))
        rules = _Tagged(writer, tags, gap, is_python="True" in shown).rules
    elif isinstance(of.arguments, LiteralSyntax):
        quoted = re.search(rf"\bword=(['\"]){LAST_WORD}", shown)
        mark = '"' if quoted is None else quoted.group(1)
        rules = _Literal(writer, of.arguments, mark, f"ratio={mark}" in shown).rules

    def call(name: str, input_rule: str) -> str:
        return _lark(writer, written.call, name, input_rule)

    return CallStyle(
        call=call,
        begin=_lark(writer, written.begin),
        separator=_lark(writer, written.separator),
        end=_lark(writer, written.end),
        input_rules=rules,
        starts=find_starts(of.starts, written.begin + written.call),
    )


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


def _as_shown(tags: TagSyntax, shown: str) -> TagSyntax:
    """With the white space that the template writes within an opening tag."""
    before, line, behind = tags.open.partition("\n")
    left = re.escape(before.rpartition("}")[2])
    found = re.search(rf"{left}(\s*){re.escape(behind)}", shown) if line else None
    return tags if found is None else replace(tags, open=before + found.group(1) + behind)


@dataclass(frozen=True, slots=True)
class _Rules:
    """The rules of one tool's input, argument by argument in the order of its schema."""

    writer: GrammarWriter

    def properties(self, tool: Tool) -> tuple[dict[str, Any], set[str]]:
        """Those of the schema, and which are required. Raises SchemaRefused where the schema says
        what such rules can't hold."""
        schema = tool.input_schema
        unheld = next((f"`{key}`" for key in _UNHELD if key in schema), "")
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        if unheld or required - properties.keys():
            what = unheld or "`required` without a property"
            raise _refused(tool, f"{what} can't be guaranteed", "arguments")
        return properties, required

    def json_of(self, schema: Any, tool: Tool) -> str:
        whole = tool.input_schema
        root: dict[str, Any] = {k: whole[k] for k in ("$defs", "definitions") if k in whole}
        return json_rule({**root, **(schema if isinstance(schema, Mapping) else {})})

    def text(
        self, tool: Tool, rule: str, name: str, schema: Any, around: tuple[str, str]
    ) -> list[str]:
        """A string between two texts, as it is."""
        begin, (first, *more) = " ".join(self.writer.texts(around[0])), self.writer.texts(around[1])
        choices = _choices(schema)
        if choices is not None:
            return [f"{rule}: {begin} ({choices}) {' '.join((first, *more))}"]
        self.check_text(tool, name, schema)
        lazy = "" if first.startswith("<[") else "[lazy]"
        return [
            f"{rule}: {begin} {rule}_v {' '.join(more)}",
            f"{rule}_v{lazy}: /(.|\\n)*/ {first}",
        ]

    def check_text(self, tool: Tool, name: str, schema: Any) -> None:
        said = (key for key in _UNHELD_IN_TEXT if isinstance(schema, dict) and key in schema)
        if (key := next(said, None)) is not None:
            raise _refused(tool, f"`{key}` of `{name}` can't be guaranteed", "strings")


@dataclass(frozen=True, slots=True)
class _Tagged(_Rules):
    """`gap` is the white space behind an argument."""

    tags: TagSyntax
    gap: str
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
        kind = self._kind(types, tool, name)
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
            words = {"boolean": '"True" | "False"', "null": '"None"'}
            value = " | ".join(word for kind, word in words.items() if kind in types)
        parts = [*self.writer.texts(opened), f"{rule}_v", *self.writer.texts(closed)]
        return [f"{rule}: {' '.join(parts)}", f"{rule}_v: {value}"]

    def _kind(self, types: frozenset[str], tool: Tool, name: str) -> str:
        """The word in the tag for an argument's type."""
        kinds = self.tags.kinds
        words = {kinds[kind] for kind in types} if kinds else {""}
        if len(words) == 1:
            return words.pop()
        # A tag that only tells strings from all else takes a value of either as JSON.
        if words == set(kinds.values()) and len(words) == 2:
            return kinds["null"]
        raise _refused(
            tool, f"a forced call can't have `{name}`, whose values may be of several types,"
        )


@dataclass(frozen=True, slots=True)
class _Literal(_Rules):
    """`key=value, …`; a list of optional arguments has its commas right by rules for its tail.

    `mark` is the quote around strings where they are Python's, `quotes_all` whether numbers have
    it as well.
    """

    syntax: LiteralSyntax
    mark: str
    quotes_all: bool

    def rules(self, tool: Tool, rule: str) -> list[str]:
        properties, required = self.properties(tool)
        names = sorted(properties, key=lambda name: name not in required)
        num_required = len(required)
        rules: list[str] = []
        for index, name in enumerate(names):
            rules += self._argument(tool, f"{rule}_{index}", name, properties[name])
        comma = json.dumps("," if self.syntax.quote else ", ")
        tails = [f" {rule}_t{i}" if i < len(names) else "" for i in range(len(names) + 1)]
        for index in range(len(names) - 1, 0, -1):
            one = f"{comma} {rule}_{index}"
            one = one if index < num_required else f"({one})?"
            rules.append(f"{rule}_t{index}: {one}{tails[index + 1]}")
        firsts = range(1 if num_required else len(names))
        starts = [f"{rule}_{i}{tails[i + 1]}" for i in firsts]
        if not num_required:
            starts.append('""')
        return [f"{rule}: {' | '.join(starts)}", *rules]

    def _argument(self, tool: Tool, rule: str, name: str, schema: Any) -> list[str]:
        opened, quote = name + self.syntax.assign, self.syntax.quote
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
        if types == {"boolean"} and not quote:
            return [f'{rule}: {begin} {around} ("True" | "False") {around}']
        if types == {"string"} and self.mark == "'" and not quote:
            choices = _choices(schema)
            if choices is not None:
                return [f"{rule}: {begin} {mark} ({choices}) {mark}"]
            self.check_text(tool, name, schema)
            return [f"{rule}: {begin} /'[^'\\\\\\n]*'/"]
        value = self.json_of(schema, tool)
        return [f"{rule}: {begin} {around} {rule}_v {around}", f"{rule}_v: {value}"]


def _refused(tool: Tool, what: str, written: str = "them") -> SchemaRefused:
    return SchemaRefused(
        f"input_schema of `{tool.name}`: {what} in the way in which this model writes {written}"
    )


def _choices(schema: Any) -> str | None:
    """The strings that a schema lists, None where it lists none or lists other values."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    if not all(isinstance(value, str) for value in values):
        return None
    return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
