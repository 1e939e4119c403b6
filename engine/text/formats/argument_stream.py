"""A call's input that a format writes argument by argument, told as JSON while it comes.

A subclass reads the format's text and says when an argument begins, goes on and ends.
"""

import json
from collections.abc import Callable
from typing import Any

from engine.protocol import Delta, ToolInputDelta, ToolUseStart


class ArgumentStream:
    """One call whose name is known, fed from the beginning of its input on.

    `has_input`: the input is whole. Once `is_over`, `rest` is the text behind it, or, `is_broken`,
    what was no argument; the call then stays incomplete, as at the end of a generation.
    """

    def __init__(self, new_id: Callable[[], str], name: str) -> None:
        self.is_started = self.has_input = self.is_over = self.is_broken = False
        self.rest = ""
        self._new_id = new_id
        self._name = name
        self._held = ""
        self._keys: set[str] = set()
        self._is_said = True

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        if not self.is_started:
            self.is_started = True
            deltas.append(ToolUseStart(self._new_id(), self._name))
        said: list[str] = []
        while not self.is_over and self._step(said):
            pass
        written = "".join(said)
        if written:
            deltas.append(ToolInputDelta(written))
        return deltas

    def end(self) -> list[Delta]:
        """The model ended its turn: an input whose last argument is whole is whole."""
        return []

    def unsaid(self) -> str:
        """What was fed and never told. Once a call is begun it is no text any more."""
        return ""

    def _step(self, said: list[str]) -> bool:
        """Read something of `_held`; False where more text is needed."""
        raise NotImplementedError

    def _begin_argument(self, key: str, said: list[str]) -> None:
        """Of an argument that comes twice the first one counts."""
        self._is_said = key not in self._keys
        if self._is_said:
            said.append((", " if self._keys else "{") + json.dumps(key, ensure_ascii=False) + ": ")
            self._keys.add(key)

    def _say_value(self, value: Any, said: list[str]) -> None:
        if self._is_said:
            said.append(json.dumps(value, ensure_ascii=False))

    def _say_raw(self, written: str, said: list[str]) -> None:
        if self._is_said:
            said.append(written)

    def _close(self, rest: str, said: list[str]) -> None:
        said.append("}" if self._keys else "{}")
        self.has_input = self.is_over = True
        self.rest, self._held = rest, ""

    def _break(self) -> None:
        self.is_over = self.is_broken = True
        self.rest, self._held = self._held, ""
