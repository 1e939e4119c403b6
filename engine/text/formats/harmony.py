"""gpt-oss's output: messages on channels (openai/harmony's format description).

A turn is several messages, `<|channel|>analysis<|message|>…<|end|><|start|>assistant…`. `analysis`
is thinking and `final` the answer. A message to `functions.NAME` is a call; where the recipient
stands (in the role or in the channel) differs between what the template writes and what the model
does. `commentary` without a recipient is text for the user. `<|return|>` and `<|call|>` end a turn.

The library `openai-harmony` is not used: it fetches its vocabulary from the network at first use,
and reads token ids of that vocabulary only.
"""

import re
from collections.abc import Callable, Collection

from engine.protocol import Delta, ThinkingDelta
from engine.text.formats.calls import CallObject, texts
from engine.text.formats.stops import overlap

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, RETURN, CALL, CONSTRAIN = "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"
MARKERS = frozenset({START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN})
TURN_ENDS = frozenset({RETURN, CALL})
_BODY_ENDS = (END, RETURN, CALL, START)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")
_FUNCTIONS = "functions."
# What a message's header may begin with, behind the `<|start|>assistant` of the prompt.
_HEADER_BEGINS = (START, CHANNEL, MESSAGE, "assistant", " to=", "to=")
_MAX_HEADER = 512


class HarmonyParser:
    """A `FormatParser` for the whole of a turn: thinking, text and calls.

    Without `tool_names` nothing is a call. Text outside of any message is text.
    """

    def __init__(self, new_id: Callable[[], str], tool_names: Collection[str]) -> None:
        self.num_calls = 0
        self.is_thinking = False
        self._new_id = new_id
        self._has_tools = bool(tool_names)
        self._held = ""
        self._is_in_header = True
        self._call: CallObject | None = None
        # The message has said something: before, thinking has no white space.
        self._is_begun = False

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while self._read_header() if self._is_in_header else self._read_body(deltas):
            pass
        return deltas

    def close(self, *, is_cut: bool = False) -> list[Delta]:
        held, self._held = self._held, ""
        if self._is_in_header:
            return [] if _is_header(held) else texts(held)
        return self._said(held.rstrip() if self.is_thinking else held)

    def _read_header(self) -> bool:
        if not self._held.strip():
            return False
        at = self._held.find(MESSAGE)
        is_header = _is_header(self._held)
        if is_header and at < 0 and len(self._held) <= _MAX_HEADER:
            return False
        self._is_in_header = self._is_begun = False
        if not is_header or at < 0:
            return True
        header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        name = "" if recipient is None else recipient.group(1)
        if name.startswith(_FUNCTIONS) and self._has_tools:
            self._call = CallObject(self._new_id, name=name.removeprefix(_FUNCTIONS))
        else:
            self.is_thinking = channel is not None and channel.group(1) == "analysis"
        return True

    def _read_body(self, deltas: list[Delta]) -> bool:
        if self._call is not None and not self._read_input(self._call, deltas):
            return False
        # Behind a call's input nothing but the message's end counts.
        found = [(at, end) for end in _BODY_ENDS if (at := self._held.find(end)) >= 0]
        kept = max(overlap(self._held, end) for end in _BODY_ENDS)
        at, end = min(found, default=(len(self._held) - kept, ""))
        body = self._held[:at].rstrip() if self.is_thinking else self._held[:at]
        deltas += self._said(body)
        if not found:
            self._held = self._held[len(body) :]
            return False
        self._held = self._held[at + (0 if end == START else len(end)) :]
        self.is_thinking, self._is_in_header, self._call = False, True, None
        return True

    def _read_input(self, call: CallObject, deltas: list[Delta]) -> bool:
        """False where more text is needed."""
        if not call.is_over:
            deltas += call.feed(self._held)
            self._held = call.rest
            self.num_calls += call.has_input
        return call.is_over

    def _said(self, text: str) -> list[Delta]:
        if self._call is not None:
            return []
        if self.is_thinking and not self._is_begun:
            text = text.lstrip()
        self._is_begun = self._is_begun or bool(text)
        if not self.is_thinking:
            return texts(text)
        return [ThinkingDelta(text)] if text else []


def _is_header(text: str) -> bool:
    """Is the text the beginning of a message's header?"""
    begun = text.lstrip()
    return not begun or any(
        whole.startswith(_HEADER_BEGINS) or any(b.startswith(whole) for b in _HEADER_BEGINS)
        for whole in (text, begun)
    )
