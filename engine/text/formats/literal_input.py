"""Arguments as `key=value` or `key:value`, with values in Python's or in Gemma's notation."""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.text.formats.argument_stream import ArgumentStream
from engine.text.formats.argument_types import ArgumentTypes, type_of, value_of
from engine.text.formats.patterns import SPACE, Either, Match, Word, match

_SPACES = " \t\n\r"
_PAIRS = {"{": "}", "[": "]", "(": ")"}
_MAX_DEPTH = 100
_MAX_LITERAL = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralSyntax:
    """`assign` stands between key and value, `end` behind the last argument.

    `quote` is the text around strings, which then know no escapes; empty: Python's literals.
    """

    assign: str
    end: str
    quote: str = ""


class LiteralInput(ArgumentStream):
    """Each argument is told when it is whole."""

    def __init__(
        self, new_id: Callable[[], str], name: str, syntax: LiteralSyntax, types: ArgumentTypes
    ) -> None:
        super().__init__(new_id, name)
        self._syntax = syntax
        self._types = types
        self._key: str | None = None
        self._scan = _new_scan(syntax)
        self._num_scanned = 0

    def _step(self, said: list[str]) -> bool:
        return self._read_key(said) if self._key is None else self._read_value(said)

    def _read_key(self, said: list[str]) -> bool:
        text = self._held.lstrip(_SPACES)
        if self._keys and text.startswith(","):
            text = text[1:].lstrip(_SPACES)
        if text.startswith(self._syntax.end):
            self._close(text[len(self._syntax.end) :], said)
            return False
        quote = self._syntax.quote
        named = (Word("key", r"[^\s=:,(){}\[\]<>\"']"), SPACE, Either((self._syntax.assign,)))
        outcomes = [match(named, text)]
        if quote:
            quoted = (quote, Word("key", r"[^\s=:,(){}\[\]<>]"), quote, SPACE, self._syntax.assign)
            outcomes.append(match(quoted, text))
        found = next((o for o in outcomes if isinstance(o, Match)), None)
        if found is not None:
            self._key, self._held = found.words["key"], text[found.end :].lstrip(_SPACES)
            self._scan, self._num_scanned = _new_scan(self._syntax), 0
            return True
        if text and "partial" not in outcomes:
            self._break()
        return False

    def _read_value(self, said: list[str]) -> bool:
        assert self._key is not None
        if not self._num_scanned:
            self._held = self._held.lstrip(_SPACES)
        end = self._scan.find_end(self._held)
        self._num_scanned = len(self._held)
        if end is None:
            return False
        written, self._held = self._held[:end].rstrip(_SPACES), self._held[end:]
        types = self._types.of(self._key)
        self._begin_argument(self._key, said)
        self._say_value(_fit(_read(written, self._syntax), types), said)
        self._key = None
        return True


class _Scan:
    """Finds where a value ends: at a comma or the closing character, outside of all brackets."""

    def __init__(self, end: str, quotes: tuple[str, ...], *, escapes: bool) -> None:
        self._end = end
        self._quotes = quotes
        self._escapes = escapes
        self._at = 0
        self._stack: list[str] = []
        self._quote = ""

    def find_end(self, text: str) -> int | None:
        while self._at < len(text):
            if self._quote:
                if not self._pass_string(text):
                    return None
                continue
            opened = next((q for q in self._quotes if text.startswith(q, self._at)), None)
            if opened is not None:
                self._quote, self._at = opened, self._at + len(opened)
                continue
            left = len(text) - self._at
            if any(left < len(q) and q.startswith(text[self._at :]) for q in self._quotes):
                return None
            character = text[self._at]
            if not self._stack and character in (",", self._end):
                return self._at
            if character in _PAIRS:
                self._stack.append(_PAIRS[character])
            elif self._stack and character == self._stack[-1]:
                self._stack.pop()
            self._at += 1
        return None

    def _pass_string(self, text: str) -> bool:
        """To behind the string; False where its end is not there yet."""
        while True:
            at = text.find(self._quote, self._at)
            slash = text.find("\\", self._at) if self._escapes else -1
            if slash >= 0 and (at < 0 or slash < at):
                if slash + 1 >= len(text):
                    return False
                self._at = slash + 2
                continue
            if at < 0:
                self._at = max(self._at, len(text) - len(self._quote) + 1)
                return False
            behind = text[at + len(self._quote) :].lstrip(_SPACES)
            if self._escapes and not behind:
                return False
            self._at = at + len(self._quote)
            # Some templates write strings without escapes: `'it's'`.
            if not self._escapes or behind[0] in ",:)]}":
                self._quote = ""
                return True


def _new_scan(syntax: LiteralSyntax) -> _Scan:
    if syntax.quote:
        return _Scan(syntax.end, (syntax.quote,), escapes=False)
    return _Scan(syntax.end, ('"', "'"), escapes=True)


def _read(written: str, syntax: LiteralSyntax) -> Any:
    if len(written) > _MAX_LITERAL:
        return written
    return _read_quoted(written, syntax.quote) if syntax.quote else _read_python(written)


def _read_python(written: str) -> Any:
    """A literal of Python or JSON; what is neither is a string as it stands."""
    for read in (ast.literal_eval, json.loads):
        try:
            value = read(written)
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return list(value) if isinstance(value, tuple) else value
    if len(written) > 1 and written[0] == written[-1] and written[0] in "\"'":
        return written[1:-1]
    return written


def _read_quoted(written: str, quote: str) -> Any:
    """Gemma's notation: strings between `quote`, keys with or without."""
    try:
        value, end = _Quoted(written, quote).value(0, 0)
    except (ValueError, IndexError):
        return written
    return value if not written[end:].strip() else written


class _Quoted:
    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        if depth > _MAX_DEPTH:
            raise ValueError("too deep")
        at = self._space(at)
        if self._text.startswith(self._quote, at):
            begin = at + len(self._quote)
            end = self._text.index(self._quote, begin)
            return self._text[begin:end], end + len(self._quote)
        if self._text[at] == "[":
            return self._list(at + 1, depth)
        if self._text[at] == "{":
            return self._object(at + 1, depth)
        found = re.compile(r"[^,\[\]{}]*").match(self._text, at)
        assert found is not None
        return value_of(found.group().strip(), _ANY), found.end()

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        at = self._space(at)
        while self._text[at] != "]":
            value, at = self.value(at, depth + 1)
            values.append(value)
            at = self._comma(at)
        return values, at + 1

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        at = self._space(at)
        while self._text[at] != "}":
            if self._text.startswith(self._quote, at):
                begin = at + len(self._quote)
                end = self._text.index(self._quote, begin)
                key, colon = self._text[begin:end], self._text.index(":", end)
            else:
                colon = self._text.index(":", at)
                key = self._text[at:colon].strip()
            values[key], at = self.value(colon + 1, depth + 1)
            at = self._comma(at)
        return values, at + 1

    def _comma(self, at: int) -> int:
        at = self._space(at)
        return self._space(at + 1) if self._text[at] == "," else at

    def _space(self, at: int) -> int:
        while at < len(self._text) and self._text[at] in _SPACES:
            at += 1
        return at


_ANY = frozenset({"integer", "number", "boolean", "null", "string"})


def _fit(value: Any, types: frozenset[str]) -> Any:
    """A string where the schema has no strings is what it spells; some templates quote all."""
    if isinstance(value, str) and "string" not in types:
        return value_of(value, types)
    if not isinstance(value, str) and types == {"string"}:
        return json.dumps(value, ensure_ascii=False) if type_of(value) != "null" else value
    return value
