"""Reads tool calls while they stream: text up to a marker, and then calls with markup.

The markup is data (`CallSyntax`). Nothing is lost: markup that turns out to be no call is passed on
as text. The result does not depend on how the text is cut into pieces.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Protocol

from engine.protocol import Delta, TextDelta, Tool, ToolInputDelta, ToolUseStart
from engine.text.formats.arguments import (
    CallStream,
    LiteralInput,
    LiteralSyntax,
    TaggedInput,
    TagSyntax,
)
from engine.text.formats.matching import (
    SPACE,
    Match,
    Maybe,
    Outcome,
    Pattern,
    Space,
    first_literal,
    is_begun_markup,
    literals,
    match,
    overlap,
    places_of,
)

_SPACE = " \t\n\r"
_SCALAR_RUN = re.compile(r"[-0-9tfn][-+.0-9a-zE]*")
_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")
_CLOSING = {"{": "}", "[": "]"}


class JsonObjectStream:
    """Reads one JSON object. The results of `feed` together are valid JSON once it is complete."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        # Once complete, the text behind the object. Once broken, the text from which on it is no
        # JSON.
        self.rest = ""
        self._stack: list[str] = []
        self._expects: Literal["value", "key", "colon", "comma"] = "value"
        # An object or a list was just opened, so it may end here.
        self._may_end = False
        self._is_in_string = False
        self._is_key = False

    def feed(self, text: str) -> str:
        self.rest += text
        fragments: list[str] = []
        at = 0
        while at < len(self.rest) and not self.is_complete:
            step = self._read_string(at) if self._is_in_string else self._read_structure(at)
            if step is None:
                self.is_broken = True
                break
            end, fragment = step
            if end == at:
                break
            fragments.append(fragment)
            at = end
        self.rest = self.rest[at:]
        return "".join(fragments)

    def _read_string(self, at: int) -> tuple[int, str]:
        """The end of the next piece of a string, and the piece. The end is `at` if more text is
        needed."""
        text = self.rest
        plain = _PLAIN.match(text, at)
        if plain is not None:
            return plain.end(), plain.group()
        escape = _ESCAPE.match(text, at)
        if escape is not None:
            return escape.end(), escape.group()
        if text[at] == '"':
            self._is_in_string = False
            self._expects = "colon" if self._is_key else "comma"
            return at + 1, '"'
        if text[at] == "\\":
            return (at, "") if _BEGUN_ESCAPE.fullmatch(text, at) else (at + 1, "\\\\")
        return at + 1, json.dumps(text[at])[1:-1]

    def _read_structure(self, at: int) -> tuple[int, str] | None:
        """The next piece outside of strings, as `_read_string` gives it; None: it is not JSON."""
        char = self.rest[at]
        expects = self._expects
        inside = self._stack[-1] if self._stack else ""
        if char in _SPACE:
            return (at + 1, char) if inside else None
        may_end = self._may_end
        self._may_end = False
        if inside and char == _CLOSING[inside] and (may_end or expects == "comma"):
            self._stack.pop()
            self._expects = "comma"
            self.is_complete = not self._stack
        elif expects == "comma" and char == ",":
            self._expects = "key" if inside == "{" else "value"
        elif expects == "colon" and char == ":":
            self._expects = "value"
        elif expects == "value" and (char == "{" or (inside and char == "[")):
            self._stack.append(char)
            self._expects = "key" if char == "{" else "value"
            self._may_end = True
        elif char == '"' and inside and expects in ("key", "value"):
            self._is_in_string = True
            self._is_key = expects == "key"
        elif expects == "value" and inside and (run := _SCALAR_RUN.match(self.rest, at)):
            # Numbers and words wait until they end. Only then can they be checked.
            if run.end() == len(self.rest):
                self._may_end = may_end
                return at, ""
            ends = self.rest[run.end()] in _SPACE + ",}]" and _SCALAR.fullmatch(run.group())
            if not ends:
                return None
            self._expects = "comma"
            return run.end(), run.group()
        else:
            return None
        return at + 1, char


_STRING = r'"(?:[^"\\]|\\.)*"'
_NAME_KEYS = ("name", "tool_name")
_INPUT_KEYS = ("arguments", "parameters")
_HEADER = re.compile(
    rf'\{{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*{_STRING}\s*,\s*)*"(?:{"|".join(_NAME_KEYS)})"\s*:'
    rf'\s*({_STRING})\s*,\s*"(?:{"|".join(_INPUT_KEYS)})"\s*:\s*(?=\{{)'
)


def texts(text: str) -> list[Delta]:
    return [TextDelta(text)] if text else []


