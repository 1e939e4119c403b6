"""Tool calls as they stream, whatever the format: text up to a marker, JSON objects behind it.

Nothing is lost: what turns out to be no call is passed on as text, and however the text is cut into
pieces, the blocks are the same.
"""

import json
import re
from collections.abc import Callable, Collection
from typing import Any, Protocol

from engine.protocol import Delta, TextDelta, ToolInputDelta, ToolUseStart
from engine.text.formats.json_stream import JsonObjectStream
from engine.text.formats.stops import is_begun_markup, overlap

_STRING = r'"(?:[^"\\]|\\.)*"'
_NAME_KEYS = ("name", "tool_name")
_INPUT_KEYS = ("arguments", "parameters")
_ID_KEYS = "type|id|tool_call_id"
_HEADER = re.compile(
    rf'\{{\s*(?:"(?:{_ID_KEYS})"\s*:\s*{_STRING}\s*,\s*)*"(?:{"|".join(_NAME_KEYS)})"\s*:'
    rf'\s*({_STRING})\s*,\s*"(?:{"|".join(_INPUT_KEYS)})"\s*:\s*(?=\{{)'
)


class FormatParser(Protocol):
    """Text of one choice in, typed deltas out. `num_calls` counts calls whose input is whole."""

    @property
    def num_calls(self) -> int: ...

    @property
    def is_thinking(self) -> bool: ...

    def feed(self, text: str) -> list[Delta]: ...

    def close(self, *, is_cut: bool = False) -> list[Delta]:
        """What was held back. `is_cut`: something else than the model ended the generation."""
        ...


class CallInput(Protocol):
    """The part of one call that a `CallStream` hands on; see `CallObject`."""

    is_started: bool
    has_input: bool
    is_over: bool
    is_broken: bool
    rest: str

    def feed(self, text: str) -> list[Delta]: ...

    def end(self) -> list[Delta]: ...

    def unsaid(self) -> str: ...


class CallObject:
    """One call, `{"name": …, "arguments" or "parameters": {…}, …}`, fed from its brace on.

    With a `name` the object fed is the input itself. Where the name comes before the input, the
    input streams; any other order is held back until the object ends. Once `is_over`, `rest` is
    the text behind the call, or, `is_broken`, what was no call: all of it unless `is_started`.
    A call whose input stops being JSON stays incomplete, as at the end of a generation.
    """

    def __init__(
        self,
        new_id: Callable[[], str],
        *,
        name: str | None = None,
        accepts: Callable[[str], bool] | None = None,
    ) -> None:
        self.is_started = self.has_input = self.is_over = self.is_broken = False
        self.rest = ""
        self._new_id = new_id
        self._name = name
        self._accepts = accepts
        self._held = ""
        self._corrected = ""
        self._whole = JsonObjectStream()
        self._input = JsonObjectStream()
        self._tail = JsonObjectStream()

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        if self._name is not None and not self.is_started:
            # White space behind the head may have come with the head or in a piece of its own.
            text = text.lstrip()
            if not text:
                return deltas
        if not self.is_started:
            text = self._read_header(text, deltas)
        if self.is_started and not self.has_input and not self.is_over:
            text = self._read_input(text, deltas)
        if self.has_input and not self.is_over:
            self._read_tail(text)
        return deltas

    def end(self) -> list[Delta]:
        """The model ended its turn; an input that is not whole stays so."""
        return []

    def unsaid(self) -> str:
        """What was fed and never told, for a generation that ends here."""
        return "" if self.is_started else self._held

    def _read_header(self, text: str, deltas: list[Delta]) -> str:
        if self._name is not None:
            self._start(self._name, deltas)
            return text
        self._held += text
        match = _HEADER.match(self._held)
        name = None if match is None else _string(match.group(1))
        if match is not None and name is not None:
            if self._accepts is not None and not self._accepts(name):
                self._break(self._held)
                return ""
            self._start(name, deltas)
            return self._held[match.end() :]
        self._corrected += self._whole.feed(text)
        if self._whole.is_broken:
            self._break(self._held)
        elif self._whole.is_complete:
            self._read_whole(deltas)
        return ""

    def _read_whole(self, deltas: list[Delta]) -> None:
        """A call that was held back: another order of keys, or no arguments."""
        call = json.loads(self._corrected)
        name: Any = next((call[key] for key in _NAME_KEYS if key in call), None)
        arguments: Any = next((call[key] for key in _INPUT_KEYS if key in call), {})
        is_call = isinstance(name, str) and isinstance(arguments, dict)
        if not is_call or (self._accepts is not None and not self._accepts(name)):
            self._break(self._held)
            return
        self._start(name, deltas)
        deltas.append(ToolInputDelta(json.dumps(arguments, ensure_ascii=False)))
        self.has_input = self.is_over = True
        self.rest = self._whole.rest

    def _read_input(self, text: str, deltas: list[Delta]) -> str:
        partial = self._input.feed(text)
        if partial:
            deltas.append(ToolInputDelta(partial))
        if self._input.is_broken:
            self._break(self._input.rest)
        elif self._input.is_complete:
            self.has_input = True
            # What comes behind the input must go on like an object that begins with it.
            self._held = ""
            self._tail.feed('{"":{}')
            if self._name is not None:
                self.is_over, self.rest = True, self._input.rest
            return self._input.rest
        return ""

    def _read_tail(self, text: str) -> None:
        self._held += text
        self._tail.feed(text)
        if self._tail.is_broken:
            self._break(self._held)
        elif self._tail.is_complete:
            self.is_over, self.rest = True, self._tail.rest

    def _start(self, name: str, deltas: list[Delta]) -> None:
        self.is_started = True
        deltas.append(ToolUseStart(self._new_id(), name))

    def _break(self, rest: str) -> None:
        self.is_over = self.is_broken = True
        self.rest = rest


