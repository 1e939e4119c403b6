"""Tool calls out of a model's text, as they stream; one class per format.

A format is chosen from the model's chat template (`find_tool_format`). Text that turns out not to
be a call is passed on as text: nothing is lost.
"""

import json
import re
import secrets
from collections.abc import Callable
from enum import Enum, auto
from string import ascii_letters, digits
from typing import Protocol

from engine.prompt.json_stream import JsonObjectStream
from engine.prompt.stops import overlap
from engine.protocol import Delta, TextDelta, ToolInputDelta, ToolUseStart

_ID_ALPHABET = digits + ascii_letters
_ID_LENGTH = 24


class FormatParser(Protocol):
    """Text of one choice in, typed deltas out. `num_calls` counts calls whose input is whole."""

    num_calls: int

    def feed(self, text: str) -> list[Delta]: ...

    def close(self) -> list[Delta]: ...


class PlainText:
    """No tools: text is text."""

    num_calls = 0

    def feed(self, text: str) -> list[Delta]:
        return [TextDelta(text)] if text else []

    def close(self) -> list[Delta]:
        return []


class _State(Enum):
    TEXT = auto()
    HEADER = auto()
    INPUT = auto()
    TAIL = auto()


class HermesCalls:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen models write.

    White space around calls is dropped. Once a call has been opened its input streams; should it
    stop being JSON, what follows is text, and the call's input stays incomplete, as when a
    generation ends in the middle of one.
    """

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"
    MARKERS = frozenset({OPEN, CLOSE})
    _HEADER = re.compile(
        r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
    )
    _TAIL = re.compile(r"\s*\}\s*" + CLOSE)

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.num_calls = 0
        self._new_id = new_id
        self._state = _State.TEXT
        self._held = ""
        self._gap = ""
        self._input = JsonObjectStream()

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        steps = {
            _State.TEXT: self._read_text,
            _State.HEADER: self._read_header,
            _State.INPUT: self._read_input,
            _State.TAIL: self._read_tail,
        }
        # A step returns True when it moved on and the next one may find something to do.
        while steps[self._state](deltas):
            pass
        return deltas

    def close(self) -> list[Delta]:
        held, gap = self._held, self._gap
        state, self._state = self._state, _State.TEXT
        self._held = self._gap = ""
        deltas: list[Delta] = []
        if state is _State.HEADER and self._read_whole(held, deltas):
            return deltas
        if state is _State.HEADER:
            return _texts(gap + self.OPEN + held)
        if state is _State.TEXT and (held.strip() or not self.num_calls):
            return _texts(held)
        return deltas

    def _read_text(self, deltas: list[Delta]) -> bool:
        at = self._held.find(self.OPEN)
        if at >= 0:
            before = self._held[:at]
            self._held = self._held[at + len(self.OPEN) :]
            body = before.rstrip()
            self._gap = before[len(body) :]
            deltas += _texts(body)
            self._state = _State.HEADER
            return True
        body = self._held[: len(self._held) - overlap(self._held, self.OPEN)].rstrip()
        self._held = self._held[len(body) :]
        deltas += _texts(body)
        return False

    def _read_header(self, deltas: list[Delta]) -> bool:
        match = self._HEADER.match(self._held)
        if match is not None:
            name = _string(match.group(1))
            if name is not None:
                deltas.append(ToolUseStart(self._new_id(), name))
                self._held = self._held[match.end() :]
                self._input = JsonObjectStream()
                self._state = _State.INPUT
                return True
        at = self._held.find(self.CLOSE)
        if at >= 0:
            body, rest = self._held[:at], self._held[at + len(self.CLOSE) :]
            if not self._read_whole(body, deltas):
                deltas += _texts(self._gap + self.OPEN + body + self.CLOSE)
            self._held, self._state = rest, _State.TEXT
            return True
        begin = self._held.lstrip()
        if begin and not begin.startswith("{"):
            # Passed on at once, the opening tag too, so that it is not found again.
            deltas += _texts(self._gap + self.OPEN)
            self._state = _State.TEXT
            return True
        return False

    def _read_whole(self, body: str, deltas: list[Delta]) -> bool:
        """A call that was held back as a whole: other key order, or no arguments."""
        try:
            call = json.loads(body, strict=False)
        except ValueError:
            return False
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return False
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, dict):
            return False
        deltas.append(ToolUseStart(self._new_id(), call["name"]))
        deltas.append(ToolInputDelta(json.dumps(arguments, ensure_ascii=False)))
        self.num_calls += 1
        return True

    def _read_input(self, deltas: list[Delta]) -> bool:
        partial = self._input.feed(self._held)
        self._held = self._input.rest
        if partial:
            deltas.append(ToolInputDelta(partial))
        if self._input.is_complete:
            self.num_calls += 1
            self._state = _State.TAIL
        elif self._input.is_broken:
            self._state = _State.TEXT
        return self._state is not _State.INPUT

    def _read_tail(self, deltas: list[Delta]) -> bool:
        match = self._TAIL.match(self._held)
        if match is not None:
            self._held, self._state = self._held[match.end() :], _State.TEXT
            return True
        squeezed = "".join(self._held.split())
        if ("}" + self.CLOSE).startswith(squeezed):
            return False
        self._state = _State.TEXT
        return True


TOOL_FORMATS: dict[str, type[HermesCalls]] = {"hermes": HermesCalls}


def find_tool_format(template_source: str) -> str | None:
    """The format that a chat template shows its model, None where it is not one of ours."""
    if HermesCalls.OPEN in template_source and "arguments" in template_source:
        return "hermes"
    return None


def new_tool_use_id() -> str:
    """`toolu_` and 24 random characters of base 62."""
    return "toolu_" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))


def _texts(text: str) -> list[Delta]:
    return [TextDelta(text)] if text else []


def _string(text: str) -> str | None:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
