"""A JSON object, checked character by character as it streams.

Two mistakes that models make inside strings are corrected: raw control characters are escaped,
and a backslash that escapes nothing is doubled.
"""

import json
import re
from enum import Enum, auto

_SPACE = " \t\n\r"
_SCALAR_END = _SPACE + ",}]"
_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null")
_SCALAR_CHARACTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_SCALAR_BEGIN = frozenset("-0123456789tfn")
_ESCAPES = frozenset('"\\/bfnrt')
_UNICODE_ESCAPE_LENGTH = len("uXXXX")
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"{": "}", "[": "]"}


class _Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    SCALAR = auto()


class JsonObjectStream:
    """One object. What `feed` returns adds up to valid JSON once `is_complete`.

    When `is_broken` the text is no JSON from `rest` on; when complete, `rest` is what follows.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        self.rest = ""
        self._stack: list[str] = []
        self._expect = _Expect.VALUE
        self._is_key = False
        self._scalar = ""
        self._escape = ""

    def feed(self, text: str) -> str:
        out: list[str] = []
        for index, char in enumerate(text):
            accepted = self._accept(char)
            if accepted is None:
                self.is_broken = True
                self.rest = self._scalar + text[index:]
                break
            out.append(accepted)
            if self.is_complete:
                self.rest = text[index + 1 :]
                break
        return "".join(out)

    def _accept(self, char: str) -> str | None:
        """What to write for the character; None where it is not JSON."""
        match self._expect:
            case _Expect.STRING:
                return self._in_string(char)
            case _Expect.ESCAPE:
                return self._in_escape(char)
            case _Expect.SCALAR:
                return self._in_scalar(char)
        if char in _SPACE:
            return char if self._stack else None
        if self._begin_scalar(char):
            return ""
        return char if self._structure(char) else None

    def _structure(self, char: str) -> bool:
        expect, inside = self._expect, self._stack[-1] if self._stack else ""
        if expect is _Expect.COLON:
            self._expect = _Expect.VALUE
            return char == ":"
        if expect is _Expect.COMMA_OR_END and char == ",":
            self._expect = _Expect.KEY if inside == "{" else _Expect.VALUE
            return True
        if expect in (_Expect.COMMA_OR_END, _Expect.KEY_OR_END, _Expect.VALUE_OR_END):
            if char == _CLOSING[inside]:
                self._close()
                return True
            if expect is _Expect.COMMA_OR_END:
                return False
        if expect in (_Expect.KEY, _Expect.KEY_OR_END):
            self._is_key, self._expect = True, _Expect.STRING
            return char == '"'
        return self._value(char)

    def _value(self, char: str) -> bool:
        if char == "{":
            self._stack.append(char)
            self._expect = _Expect.KEY_OR_END
            return True
        if not self._stack:
            return False
        if char == "[":
            self._stack.append(char)
            self._expect = _Expect.VALUE_OR_END
            return True
        if char == '"':
            self._is_key, self._expect = False, _Expect.STRING
            return True
        return False

    def _begin_scalar(self, char: str) -> bool:
        if self._expect not in (_Expect.VALUE, _Expect.VALUE_OR_END) or not self._stack:
            return False
        if char not in _SCALAR_BEGIN:
            return False
        self._scalar, self._expect = char, _Expect.SCALAR
        return True

    def _close(self) -> None:
        self._stack.pop()
        self._expect = _Expect.COMMA_OR_END
        self.is_complete = not self._stack

    def _in_string(self, char: str) -> str:
        if char == '"':
            self._expect = _Expect.COLON if self._is_key else _Expect.COMMA_OR_END
            return char
        if char == "\\":
            # Written with the next character, which decides whether it is an escape.
            self._expect = _Expect.ESCAPE
            return ""
        return json.dumps(char)[1:-1] if char < " " else char

    def _in_escape(self, char: str) -> str:
        """`self._escape` holds the characters since the backslash: `uXXXX` needs five."""
        self._escape += char
        if self._escape == "u" or (self._escape[0] == "u" and char in _HEXADECIMAL):
            if len(self._escape) < _UNICODE_ESCAPE_LENGTH:
                return ""
        elif self._escape not in _ESCAPES:
            # No escape: the backslash was meant as one, and the character as itself.
            wrong, self._escape, self._expect = self._escape[:-1], "", _Expect.STRING
            return "\\\\" + wrong + self._in_string(char)
        escape, self._escape, self._expect = self._escape, "", _Expect.STRING
        return "\\" + escape

    def _in_scalar(self, char: str) -> str | None:
        """Numbers and words are held back until they end, when they can be checked."""
        if char in _SCALAR_CHARACTERS:
            self._scalar += char
            return ""
        if char not in _SCALAR_END or not _SCALAR.fullmatch(self._scalar):
            return None
        scalar, self._scalar = self._scalar, ""
        self._expect = _Expect.COMMA_OR_END
        accepted = self._accept(char)
        return None if accepted is None else scalar + accepted