class CallStream:
    """A `FormatParser` for calls behind a marker; a subclass says what follows the marker.

    White space around calls is dropped. `tool_names` are the tools of the request.
    """

    is_thinking = False
    starts: tuple[str, ...]
    """The texts that calls begin with."""

    def __init__(self, new_id: Callable[[], str], tool_names: Collection[str]) -> None:
        self.num_calls = 0
        self._new_id = new_id
        self._tool_names = frozenset(tool_names)
        self._held = ""
        # Read already, and text after all if no call follows.
        self._skipped = ""
        self._start = ""
        self._object: CallInput = CallObject(new_id)
        # A step returns True when it moved on and the next one may find something to do.
        self._step: Callable[[list[Delta]], bool] = self._read_text

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        return deltas

    def close(self, *, is_cut: bool = False) -> list[Delta]:
        """A call that was cut off before its name is known is neither a call nor text."""
        deltas: list[Delta] = []
        left = self._held
        if self._step == self._read_object:
            left = self._object.unsaid()
            if not is_cut and not self._object.has_input:
                deltas += self._object.end()
                self.num_calls += self._object.has_input
        is_in_call = self._step != self._read_text
        left = self._skipped + left
        is_text = self._is_text(left) and not (is_cut and (is_in_call or is_begun_markup(left)))
        self._held = self._skipped = ""
        self._step = self._read_text
        return [*deltas, *texts(left)] if is_text else deltas

    def _is_text(self, left: str) -> bool:
        """Is what is left at the end more than what surrounds calls?"""
        return bool(left.strip()) or not self.num_calls

    def _after_marker(self, deltas: list[Delta]) -> bool:
        raise NotImplementedError

    def _after_object(self, deltas: list[Delta]) -> bool:
        """Behind a call; where nothing is left to read of it, text follows."""
        raise NotImplementedError

    def _read_text(self, deltas: list[Delta]) -> bool:
        found = [(at, s) for s in self.starts if (at := self._held.find(s)) >= 0]
        if found:
            at, self._start = min(found)
            body = self._held[:at].rstrip()
            deltas += texts(body)
            self._skipped = self._held[len(body) : at + len(self._start)]
            self._held = self._held[at + len(self._start) :]
            self._step = self._after_marker
            return True
        num_kept = max(overlap(self._held, start) for start in self.starts)
        body = self._held[: len(self._held) - num_kept].rstrip()
        self._held = self._held[len(body) :]
        deltas += texts(body)
        return False

    def _read_object(self, deltas: list[Delta]) -> bool:
        had_input = self._object.has_input
        deltas += self._object.feed(self._held)
        self._held = ""
        self.num_calls += self._object.has_input and not had_input
        if self._object.is_started:
            self._skipped = ""
        if not self._object.is_over:
            return False
        self._held = self._object.rest
        if self._object.is_broken:
            return self._give_up(deltas)
        self._step = self._after_object
        return True

    def _begin(self, call: CallInput) -> bool:
        self._object = call
        self._step = self._read_object
        return True

    def _skip(self, characters: str) -> None:
        """Move these characters' run from the front of what is held to what was skipped."""
        rest = self._held.lstrip(characters)
        self._skipped += self._held[: len(self._held) - len(rest)]
        self._held = rest

    def _give_up(self, deltas: list[Delta]) -> bool:
        """No call: what was skipped is text (told at once, so that no marker is found again)."""
        deltas += texts(self._skipped)
        self._skipped = ""
        self._step = self._read_text
        return True


def texts(text: str) -> list[Delta]:
    return [TextDelta(text)] if text else []


def _string(text: str) -> str | None:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
