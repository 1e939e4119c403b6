"""Thinking out of a model's text: what a turn begins with between two tags, or on channels."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from engine.protocol import Delta, ThinkingDelta
from engine.text.formats.calls import CallObject, FormatParser, texts
from engine.text.formats.stops import is_begun_markup, overlap

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

    def __init__(self, tool_names: Collection[str]) -> None:
        self.num_calls = 0
        self.is_thinking = False
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
            self._call = CallObject(name=name.removeprefix(_FUNCTIONS))
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


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The texts of the tags, which may be control tokens.

    `wrapper` are tags that some models write around the answer behind their thinking: what opens
    it, and in their order those that close it. `opens_answer`: a prompt without thinking ends
    behind the first of them.
    """

    open: str
    close: str
    wrapper: tuple[str, ...] | None = None
    opens_answer: bool = False

    @property
    def markers(self) -> frozenset[str]:
        return frozenset({self.open, self.close, *(self.wrapper or ())})


REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "granite": ReasoningFormat("<think>", "</think>", ("<response>", "</response>")),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "cohere": ReasoningFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    # Its prompts end with the words that open the thinking.
    "apriel": ReasoningFormat(
        "Here are my reasoning steps:\n",
        "[BEGIN FINAL RESPONSE]",
        ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
        opens_answer=True,
    ),
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        opens_answer=True,
    ),
}
HARMONY = "openai"
"""gpt-oss's channels, which are read by `HarmonyParser` instead of between tags."""


class ThinkingParser:
    """A `FormatParser` that takes the thinking out and hands the rest on to `inner`.

    A turn may begin with thinking, nowhere else does a tag count; `is_open` where the prompt ended
    behind the opening tag. White space inside the tags and behind them is dropped, as templates
    write it anew. A model that opens the tag once more, behind the prompt's own, thinks once; one
    whose turn begins with the closing tag does not think.
    """

    def __init__(self, tags: ReasoningFormat, inner: FormatParser, *, is_open: bool) -> None:
        self.is_thinking = is_open
        self._opening, self._close = tags.open.strip(), tags.close
        self._inner = inner if tags.wrapper is None else _Unwrapped(tags, inner)
        self._held = ""
        self._may_begin = True
        self._drops_space = is_open

    @property
    def num_calls(self) -> int:
        return self._inner.num_calls

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        if self._may_begin:
            self._read_begin()
        if self._may_begin:
            return deltas
        if self._drops_space:
            self._held = self._held.lstrip()
            self._drops_space = not self._held
        if self.is_thinking:
            thought, close, rest = self._held.partition(self._close)
            if not close:
                thought = thought[: len(thought) - overlap(thought, self._close)]
            deltas += _thoughts(thought.rstrip())
            if not close:
                self._held = self._held[len(thought.rstrip()) :]
                return deltas
            self.is_thinking, self._held = False, rest.lstrip()
            self._drops_space = not self._held
        held, self._held = self._held, ""
        return [*deltas, *self._inner.feed(held)] if held else deltas

    def close(self, *, is_cut: bool = False) -> list[Delta]:
        held, self._held = self._held, ""
        if self.is_thinking:
            held = held.lstrip() if self._drops_space else held
            return [*_thoughts(held.rstrip()), *self._inner.close(is_cut=is_cut)]
        return [*self._inner.feed(held), *self._inner.close(is_cut=is_cut)]

    def _read_begin(self) -> None:
        begin = self._held.lstrip()
        for tag in (self._opening, self._close):
            if begin.startswith(tag):
                self._held = begin[len(tag) :]
                self.is_thinking, self._drops_space = tag == self._opening, True
                self._may_begin = False
                return
        self._may_begin = any(tag.startswith(begin) for tag in (self._opening, self._close))


class _Unwrapped:
    """Drops the tags that the answer stands in, where it begins with the first of them."""

    is_thinking = False

    def __init__(self, tags: ReasoningFormat, inner: FormatParser) -> None:
        self._opening, *self._closing = tags.wrapper or ("",)
        self._opens_answer = tags.opens_answer
        self._inner = inner
        self._may_begin = True
        self._held = ""

    @property
    def num_calls(self) -> int:
        return self._inner.num_calls

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        if self._may_begin:
            begin = self._held.lstrip()
            if begin.startswith(self._opening):
                self._held = begin[len(self._opening) :]
            elif self._opening.startswith(begin):
                return deltas
            elif not self._opens_answer:
                self._closing = []
            self._may_begin = False
        while found := [(at, tag) for tag in self._closing if (at := self._held.find(tag)) >= 0]:
            at, tag = min(found)
            before, self._held = self._held[:at], self._held[at + len(tag) :]
            self._closing = self._closing[self._closing.index(tag) + 1 :]
            deltas += self._inner.feed(before)
        kept = max((overlap(self._held, tag) for tag in self._closing), default=0)
        passed = self._held[: len(self._held) - kept]
        self._held = self._held[len(passed) :]
        return [*deltas, *self._inner.feed(passed)] if passed else deltas

    def close(self, *, is_cut: bool = False) -> list[Delta]:
        held, self._held = self._held, ""
        held = "" if is_cut and is_begun_markup(held) else held
        return [*self._inner.feed(held), *self._inner.close(is_cut=is_cut)]


def _thoughts(text: str) -> list[Delta]:
    return [ThinkingDelta(text)] if text else []
