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
from engine.text.formats.call_stream import CallObject, texts
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
        self._call: CallObject | None = None
        self._is_input_over = False
        self._is_begun = False
        self._step: Callable[[list[Delta]], bool] = self._read_header

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        return deltas

    def close(self, *, is_cut: bool = False) -> list[Delta]:
        held, self._held = self._held, ""
        if self._step == self._read_header:
            return [] if self._is_header(held) else texts(held)
        if self._step == self._read_call:
            return []
        kept = held.rstrip() if self.is_thinking else held
        return self._said(kept)

    def _read_header(self, deltas: list[Delta]) -> bool:
        if not self._held.strip():
            return False
        if not self._is_header(self._held):
            self._begin_body(is_thinking=False)
            return True
        at = self._held.find(MESSAGE)
        if at < 0:
            if len(self._held) > _MAX_HEADER:
                self._begin_body(is_thinking=False)
                return True
            return False
        header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
        channel = _CHANNEL_NAME.search(header)
        recipient = _RECIPIENT.search(header)
        name = "" if recipient is None else recipient.group(1)
        self._is_begun = False
        if name.startswith(_FUNCTIONS) and self._has_tools:
            self._call = CallObject(self._new_id, name=name.removeprefix(_FUNCTIONS))
            self._is_input_over = False
            self._step = self._read_call
        else:
            is_analysis = channel is not None and channel.group(1) == "analysis"
            self._begin_body(is_thinking=is_analysis)
        return True

    def _is_header(self, text: str) -> bool:
        """Is the text the beginning of a message's header?"""
        begun = text.lstrip()
        return not begun or any(
            whole.startswith(_HEADER_BEGINS) or any(b.startswith(whole) for b in _HEADER_BEGINS)
            for whole in (text, begun)
        )

    def _begin_body(self, *, is_thinking: bool) -> None:
        self.is_thinking = is_thinking
        self._step = self._read_body

    def _read_body(self, deltas: list[Delta]) -> bool:
        found = [(at, end) for end in _BODY_ENDS if (at := self._held.find(end)) >= 0]
        if not found:
            keep = max(overlap(self._held, end) for end in _BODY_ENDS)
            whole = self._held[: len(self._held) - keep]
            if self.is_thinking:
                whole = whole.rstrip()
            deltas += self._said(whole)
            self._held = self._held[len(whole) :]
            return False
        at, end = min(found)
        body = self._held[:at].rstrip() if self.is_thinking else self._held[:at]
        deltas += self._said(body)
        self._held = self._held[at + (0 if end == START else len(end)) :]
        self._end_message()
        return True

    def _said(self, text: str) -> list[Delta]:
        if self.is_thinking and not self._is_begun:
            text = text.lstrip()
        self._is_begun = self._is_begun or bool(text)
        if not self.is_thinking:
            return texts(text)
        return [ThinkingDelta(text)] if text else []

    def _read_call(self, deltas: list[Delta]) -> bool:
        assert self._call is not None
        if not self._is_input_over:
            self._held = self._held.lstrip() if not self._call.is_started else self._held
            if not self._held:
                return False
            deltas += self._call.feed(self._held)
            self._held = self._call.rest
            self._is_input_over = self._call.is_over
            if not self._is_input_over:
                return False
            self.num_calls += self._call.has_input
        # Behind the input nothing but the message's end counts.
        found = [(at, end) for end in _BODY_ENDS if (at := self._held.find(end)) >= 0]
        if not found:
            self._held = self._held[
                len(self._held) - max(overlap(self._held, e) for e in _BODY_ENDS) :
            ]
            return False
        at, end = min(found)
        self._held = self._held[at + (0 if end == START else len(end)) :]
        self._end_message()
        return True

    def _end_message(self) -> None:
        self.is_thinking = False
        self._call = None
        self._step = self._read_header
