"""Calls whose markup is data: what opens and closes them, and each call's head and tail."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.protocol import Delta, Tool
from engine.text.formats.argument_types import ArgumentTypes
from engine.text.formats.call_stream import CallInput, CallObject, CallStream
from engine.text.formats.literal_input import LiteralInput, LiteralSyntax
from engine.text.formats.patterns import (
    SPACE,
    Match,
    Pattern,
    Space,
    first_literal,
    match,
)
from engine.text.formats.tagged_input import TaggedInput, TagSyntax

_JSON_HEAD: Pattern = ("{",)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The markup of a turn's calls, in the order in which it is written.

    `opens` and `closes` surround all calls, `head` and `tail` each one's input, `separator` is
    between calls. Where the head has no name, the call is a JSON object with name and input.
    `arguments` None: the input is JSON. `knows_names`: only the request's tools can be called,
    since the markup alone tells no call from text. `is_opened`: no call comes without `opens`.
    """

    opens: Pattern = ()
    head: Pattern = ()
    tail: Pattern = ()
    separator: Space = SPACE
    closes: Pattern = ()
    arguments: TagSyntax | LiteralSyntax | None = None
    knows_names: bool = False
    is_opened: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        """What a turn's first call may begin with. Some models leave out what surrounds calls."""
        parts = (self.opens,) if self.is_opened else (self.opens, self.head)
        found = [part[0] for part in parts if part]
        return tuple(dict.fromkeys(text for text in found if isinstance(text, str)))


class SyntaxCalls(CallStream):
    """A `FormatParser` for one `CallSyntax`."""

    def __init__(
        self, syntax: CallSyntax, new_id: Callable[[], str], tools: Sequence[Tool]
    ) -> None:
        super().__init__(new_id, [tool.name for tool in tools])
        self._syntax = syntax
        self.starts = syntax.starts
        self._tools = {tool.name: tool for tool in tools}
        self._is_bare = False

    def _after_marker(self, deltas: list[Delta]) -> bool:
        opens = self._syntax.opens
        self._is_bare = bool(opens) and self._start != first_literal(opens)
        if self._is_bare or not opens:
            return self._read_first_head(deltas)
        outcome = match(opens, self._start + self._held)
        if outcome == "partial":
            return False
        if not isinstance(outcome, Match):
            return self._give_up(deltas)
        self._take(outcome.end - len(self._start))
        self._step = self._read_head
        return True

    def _read_first_head(self, deltas: list[Delta]) -> bool:
        """A head whose beginning was what the calls were found by."""
        return self._read_call(match(self._syntax.head, self._start + self._held), deltas)

    def _read_head(self, deltas: list[Delta]) -> bool:
        self._start = ""
        self._skip(" \t\n\r")
        head = self._syntax.head or _JSON_HEAD
        outcome = match(head, self._held)
        if not self._syntax.head and isinstance(outcome, Match):
            outcome = Match(0)
        return self._read_call(outcome, deltas)

    def _read_call(self, outcome: object, deltas: list[Delta]) -> bool:
        if outcome == "partial":
            return False
        if not isinstance(outcome, Match):
            return self._give_up(deltas)
        name = outcome.words.get("name")
        is_known = name is None or name in self._tool_names
        if (self._is_bare or self._syntax.knows_names) and not is_known:
            return self._give_up(deltas)
        self._take(outcome.end - len(self._start))
        return self._begin(self._new_input(name))

    def _new_input(self, name: str | None) -> CallInput:
        arguments = self._syntax.arguments
        if name is None:
            needs_name = self._syntax.knows_names
            accepts = self._tool_names.__contains__ if needs_name else None
            return CallObject(self._new_id, accepts=accepts)
        types = ArgumentTypes(self._tools.get(name))
        match arguments:
            case None:
                return CallObject(self._new_id, name=name)
            case TagSyntax():
                return TaggedInput(self._new_id, name, arguments, types)
            case LiteralSyntax():
                return LiteralInput(self._new_id, name, arguments, types)

    def _after_object(self, deltas: list[Delta]) -> bool:
        if self._syntax.tail:
            outcome = match((SPACE, *self._syntax.tail), self._held)
            if outcome == "partial":
                return False
            if isinstance(outcome, Match):
                self._held = self._held[outcome.end :]
        self._step = self._read_between
        return True

    def _read_between(self, deltas: list[Delta]) -> bool:
        head = self._syntax.head or _JSON_HEAD
        closes = (SPACE, *self._syntax.closes)
        behind = match(closes, self._held) if self._syntax.closes else "none"
        if isinstance(behind, Match):
            self._held = self._held[behind.end :]
            self._step = self._read_text
            return True
        is_list = bool(self._syntax.opens)
        another = match((self._syntax.separator, *head), self._held) if is_list else "none"
        if isinstance(another, Match):
            start = match((self._syntax.separator,), self._held)
            assert isinstance(start, Match)
            self._skipped, self._held = self._held[: start.end], self._held[start.end :]
            self._step = self._read_head
            return True
        if "partial" in (behind, another):
            return False
        self._step = self._read_text
        return True

    def _take(self, count: int) -> None:
        self._skipped += self._held[:count]
        self._held = self._held[count:]

    def _is_text(self, left: str) -> bool:
        """Markup behind a call that the end cut off is no text."""
        is_behind = self._step in (self._after_object, self._read_between)
        return super()._is_text(left) and not (is_behind and self.num_calls)
