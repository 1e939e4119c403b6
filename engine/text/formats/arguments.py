"""Reads inputs that a format writes argument by argument, and writes them as JSON while they come.

Some formats put arguments between tags (`<parameter=city>Bern</parameter>`). There a string stands
as it is, and any other value stands as JSON. Templates that use Jinja's `string` filter write it as
Python instead: `True`, `None`, `{'a': 1}`. Other formats write `key=value` in Python's notation, or
`key:value` in Gemma's. The tool's schema decides which value a text stands for.
"""

import ast
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.protocol import Delta, ToolInputDelta, ToolUseStart
from engine.text.formats.matching import SPACE, Match, Pattern, match, overlap, pattern_of
from engine.text.template.messages import BASE62, SHORT_ID_LENGTH

_SPACE = " \t\n\r"


_STRING = frozenset({"string"})
ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_TYPE_OF = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_MAX_REFERENCES = 32
_MAX_PYTHON_CHARACTERS = 65_536
_MAX_LITERAL = 1_000_000
_MAX_DEPTH = 64
_CDATA = "<![CDATA["
_CDATA_END = "]]>"
_PAIRS = {"{": "}", "[": "]", "(": ")"}
_ITEM = "item"
_ID_LENGTH = 24
ITEM_TAGS = (f"<{_ITEM}>", f"</{_ITEM}>")
"""The tags around each value of a list that is written as elements."""


