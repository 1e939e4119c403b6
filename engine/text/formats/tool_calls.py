"""The formats in which models write tool calls, and which of them a chat template shows.

The names are those of vLLM's `--tool-call-parser`. Detection looks for what a template tells its
model to write; where a template shows several, the first in `TOOL_FORMATS` counts:

- `mistral`: `[TOOL_CALLS]`;
- `hermes`: `<tool_call>` around JSON with `arguments` (XML inside, as Qwen3-Coder has it, is not);
- `llama3_json`: `<|python_tag|>`, or a call shown as `{"name": function name, "parameters": …}`.
"""

import re
import secrets
from collections.abc import Callable, Collection
from string import ascii_letters, digits

from engine.protocol import Delta
from engine.text.formats.call_stream import CallObject, CallStream, FormatParser, texts
from engine.text.formats.stops import overlap

_SPACE = " \t\n\r"
_ID_ALPHABET = digits + ascii_letters
_ID_LENGTH = 24


class PlainText:
    """No tools: text is text."""

    num_calls = 0
    is_thinking = False

    def feed(self, text: str) -> list[Delta]:
        return texts(text)

    def close(self) -> list[Delta]:
        return []


class HermesCalls(CallStream):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen models write."""

    MARKER = "<tool_call>"
    CLOSE = "</tool_call>"
    MARKERS = frozenset({MARKER, CLOSE})

    def _after_marker(self, deltas: list[Delta]) -> bool:
        self._skip(_SPACE)
        if not self._held:
            return False
        return self._begin(CallObject(self._new_id))

    def _after_object(self, deltas: list[Delta]) -> bool:
        rest = self._held.lstrip(_SPACE)
        if rest.startswith(self.CLOSE):
            self._held = rest[len(self.CLOSE) :]
        elif self.CLOSE.startswith(rest):
            return False
        self._step = self._read_text
        return True

    def _is_text(self, left: str) -> bool:
        is_closing = self._step == self._after_object and self.CLOSE.startswith(left.strip())
        return super()._is_text(left) and not is_closing


class MistralCalls(CallStream):
    """`[TOOL_CALLS]` and an array of call objects, or `name[ARGS]{…}` (Small 3.x).

    Between a name and its arguments `[CALL_ID]` and an id may stand, and `[ARGS]` may be missing,
    as vLLM's parser allows. Ids that the model writes are dropped.
    """

    MARKER = "[TOOL_CALLS]"
    MARKERS = frozenset({MARKER, "[ARGS]", "[CALL_ID]"})
    _NAMED = re.compile(r"([\w.-]{1,128})\s*(?:\[CALL_ID\]\s*\w{0,64}\s*)?(?:\[ARGS\]\s*)?")
    # Matches whatever may become one of the above.
    _MAY_BE_NAMED = re.compile(r"[\w.-]{0,128}\s*(?:\[[\w\s\[\]]*)?")
    _is_array = False

    def _after_marker(self, deltas: list[Delta]) -> bool:
        self._skip(_SPACE)
        self._is_array = False
        if not self._held:
            return False
        if self._held.startswith("["):
            self._skipped += "["
            self._held = self._held[1:]
            self._is_array = True
            self._step = self._read_item
            return True
        if self._held.startswith("{"):
            return self._begin(CallObject(self._new_id))
        at = self._held.find("{")
        header = self._held if at < 0 else self._held[:at]
        named = self._NAMED.fullmatch(header)
        if not self._MAY_BE_NAMED.fullmatch(header) or (at >= 0 and named is None):
            return self._give_up(deltas)
        if at < 0 or named is None:
            return False
        self._held = self._held[at:]
        return self._begin(CallObject(self._new_id, name=named.group(1)))

    def _read_item(self, deltas: list[Delta]) -> bool:
        self._skip(_SPACE)
        if not self._held:
            return False
        if self._held.startswith("{"):
            return self._begin(CallObject(self._new_id))
        return self._give_up(deltas)

    def _after_object(self, deltas: list[Delta]) -> bool:
        if self._is_array:
            self._skip(_SPACE)
            if not self._held:
                return False
            if self._held.startswith(","):
                self._skipped += ","
                self._held = self._held[1:]
                self._step = self._read_item
                return True
            if self._held.startswith("]"):
                self._skipped, self._held = "", self._held[1:]
        self._held, self._skipped = self._skipped + self._held, ""
        self._step = self._read_text
        return True

    def _is_text(self, left: str) -> bool:
        return super()._is_text(left) and not (self.num_calls and left.strip() == ",")


class Llama3Calls(CallStream):
    """`{"name": …, "parameters": {…}}` as the whole turn, several separated by semicolons.

    Without `<|python_tag|>` nothing but the name tells a call from an answer in JSON, so the name
    must be that of one of the request's tools; behind the tag every name counts, as elsewhere.
    """

    MARKER = "<|python_tag|>"
    MARKERS = frozenset({MARKER})

    def __init__(self, new_id: Callable[[], str], tool_names: Collection[str]) -> None:
        super().__init__(new_id, tool_names)
        self._is_tagged = False
        self._step = self._read_begin

    def _read_begin(self, deltas: list[Delta]) -> bool:
        self._skip(_SPACE)
        if not self._held or overlap(self._held, self.MARKER) == len(self._held):
            return False
        if self._held.startswith("{"):
            return self._begin(self._new_call())
        self._held, self._skipped = self._skipped + self._held, ""
        self._step = self._read_text
        return True

    def _after_marker(self, deltas: list[Delta]) -> bool:
        self._is_tagged = True
        self._skip(_SPACE)
        if not self._held:
            return False
        return self._begin(self._new_call())

    def _after_object(self, deltas: list[Delta]) -> bool:
        self._skip(_SPACE + ";")
        if not self._held:
            return False
        if self._held.startswith("{"):
            return self._begin(self._new_call())
        self._held, self._skipped = self._skipped + self._held, ""
        self._step = self._read_text
        return True

    def _new_call(self) -> CallObject:
        accepts = None if self._is_tagged else self._tool_names.__contains__
        return CallObject(self._new_id, accepts=accepts)

    def _is_text(self, left: str) -> bool:
        return super()._is_text(left) and not (self.num_calls and not left.strip(_SPACE + ";"))


TOOL_FORMATS: dict[str, type[CallStream]] = {
    "mistral": MistralCalls,
    "hermes": HermesCalls,
    "llama3_json": Llama3Calls,
}
_LLAMA3_SHOWN = re.compile(r'\{\\?"name\\?": function name, \\?"parameters\\?":')


def find_tool_format(template_source: str) -> str | None:
    """The format that a chat template shows its model, None where it is not one of ours."""
    shown = {
        "mistral": MistralCalls.MARKER in template_source,
        "hermes": HermesCalls.MARKER in template_source
        and "arguments" in template_source
        and "<function=" not in template_source,
        "llama3_json": Llama3Calls.MARKER in template_source
        or _LLAMA3_SHOWN.search(template_source) is not None,
    }
    return next((name for name in TOOL_FORMATS if shown[name]), None)


def new_tool_use_id() -> str:
    """`toolu_` and 24 random characters of base 62."""
    return "toolu_" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))


__all__ = [
    "TOOL_FORMATS",
    "FormatParser",
    "HermesCalls",
    "Llama3Calls",
    "MistralCalls",
    "PlainText",
    "find_tool_format",
    "new_tool_use_id",
]