def calls_of(deltas: Iterable[Delta]) -> list[tuple[str, Any]]:
    """The names and inputs of all calls. An input that is not whole is None."""
    written: list[tuple[str, list[str]]] = []
    for delta in deltas:
        if isinstance(delta, ToolUseStart):
            written.append((delta.name, []))
        elif isinstance(delta, ToolInputDelta):
            written[-1][1].append(delta.partial_json)
    return [(name, _json("".join(pieces))) for name, pieces in written]


def _json(text: str, *, strict: bool = True) -> Any:
    try:
        return json.loads(text, strict=strict)
    except ValueError:
        return None


class FormatParser(Protocol):
    """Turns the text of one choice into typed deltas."""

    @property
    def num_calls(self) -> int:
        """The number of calls whose input is whole."""
        ...

    @property
    def is_thinking(self) -> bool: ...

    def feed(self, text: str) -> list[Delta]: ...

    def close(self, *, is_cut: bool = False) -> list[Delta]:
        """The deltas of the text that waited. `is_cut`: the model did not end the generation."""
        ...


class PlainText:
    """A `FormatParser` for a turn without tools. All text is text."""

    num_calls = 0
    is_thinking = False

    def feed(self, text: str) -> list[Delta]:
        return texts(text)

    def close(self, *, is_cut: bool = False) -> list[Delta]:
        return []


class CallObject(CallStream):
    """One call as a JSON object, `{"name": …, "arguments" or "parameters": {…}, …}`.

    It is fed from the brace on. With a `name` the object is the input itself. If the name comes
    before the input, the input streams. With any other order of keys the call waits until the
    object ends. A call whose input stops being JSON stays incomplete, as at the end of a
    generation.
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        accepts: Callable[[str], bool] | None = None,
        written_id: str = "",
    ) -> None:
        super().__init__(written_id)
        self._name = name
        self._accepts = accepts
        self._corrected = ""
        self._whole = JsonObjectStream()
        self._input = JsonObjectStream()
        self._tail = JsonObjectStream()

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        if not self.is_started:
            text = self._read_header(text, deltas)
        if self.is_started and not self.has_input and not self.is_over:
            text = self._read_input(text, deltas)
        if self.has_input and not self.is_over:
            # The text behind the input must continue an object that has the input.
            self._pending += text
            self._tail.feed(text)
            if self._tail.is_broken:
                self._break(self._pending)
            elif self._tail.is_complete:
                self.is_over = True
                self.rest = self._tail.rest
        return deltas

    def _read_header(self, text: str, deltas: list[Delta]) -> str:
        if self._name is not None:
            # White space behind the head may come with the head or in a later piece.
            text = text.lstrip()
            if text:
                deltas.append(self._start(self._name))
            return text
        self._pending += text
        header = _HEADER.match(self._pending)
        name: Any = None if header is None else _json(header.group(1), strict=False)
        if header is not None and isinstance(name, str):
            if self._accepts is None or self._accepts(name):
                deltas.append(self._start(name))
                return self._pending[header.end() :]
            self._break(self._pending)
            return ""
        self._corrected += self._whole.feed(text)
        if self._whole.is_broken:
            self._break(self._pending)
        elif self._whole.is_complete:
            # The keys have another order, or there are no arguments.
            call = json.loads(self._corrected)
            name = next((call[key] for key in _NAME_KEYS if key in call), None)
            call_input: Any = next((call[key] for key in _INPUT_KEYS if key in call), {})
            is_call = isinstance(name, str) and isinstance(call_input, dict)
            if not is_call or (self._accepts is not None and not self._accepts(name)):
                self._break(self._pending)
                return ""
            deltas.append(self._start(name))
            deltas.append(ToolInputDelta(json.dumps(call_input, ensure_ascii=False)))
            self.has_input = True
            self.is_over = True
            self.rest = self._whole.rest
        return ""

    def _read_input(self, text: str, deltas: list[Delta]) -> str:
        partial = self._input.feed(text)
        if partial:
            deltas.append(ToolInputDelta(partial))
        if self._input.is_broken:
            self._break(self._input.rest)
        elif self._input.is_complete:
            self.has_input = True
            self._pending = ""
            self._tail.feed('{"":{}')
            if self._name is not None:
                self.is_over = True
                self.rest = self._input.rest
            return self._input.rest
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The markup of a turn's calls, in the order in which it is written."""

    # The markup before all calls.
    opens: Pattern = ()
    # The markup before a call's input. If it has no name, the call is a JSON object with name and
    # input.
    head: Pattern = ()
    # The markup behind a call's input.
    tail: Pattern = ()
    # The white space between calls.
    separator: Space = SPACE
    # The markup behind all calls.
    closes: Pattern = ()
    # The notation of the input; None: the input is JSON.
    arguments: TagSyntax | LiteralSyntax | None = None
    # Whether a call needs the name of one of the request's tools. With any other name the markup is
    # text.
    knows_names: bool = False
    # Whether calls always have `opens` before them.
    is_opened: bool = False
    # Whether a turn may begin with a call that is an object without any markup.
    begins_turn: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        """The texts that a turn's first call may begin with. Some models leave out `opens`."""
        parts = (self.opens,) if self.is_opened else (self.opens, self.head)
        return tuple(dict.fromkeys(filter(None, map(first_literal, parts))))

    @property
    def markers(self) -> set[str]:
        """The texts of the markup. They may be control tokens."""
        markers = set().union(*map(literals, (self.opens, self.head, self.tail, self.closes)))
        if isinstance(self.arguments, TagSyntax):
            markers |= literals(self.arguments.pattern) | self.arguments.markers
        elif self.arguments is not None and self.arguments.quote:
            markers |= {self.arguments.quote}
        return markers

    def match_call(self, text: str, *, behind: Pattern = ()) -> Outcome:
        """Match a call's head, with `behind` before it. The brace of an object is not taken."""
        is_json = self.arguments is None
        pattern: Pattern = (*behind, SPACE, *self.head)
        if not is_json:
            return match(pattern, text)
        outcome = match((*pattern, SPACE, "{"), text)
        if isinstance(outcome, Match):
            return Match(outcome.end - len("{"), outcome.words)
        return outcome