def resolve(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Follow local references (`#/$defs/…`). A reference that leads nowhere gives an empty
    schema."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        target: Any = root
        for step in reference.removeprefix("#").strip("/").split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if step:
                target = target.get(step) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            return {}
        schema = target
    return {}


def types_of(schema: Any, root: dict[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types of the values that a schema accepts. For an involved schema the result may
    have more types than it accepts."""
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return ALL_TYPES
    schema = resolve(schema, root)
    types = ALL_TYPES
    declared = schema.get("type")
    if isinstance(declared, str):
        types &= {declared}
    elif isinstance(declared, list):
        types &= {kind for kind in declared if isinstance(kind, str)}
    if "const" in schema:
        types &= {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        types &= {type_of(value) for value in schema["enum"]}
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            types &= frozenset().union(*(types_of(b, root, depth + 1) for b in branches))
    for branch in schema.get("allOf") or ():
        types &= types_of(branch, root, depth + 1)
    if schema.get("nullable") is True and declared is not None:
        types |= {"null"}
    return types or ALL_TYPES


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    return "null" if value is None else _TYPE_OF.get(type(value), "string")


def value_of(text: str, types: frozenset[str]) -> Any:
    """The value that a text stands for, where a schema allows these types.

    If only strings are allowed, the text is the string. If other types are allowed too, a text that
    is a value of one of them is that value. Any other text is a string.
    """
    if types == _STRING:
        return text
    value = _read_value(text.strip())
    kind = type_of(value)
    if kind == "integer" and "integer" not in types and "number" in types:
        return value
    if kind == "number" and "number" not in types and value == int(value):
        return int(value) if "integer" in types else text
    return value if kind in types and kind != "string" else text


def _read_value(text: str) -> Any:
    """The value of a text of JSON, or else of Python; the text itself if it is neither."""
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    if not text or not (text[0] in "[{-" or text[0].isdigit() or text in ("true", "false", "null")):
        return text
    may_be_python = text[0] in "[{" and len(text) <= _MAX_PYTHON_CHARACTERS
    if may_be_python:
        return _parsed(text, json.loads, ast.literal_eval)
    return _parsed(text, json.loads)


def _parsed(text: str, *readers: Callable[[str], Any]) -> Any:
    """The text's value by the first reader that finds one; the text itself if none does.

    A value counts only if JSON has such a value. It has no number that is too large for a double.
    """
    for read in readers:
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return list(value) if isinstance(value, tuple) else value
    return text


def _read_python(written: str) -> Any:
    """The value of a literal of Python or JSON. A text that is neither is a string as it stands."""
    value = _parsed(written, ast.literal_eval, json.loads)
    is_quoted = len(written) > 1 and written[0] == written[-1] and written[0] in "\"'"
    return written[1:-1] if is_quoted and value == written else value


_BARE = re.compile(r"([^\s,:\[\]{}](?:[^,:\[\]{}]*[^\s,:\[\]{}])?)(\s*:)?")


def _read_quoted(written: str, quote: str) -> Any:
    """The value of a text in Gemma's notation; the text itself if it is none.

    Strings stand between `quote`. Keys stand with or without it.
    """

    def as_json(bare: re.Match[str]) -> str:
        text, colon = bare.groups()
        value = text if colon else value_of(text, ALL_TYPES)
        return json.dumps(value) + (colon or "")

    pieces = [
        json.dumps(piece) if index % 2 else _BARE.sub(as_json, piece)
        for index, piece in enumerate(written.split(quote))
    ]
    try:
        return json.loads("".join(pieces))
    except (ValueError, RecursionError):
        return written


def schema_of(name: str, root: dict[str, Any]) -> Any:
    """An argument's own schema, from the tool's schema `root`; None if that does not have it."""
    properties = resolve(root, root).get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


@dataclass(frozen=True, slots=True)
class Elements:
    """Reads values that a format writes as elements: `<rows><item>x</item></rows>`."""

    # The text before each tag. With it texts need no escapes.
    prefix: str
    # The tool's whole schema.
    root: dict[str, Any]
    # The types that a schema accepts, by the schema's id.
    _types: dict[int, frozenset[str]] = field(default_factory=dict)

    def value(self, text: str, schema: Any, depth: int = 0) -> Any:
        """The value of an element's content.

        The schema decides whether elements inside are a list or an object, and which value a
        content without elements stands for.
        """
        # Each schema is looked at once, however many elements have it. The root keeps its parts
        # alive, so no other schema gets an id of theirs.
        if id(schema) not in self._types:
            self._types[id(schema)] = types_of(schema, self.root)
        types = self._types[id(schema)]
        is_plain = depth > _MAX_DEPTH or types == _STRING
        children = None if is_plain else self._children(text)
        if children is None:
            if not text.strip() and "string" not in types and types & {"array", "object"}:
                return [] if "array" in types else {}
            return value_of(text, types)
        inner = resolve(schema, self.root) if isinstance(schema, dict) else {}
        if "array" in types and all(name == _ITEM for name, _ in children):
            items = inner.get("items")
            return [self.value(content, items, depth + 1) for _, content in children]
        properties = inner.get("properties")
        known: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        return {name: self.value(content, known.get(name), depth + 1) for name, content in children}

    def _children(self, text: str) -> list[tuple[str, str]] | None:
        """The names and contents of the elements that a text consists of; None if it has other text
        too."""
        elements: list[tuple[str, str]] = []
        open_names: list[str] = []
        begin = 0
        end = 0
        for tag in re.finditer(rf"{re.escape(self.prefix)}<(/?)([^<>/]{{1,128}})>", text):
            if not tag[1]:
                if not open_names:
                    if text[end : tag.start()].strip():
                        return None
                    begin = tag.end()
                open_names.append(tag[2])
            elif not open_names or open_names.pop() != tag[2]:
                return None
            elif not open_names:
                elements.append((tag[2], text[begin : tag.start()]))
                end = tag.end()
        return elements if elements and not open_names and not text[end:].strip() else None


def new_tool_use_id(written: str = "") -> str:
    """A new id: `toolu_` and 24 characters of base 62.

    It ends with the id that the model wrote, so a replayed call has that id. The other characters
    are random.
    """
    ending = written if len(written) == SHORT_ID_LENGTH and set(written) <= set(BASE62) else ""
    return (
        "toolu_" + "".join(secrets.choice(BASE62) for _ in range(_ID_LENGTH - len(ending))) + ending
    )


class CallStream:
    """Reads one call.

    A call whose input breaks off stays incomplete, as at the end of a generation.
    """

    def __init__(self, written_id: str = "") -> None:
        """`written_id` is the id that the model wrote; empty if it wrote none."""
        # The delta that begins the call was returned.
        self.is_started = False
        # The input is whole.
        self.has_input = False
        # Nothing more is read.
        self.is_over = False
        # The call broke off.
        self.is_broken = False
        # Once over, the text behind the call. Once broken, the text that is no part of the call:
        # all of its text if it was not started.
        self.rest = ""
        self._pending = ""
        self._written_id = written_id

    def feed(self, text: str) -> list[Delta]:
        raise NotImplementedError

    def end(self) -> list[Delta]:
        """End the model's turn. Return the last deltas."""
        return []

    def pending_text(self) -> str:
        """The text that was fed and that no delta has. It is empty once the call is started."""
        return "" if self.is_started else self._pending

    def _start(self, name: str) -> ToolUseStart:
        self.is_started = True
        return ToolUseStart(new_tool_use_id(self._written_id), name)

    def _break(self, rest: str) -> None:
        self.is_over = True
        self.is_broken = True
        self.rest = rest
        self._pending = ""


class ArgumentStream(CallStream):
    """Reads a call whose name is known, from the beginning of its input on.

    `schema` is the schema of its tool. A subclass reads the format's text, and calls the methods
    below when an argument begins, continues and ends.
    """

    def __init__(self, name: str, schema: dict[str, Any], written_id: str) -> None:
        super().__init__(written_id)
        self._name = name
        self._schema = schema
        self._keys: set[str] = set()
        self._is_first = True
        self._fragments: list[str] = []

    def feed(self, text: str) -> list[Delta]:
        self._pending += text
        deltas: list[Delta] = []
        if not self.is_started:
            deltas.append(self._start(self._name))
        while not self.is_over and self._step():
            pass
        return [*deltas, *self._take_deltas()]

    def _take_deltas(self) -> list[Delta]:
        fragment = "".join(self._fragments)
        self._fragments = []
        return [ToolInputDelta(fragment)] if fragment else []

    def _step(self) -> bool:
        """Read a part of `_pending`. False if more text is needed, or if the call is over."""
        raise NotImplementedError

    def _begin_argument(self, key: str) -> None:
        """Begin an argument. If an argument comes twice, the first one counts."""
        self._is_first = key not in self._keys
        self._write((", " if self._keys else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._keys.add(key)

    def _write(self, fragment: str) -> None:
        if self._is_first:
            self._fragments.append(fragment)

    def _write_value(self, value: Any) -> None:
        self._write(json.dumps(value, ensure_ascii=False))

    def _close(self, rest: str) -> None:
        self._fragments.append("}" if self._keys else "{}")
        self.has_input = True
        self.is_over = True
        self.rest = rest
        self._pending = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagSyntax:
    """The notation of arguments between tags."""

    # The opening tag. It has the place `{key}`, and the place `{kind}` if the tag has the type.
    open: str
    # The closing tag. It may have the place `{key}`.
    close: str
    # The text that ends the call.
    end: str = ""
    # The texts that may follow the last argument if a model leaves `end` out.
    others: tuple[str, ...] = ()
    # Whether a value stands on lines of its own. The line breaks around it are no part of it.
    has_lines: bool = False
    # The tag's word for each JSON type; empty if the tag has no type.
    kinds: Mapping[str, str] = field(default_factory=dict)
    # Whether a string may stand in `<![CDATA[…]]>`.
    has_cdata: bool = False
    # The prefix of the tags inside values, if lists and objects are written as elements.
    elements: str = ""

    def close_of(self, key: str) -> str:
        return self.close.replace("{key}", key)

    @property
    def pattern(self) -> Pattern:
        return pattern_of(self.open)

    @property
    def markers(self) -> set[str]:
        """The texts of the notation that are not in its `pattern`."""
        items = {self.elements + tag for tag in ITEM_TAGS} if self.elements else set()
        return {*self.close.split("{key}"), self.end, *self.others, *items} - {""}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralSyntax:
    """The notation of arguments as `key=value`, with commas between them."""

    # The text between key and value.
    assign: str
    # The text behind the last argument.
    end: str = ""
    # The text around strings, which then have no escapes. Empty: values are Python's literals.
    quote: str = ""


class TaggedInput(ArgumentStream):
    """Reads an input between tags.

    A string streams as it comes. Any other value waits for its closing tag. A value may have the
    closing tag's text in it. So such a text closes the value only if another argument or the end of
    the call follows.
    """

    def __init__(
        self, name: str, schema: dict[str, Any], syntax: TagSyntax, written_id: str = ""
    ) -> None:
        super().__init__(name, schema, written_id)
        self._syntax = syntax
        self._open = (SPACE, *syntax.pattern)
        self._ends = tuple((SPACE, text) for text in (syntax.end, *syntax.others))
        self._wanted: frozenset[str] = ALL_TYPES
        self._is_in_value = False
        self._is_at_begin = False
        self._key = ""
        self._value_close = ""
        # The number of pending characters in which no closing tag begins.
        self._passed = 0

    def end(self) -> list[Delta]:
        """End the model's turn. An input whose last argument is whole counts as whole."""
        if self.is_over:
            return []
        if self._is_in_value:
            body = self._pending.rstrip(_SPACE)
            if not body.endswith(self._value_close):
                return []
            self._finish_value(body[: -len(self._value_close)])
        elif self._pending.strip():
            return []
        self._close("")
        return self._take_deltas()

    def _step(self) -> bool:
        if self._is_in_value:
            return self._read_value()
        opening = match(self._open, self._pending)
        ends = [match(end, self._pending) for end in self._ends]
        if isinstance(opening, Match):
            self._key = opening.words["key"].strip()
            self._begin_argument(self._key)
            self._pending = self._pending[opening.end :]
            self._wanted = types_of(schema_of(self._key, self._schema), self._schema)
            if "kind" in opening.words:
                kinds = self._syntax.kinds.items()
                wanted = (kind for kind, word in kinds if word == opening.words["kind"])
                self._wanted = frozenset(wanted) or ALL_TYPES
            self._is_in_value = True
            self._is_at_begin = True
            self._value_close = self._syntax.close_of(self._key)
            self._passed = 0
            if self._wanted == _STRING:
                self._write('"')
            return True
        if isinstance(ends[0], Match):
            self._close(self._pending[ends[0].end :])
        elif any(isinstance(outcome, Match) for outcome in ends):
            self._close(self._pending)
        elif opening == "none" and "partial" not in ends:
            self._break(self._pending)
        return False

    def _read_value(self) -> bool:
        if self._is_at_begin:
            # A line break or CDATA may stand before the value.
            pending = self._pending
            if self._syntax.has_lines:
                if not pending:
                    return False
                pending = pending.removeprefix("\n")
            if self._syntax.has_cdata and _CDATA.startswith(pending[: len(_CDATA)]):
                if len(pending) < len(_CDATA):
                    return False
                pending = pending[len(_CDATA) :]
                self._value_close = _CDATA_END + self._value_close
            self._pending = pending
            self._is_at_begin = False
        close = self._value_close
        lines = self._syntax.has_lines
        at = self._pending.find(close, self._passed)
        if at < 0:
            # Keep an end that may be the beginning of the closing text.
            kept = overlap(self._pending, close)
            kept = max(kept, overlap(self._pending, "\n" + close)) if lines else kept
            self._stream(len(self._pending) - kept)
            return False
        # Does the text behind the tag continue the call?
        behind = self._pending[at + len(close) :]
        outcomes = [match(after, behind) for after in (self._open, *self._ends)]
        if any(isinstance(outcome, Match) for outcome in outcomes):
            value = self._pending[:at]
            self._pending = behind
            self._finish_value(value)
            return True
        if "partial" in outcomes:
            self._stream(at - (lines and self._pending[:at].endswith("\n")))
            return False
        self._passed = at + 1
        return True

    def _finish_value(self, value: str) -> None:
        if self._syntax.has_lines:
            value = value.removesuffix("\n")
        if self._wanted == _STRING:
            self._write(_escaped(value) + '"')
        elif self._syntax.elements:
            elements = Elements(self._syntax.elements, self._schema)
            self._write_value(elements.value(value, schema_of(self._key, self._schema)))
        else:
            self._write_value(value_of(value, self._wanted))
        self._is_in_value = False

    def _stream(self, end: int) -> None:
        """Pass on a string's characters up to `end`."""
        if self._wanted == _STRING and end > 0:
            self._write(_escaped(self._pending[:end]))
            self._pending = self._pending[end:]
            self._passed = max(0, self._passed - end)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class LiteralInput(ArgumentStream):
    """Reads an input of `key=value`. Each argument is passed on when it is whole."""

    def __init__(
        self, name: str, schema: dict[str, Any], syntax: LiteralSyntax, written_id: str = ""
    ) -> None:
        super().__init__(name, schema, written_id)
        self._syntax = syntax
        quote = syntax.quote
        self._heads = [pattern_of(f"{{word}} {syntax.assign}")]
        if quote:
            self._heads.append(pattern_of(f"{quote}{{word}}{quote} {syntax.assign}"))
        self._key: str | None = None
        self._scan = _Scan(syntax)

    def _step(self) -> bool:
        if self._key is not None:
            return self._read_value(self._key)
        text = self._pending.lstrip(_SPACE)
        if self._keys and text.startswith(","):
            text = text[1:].lstrip(_SPACE)
        if text.startswith(self._syntax.end):
            self._close(text[len(self._syntax.end) :])
            return False
        outcomes = [match(head, text) for head in self._heads]
        key = next((outcome for outcome in outcomes if isinstance(outcome, Match)), None)
        if key is not None:
            self._key = key.words["word"]
            self._pending = text[key.end :]
            self._scan = _Scan(self._syntax)
            return True
        if text and "partial" not in outcomes:
            self._break(self._pending)
        return False

    def _read_value(self, key: str) -> bool:
        if not self._scan.at:
            self._pending = self._pending.lstrip(_SPACE)
        end = self._scan.find_end(self._pending)
        if end is None:
            return False
        written = self._pending[:end].rstrip(_SPACE)
        self._pending = self._pending[end:]
        value: Any = written
        if len(written) <= _MAX_LITERAL:
            quote = self._syntax.quote
            value = _read_quoted(written, quote) if quote else _read_python(written)
        types = types_of(schema_of(key, self._schema), self._schema)
        if isinstance(value, str) and "string" not in types:
            # Some templates quote all values. So a string is read if the schema has no strings.
            value = value_of(value, types)
        elif value is not None and not isinstance(value, str) and types == _STRING:
            value = json.dumps(value, ensure_ascii=False)
        self._begin_argument(key)
        self._write_value(value)
        self._key = None
        return True


class _Scan:
    """Finds the end of a value: a comma or the closing character, outside of all brackets."""

    def __init__(self, syntax: LiteralSyntax) -> None:
        self.at = 0
        self._end = syntax.end
        self._quotes = (syntax.quote,) if syntax.quote else ('"', "'")
        self._escapes = not syntax.quote
        self._stack: list[str] = []
        self._quote = ""

    def find_end(self, text: str) -> int | None:
        while self.at < len(text):
            if self._quote:
                if not self._pass_string(text):
                    return None
                continue
            opened = next((q for q in self._quotes if text.startswith(q, self.at)), None)
            if opened is not None:
                self._quote = opened
                self.at = self.at + len(opened)
                continue
            if any(q.startswith(text[self.at :]) for q in self._quotes):
                return None
            character = text[self.at]
            if not self._stack and character in (",", self._end):
                return self.at
            if character in _PAIRS:
                self._stack.append(_PAIRS[character])
            elif self._stack and character == self._stack[-1]:
                self._stack.pop()
            self.at += 1
        return None

    def _pass_string(self, text: str) -> bool:
        """Move behind the string's end. False if the end has not come yet."""
        while True:
            at = text.find(self._quote, self.at)
            slash = text.find("\\", self.at) if self._escapes else -1
            if slash >= 0 and (at < 0 or slash < at):
                if slash + 1 >= len(text):
                    return False
                self.at = slash + 2
                continue
            if at < 0:
                self.at = max(self.at, len(text) - len(self._quote) + 1)
                return False
            behind = text[at + len(self._quote) :].lstrip(_SPACE)
            if self._escapes and not behind:
                return False
            self.at = at + len(self._quote)
            # Some templates write strings without escapes: `'it's'`.
            if not self._escapes or behind[0] in ",:)]}":
                self._quote = ""
                return True
