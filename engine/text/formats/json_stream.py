"""A JSON object, checked as it streams.

Two mistakes that models make inside strings are corrected: raw control characters are escaped,
and a backslash that escapes nothing is doubled.
"""

import json
import re
from typing import Literal

_SPACE = " \t\n\r"
_SCALAR_RUN = re.compile(r"[-0-9tfn][-+.0-9a-zE]*")
_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")
_CLOSING = {"{": "}", "[": "]"}


class JsonObjectStream:
    """One object. What `feed` returns adds up to valid JSON once `is_complete`.

    When `is_broken` the text is no JSON from `rest` on; when complete, `rest` is what follows.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        self.rest = ""
        self._stack: list[str] = []
        self._expects: Literal["value", "key", "colon", "comma"] = "value"
        # An object or a list was just opened, so that it may end here.
        self._may_end = False
        self._is_in_string = self._is_key = False

    def feed(self, text: str) -> str:
        self.rest += text
        said: list[str] = []
        at = 0
        while at < len(self.rest) and not self.is_complete:
            step = self._read_string(at) if self._is_in_string else self._read_structure(at)
            if step is None:
                self.is_broken = True
                break
            end, written = step
            if end == at:
                break
            said.append(written)
            at = end
        self.rest = self.rest[at:]
        return "".join(said)

    def _read_string(self, at: int) -> tuple[int, str]:
        """What stands next in a string, and where it ends: at `at` where more text is needed."""
        text = self.rest
        if plain := _PLAIN.match(text, at):
            return plain.end(), plain.group()
        if escape := _ESCAPE.match(text, at):
            return escape.end(), escape.group()
        if text[at] == '"':
            self._is_in_string = False
            self._expects = "colon" if self._is_key else "comma"
            return at + 1, '"'
        if text[at] == "\\":
            return (at, "") if _BEGUN_ESCAPE.fullmatch(text, at) else (at + 1, "\\\\")
        return at + 1, json.dumps(text[at])[1:-1]

    def _read_structure(self, at: int) -> tuple[int, str] | None:
        """As `_read_string`; None where it is not JSON."""
        char, expects = self.rest[at], self._expects
        inside = self._stack[-1] if self._stack else ""
        if char in _SPACE:
            return (at + 1, char) if inside else None
        may_end, self._may_end = self._may_end, False
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
            self._expects, self._may_end = ("key" if char == "{" else "value"), True
        elif char == '"' and inside and expects in ("key", "value"):
            self._is_in_string, self._is_key = True, expects == "key"
        elif expects == "value" and inside and (run := _SCALAR_RUN.match(self.rest, at)):
            # Numbers and words are held back until they end, when they can be checked.
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
