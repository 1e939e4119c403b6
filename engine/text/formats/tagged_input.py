"""Arguments between tags: `<parameter=city>Bern</parameter>` and its relatives."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.protocol import Delta, ToolInputDelta
from engine.text.formats.argument_stream import ArgumentStream
from engine.text.formats.argument_types import ALL_TYPES, ArgumentTypes, value_of
from engine.text.formats.element_values import value_of_elements
from engine.text.formats.patterns import SPACE, Match, Pattern, match
from engine.text.formats.stops import overlap

_STRING = frozenset({"string"})
_SPACES = " \t\n\r"
_CDATA, _CDATA_END = "<![CDATA[", "]]>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TagSyntax:
    """`open` captures `key`, and `kind` where the tag tells the type; `end` ends the call.

    `has_lines`: a value stands on lines of its own, between one line break and another that are
    not part of it. `others` may follow an argument as well where a model leaves `end` out. `kinds`
    are the words for each JSON type. `has_cdata`: a string may stand in `<![CDATA[…]]>`. `written`
    is `open` as the template writes it, with the places `{key}` and `{kind}`, where that is known.
    `close` may have the place `{key}`. `elements` is the prefix of tags inside of values, where
    lists and objects are elements.
    """

    open: Pattern
    close: str
    end: str
    others: tuple[str, ...] = ()
    has_lines: bool = False
    kinds: Mapping[str, str] = field(default_factory=dict)
    has_cdata: bool = False
    written: str = ""
    elements: str = ""

    def close_of(self, key: str) -> str:
        return self.close.replace("{key}", key)


class TaggedInput(ArgumentStream):
    """A string streams as it comes, everything else when its closing tag is there.

    A value may contain the closing tag's text: only what is followed by another argument or the
    end of the call closes it.
    """

    def __init__(
        self, new_id: Callable[[], str], name: str, syntax: TagSyntax, types: ArgumentTypes
    ) -> None:
        super().__init__(new_id, name)
        self._syntax = syntax
        self._types = types
        self._wanted: frozenset[str] = ALL_TYPES
        self._is_in_value = self._is_at_begin = False
        self._key = self._value_close = ""
        # Of what is held in a value, how much was looked at and is no closing tag.
        self._passed = 0

    def end(self) -> list[Delta]:
        said: list[str] = []
        if self.is_over:
            return []
        if self._is_in_value:
            body = self._held.rstrip(_SPACES)
            if not body.endswith(self._value_close):
                return []
            self._finish_value(body[: -len(self._value_close)], said)
        elif self._held.strip():
            return []
        self._close("", said)
        return [ToolInputDelta("".join(said))]

    def _step(self, said: list[str]) -> bool:
        return self._read_value(said) if self._is_in_value else self._read_tag(said)

    def _read_tag(self, said: list[str]) -> bool:
        found = match((SPACE, *self._syntax.open), self._held)
        ends = [match((SPACE, text), self._held) for text in self._ends()]
        if isinstance(found, Match):
            key = found.words["key"].strip()
            self._key = key
            self._begin_argument(key, said)
            self._held = self._held[found.end :]
            self._wanted = self._types.of(key)
            if "kind" in found.words:
                word = found.words["kind"]
                told = (kind for kind, its in self._syntax.kinds.items() if its == word)
                self._wanted = frozenset(told) or ALL_TYPES
            self._is_in_value = self._is_at_begin = True
            self._passed = 0
            if self._wanted == _STRING:
                self._say_raw('"', said)
            return True
        if isinstance(ends[0], Match):
            self._close(self._held[ends[0].end :], said)
        elif any(isinstance(other, Match) for other in ends):
            self._close(self._held, said)
        elif found == "none" and "partial" not in ends:
            self._break()
        return False

    def _read_value(self, said: list[str]) -> bool:
        if self._is_at_begin and self._syntax.has_lines:
            if not self._held:
                return False
            self._held = self._held.removeprefix("\n")
        if self._is_at_begin and not self._read_value_begin():
            return False
        self._is_at_begin = False
        at = self._held.find(self._value_close, self._passed)
        if at < 0:
            self._stream(len(self._held) - self._num_kept(), said)
            return False
        follows = self._follows(self._held[at + len(self._value_close) :])
        if follows == "none":
            self._passed = at + 1
            return True
        if follows == "partial":
            self._stream(at - self._is_after_line(at), said)
            return False
        value, self._held = self._held[:at], self._held[at + len(self._value_close) :]
        self._finish_value(value, said)
        return True

    def _read_value_begin(self) -> bool:
        """What a value stands in beside its tags; False where more text is needed to tell."""
        self._value_close = self._syntax.close_of(self._key)
        if not self._syntax.has_cdata or not _CDATA.startswith(self._held[: len(_CDATA)]):
            return True
        if len(self._held) < len(_CDATA):
            return False
        self._held = self._held[len(_CDATA) :]
        self._value_close = _CDATA_END + self._value_close
        return True

    def _finish_value(self, value: str, said: list[str]) -> None:
        if self._syntax.has_lines:
            value = value.removesuffix("\n")
        if self._wanted == _STRING:
            self._say_raw(_escaped(value) + '"', said)
        elif self._syntax.elements:
            schema, root = self._types.schema_of(self._key)
            self._say_value(value_of_elements(value, self._syntax.elements, schema, root), said)
        else:
            self._say_value(value_of(value, self._wanted), said)
        self._is_in_value = False

    def _stream(self, end: int, said: list[str]) -> None:
        """Tell a string's characters up to `end`."""
        if self._wanted != _STRING or end <= 0:
            return
        self._say_raw(_escaped(self._held[:end]), said)
        self._held = self._held[end:]
        self._passed = max(0, self._passed - end)

    def _is_after_line(self, at: int) -> bool:
        return self._syntax.has_lines and self._held[:at].endswith("\n")

    def _num_kept(self) -> int:
        """How many characters at the end may belong to what closes the value."""
        close = self._value_close
        kept = overlap(self._held, close)
        return max(kept, overlap(self._held, "\n" + close)) if self._syntax.has_lines else kept

    def _follows(self, text: str) -> str:
        """Does what stands behind a closing tag go on like a call? `match`, `partial` or `none`."""
        outcomes = [match((SPACE, *self._syntax.open), text)]
        outcomes += [match((SPACE, end), text) for end in self._ends()]
        if any(isinstance(outcome, Match) for outcome in outcomes):
            return "match"
        return "partial" if "partial" in outcomes else "none"

    def _ends(self) -> tuple[str, ...]:
        return (self._syntax.end, *self._syntax.others)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
