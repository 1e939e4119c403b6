"""The formats whose markup takes code of its own, and text without any format."""

import re
import secrets
from collections.abc import Callable, Collection
from functools import partial
from string import ascii_letters, digits

from engine.protocol import Delta
from engine.text.formats.call_stream import CallObject, CallStream, texts
from engine.text.formats.stops import overlap
from engine.text.template.messages import SHORT_ID_LENGTH

_SPACE = " \t\n\r"
_ID_ALPHABET = digits + ascii_letters
_ID_LENGTH = 24


class PlainText:
    """No tools: text is text."""

    num_calls = 0
    is_thinking = False

    def feed(self, text: str) -> list[Delta]:
        return texts(text)

    def close(self, *, is_cut: bool = False) -> list[Delta]:
        return []


class MistralCalls(CallStream):
    """`[TOOL_CALLS]` and an array of call objects, or `name[ARGS]{…}` (Small 3.x).

    Between a name and its arguments `[CALL_ID]` and an id may stand, and `[ARGS]` may be missing,
    as vLLM's parser allows. The call's id ends with the id that stands there, so that a replayed
    call has it; an id behind the input comes too late for that and is dropped.
    """

    starts = ("[TOOL_CALLS]",)
    _NAMED = re.compile(r"([\w.-]{1,128})\s*(?:\[CALL_ID\]\s*(\w{0,64})\s*)?(?:\[ARGS\]\s*)?")
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
        written_id = named.group(2) or ""
        new_id = partial(_ending_with, written_id, self._new_id)
        return self._begin(CallObject(new_id, name=named.group(1)))

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


def _ending_with(written: str, new_id: Callable[[], str]) -> str:
    """A new id that ends with the one that the model wrote, if that is of the length it should."""
    made = new_id()
    if len(written) != SHORT_ID_LENGTH or not set(written) <= set(_ID_ALPHABET):
        return made
    return made[:-SHORT_ID_LENGTH] + written


class Llama3Calls(CallStream):
    """`{"name": …, "parameters": {…}}` as the whole turn, several separated by semicolons.

    Without `<|python_tag|>` nothing but the name tells a call from an answer in JSON, so the name
    must be that of one of the request's tools; behind the tag every name counts, as elsewhere.
    """

    starts = ("<|python_tag|>",)

    def __init__(self, new_id: Callable[[], str], tool_names: Collection[str]) -> None:
        super().__init__(new_id, tool_names)
        self._is_tagged = False
        self._step = self._read_begin

    def _read_begin(self, deltas: list[Delta]) -> bool:
        self._skip(_SPACE)
        if not self._held or overlap(self._held, self.starts[0]) == len(self._held):
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


def new_tool_use_id() -> str:
    """`toolu_` and 24 random characters of base 62."""
    return "toolu_" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