def starts_of(ways: Sequence[CallSyntax]) -> tuple[str, ...]:
    """The texts that a turn's first call may begin with, in any of these ways of writing."""
    return tuple(dict.fromkeys(chain.from_iterable(way.starts for way in ways)))


class CallParser:
    """A `FormatParser` for calls that may be written in several ways.

    White space around calls is dropped.
    """

    is_thinking = False

    def __init__(self, ways: Sequence[CallSyntax], tools: Sequence[Tool]) -> None:
        self.num_calls = 0
        self._ways = ways
        self._tools = {tool.name: tool for tool in tools}
        self._starts = starts_of(ways)
        self._syntax = ways[0]
        self._pending = ""
        # Markup that was read. It is text after all if no call follows.
        self._skipped = ""
        # The text by which the first call was found.
        self._start = ""
        # The calls lack the markup before all calls.
        self._is_bare = False
        self._call: CallStream = CallObject()
        # A step returns True if it moved on. The next step may then find something to do.
        self._step: Callable[[list[Delta]], bool] = self._read_text
        if any(way.begins_turn for way in ways):
            self._step = self._read_begin

    def feed(self, text: str) -> list[Delta]:
        self._pending += text
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        return deltas

    def close(self, *, is_cut: bool = False) -> list[Delta]:
        """End the text.

        A call that was cut off before its name was known is neither a call nor text.
        """
        deltas: list[Delta] = []
        rest_text = self._pending
        if self._step == self._read_call:
            rest_text = self._call.pending_text()
            if not is_cut and not self._call.has_input:
                deltas += self._call.end()
                self.num_calls += self._call.has_input
        # Markup behind a call is no text, even if the end cut it off.
        is_behind = self._step in (self._read_tail, self._read_between) and self.num_calls > 0
        is_in_call = self._step != self._read_text
        rest_text = self._skipped + rest_text
        is_text = (bool(rest_text.strip()) or not self.num_calls) and not is_behind
        is_text = is_text and not (is_cut and (is_in_call or is_begun_markup(rest_text)))
        self._pending = ""
        self._skipped = ""
        self._step = self._read_text
        return [*deltas, *texts(rest_text)] if is_text else deltas

    def _read_begin(self, deltas: list[Delta]) -> bool:
        begin = self._pending.lstrip()
        if not begin or any(overlap(begin, start) == len(begin) for start in self._starts):
            return False
        starts_bare = [w for w in self._ways if w.begins_turn and not begin.startswith(w.starts)]
        outcomes: list[Outcome] = []
        for way in starts_bare:
            outcome = way.match_call(begin, behind=(Maybe(way.opens),))
            if isinstance(outcome, Match):
                self._syntax = way
                self._is_bare = True
                self._take(len(self._pending) - len(begin) + outcome.end)
                return self._begin(outcome)
            outcomes.append(outcome)
        if "partial" in outcomes:
            return False
        self._step = self._read_text
        return True

    def _read_text(self, deltas: list[Delta]) -> bool:
        places = places_of(self._pending, self._starts)
        if places:
            at, self._start = min(places)
            body = self._pending[:at].rstrip()
            deltas += texts(body)
            self._skipped = self._pending[len(body) : at + len(self._start)]
            self._pending = self._pending[at + len(self._start) :]
            self._step = self._read_first
            return True
        num_kept = max((overlap(self._pending, start) for start in self._starts), default=0)
        body = self._pending[: len(self._pending) - num_kept].rstrip()
        self._pending = self._pending[len(body) :]
        deltas += texts(body)
        return False

    def _read_first(self, deltas: list[Delta]) -> bool:
        """Read the head of the first call. `_start` is its beginning."""
        outcomes: list[Outcome] = []
        for way in self._ways:
            if not any(start.startswith(self._start) for start in way.starts):
                continue
            is_bare = not first_literal(way.opens).startswith(self._start)
            behind = () if is_bare else way.opens
            outcome = way.match_call(self._start + self._pending, behind=behind)
            self._syntax = way
            self._is_bare = is_bare and bool(way.opens)
            if isinstance(outcome, Match) and self._is_call(outcome):
                self._take(outcome.end - len(self._start))
                return self._begin(outcome)
            outcomes.append(outcome)
        return False if "partial" in outcomes else self._give_up(deltas)

    def _read_next(self, deltas: list[Delta]) -> bool:
        outcome = self._syntax.match_call(self._pending)
        if outcome == "partial":
            return False
        if not isinstance(outcome, Match) or not self._is_call(outcome):
            return self._give_up(deltas)
        self._take(outcome.end)
        return self._begin(outcome)

    def _is_call(self, head: Match) -> bool:
        name = head.words.get("name")
        needs_name = self._is_bare or self._syntax.knows_names
        return name is None or not needs_name or name in self._tools

    def _begin(self, head: Match) -> bool:
        name = head.words.get("name")
        arguments = self._syntax.arguments
        written_id = head.words.get("id", "")
        if name is None:
            needs_name = self._is_bare or self._syntax.knows_names
            accepts = self._tools.__contains__ if needs_name else None
            self._call = CallObject(accepts=accepts, written_id=written_id)
        elif arguments is None:
            self._call = CallObject(name=name, written_id=written_id)
        else:
            schema = self._tools[name].input_schema if name in self._tools else {}
            if isinstance(arguments, TagSyntax):
                self._call = TaggedInput(name, schema, arguments, written_id)
            else:
                self._call = LiteralInput(name, schema, arguments, written_id)
        self._step = self._read_call
        return True

    def _read_call(self, deltas: list[Delta]) -> bool:
        call = self._call
        had_input = call.has_input
        deltas += call.feed(self._pending)
        self._pending = ""
        self.num_calls += call.has_input and not had_input
        if call.is_started:
            self._skipped = ""
        if not call.is_over:
            return False
        self._pending = call.rest
        if call.is_broken:
            return self._give_up(deltas)
        self._step = self._read_tail
        return True

    def _read_tail(self, deltas: list[Delta]) -> bool:
        outcome = match((SPACE, *self._syntax.tail), self._pending) if self._syntax.tail else "none"
        if outcome == "partial":
            return False
        if isinstance(outcome, Match):
            self._pending = self._pending[outcome.end :]
        self._step = self._read_between
        return True

    def _read_between(self, deltas: list[Delta]) -> bool:
        """Read what follows a call: the end of all calls, another call, or text."""
        syntax = self._syntax
        closes = match((SPACE, *syntax.closes), self._pending) if syntax.closes else "none"
        if isinstance(closes, Match):
            self._pending = self._pending[closes.end :]
            self._step = self._read_text
            return True
        is_list = bool(syntax.opens)
        another: Outcome = "none"
        if is_list:
            another = syntax.match_call(self._pending, behind=(syntax.separator,))
        if isinstance(another, Match):
            between = match((syntax.separator,), self._pending)
            assert isinstance(between, Match)
            self._skipped = self._pending[: between.end]
            self._pending = self._pending[between.end :]
            self._step = self._read_next
            return True
        if "partial" in (closes, another):
            return False
        self._step = self._read_text
        return True

    def _take(self, count: int) -> None:
        self._skipped += self._pending[:count]
        self._pending = self._pending[count:]

    def _give_up(self, deltas: list[Delta]) -> bool:
        """Pass the skipped part on as text, because there is no call.

        It is passed on at once, so no marker in it is found again.
        """
        deltas += texts(self._skipped)
        self._skipped = ""
        self._step = self._read_text
        return True
