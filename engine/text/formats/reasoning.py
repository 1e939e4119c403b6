"""Thinking out of a model's text: what a turn begins with between two tags.

Detection looks for the closing tag in the chat template, since every template of a model that
thinks has to handle it: `</think>` is `think` (Qwen3, DeepSeek-R1), `[/THINK]` is `mistral`
(Magistral).
"""

from dataclasses import dataclass

from engine.protocol import Delta, ThinkingDelta
from engine.text.formats.call_stream import FormatParser
from engine.text.formats.stops import overlap


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The texts of the tags, which may be control tokens."""

    open: str
    close: str


REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


def find_reasoning_format(template_source: str) -> str | None:
    """The format that a chat template handles, None where it is not one of ours."""
    shown = (name for name, tags in REASONING_FORMATS.items() if tags.close in template_source)
    return next(shown, None)


class ThinkingParser:
    """A `FormatParser` that takes the thinking out and hands the rest on to `inner`.

    A turn may begin with thinking, nowhere else does a tag count; `is_open` where the prompt ended
    behind the opening tag. White space inside the tags and behind them is dropped, as templates
    write it anew.
    """

    def __init__(self, tags: ReasoningFormat, inner: FormatParser, *, is_open: bool) -> None:
        self.is_thinking = is_open
        self._tags = tags
        self._inner = inner
        self._held = ""
        self._may_begin = not is_open
        self._drops_space = is_open

    @property
    def num_calls(self) -> int:
        return self._inner.num_calls

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        if self._may_begin:
            self._read_begin()
        if self.is_thinking:
            self._read_thinking(deltas)
        if self.is_thinking or self._may_begin:
            return deltas
        if self._drops_space:
            self._held = self._held.lstrip()
            self._drops_space = not self._held
        held, self._held = self._held, ""
        return [*deltas, *self._inner.feed(held)] if held else deltas

    def close(self) -> list[Delta]:
        held, self._held = self._held, ""
        if self.is_thinking:
            return [*_thoughts(held.rstrip()), *self._inner.close()]
        return [*self._inner.feed(held), *self._inner.close()]

    def _read_begin(self) -> None:
        begin = self._held.lstrip()
        if begin.startswith(self._tags.open):
            self._held = begin[len(self._tags.open) :]
            self.is_thinking = self._drops_space = True
            self._may_begin = False
        elif not self._tags.open.startswith(begin):
            self._may_begin = False

    def _read_thinking(self, deltas: list[Delta]) -> None:
        if self._drops_space:
            self._held = self._held.lstrip()
            self._drops_space = not self._held
        at = self._held.find(self._tags.close)
        if at >= 0:
            deltas += _thoughts(self._held[:at].rstrip())
            self._held = self._held[at + len(self._tags.close) :]
            self.is_thinking, self._drops_space = False, True
            return
        whole = self._held[: len(self._held) - overlap(self._held, self._tags.close)].rstrip()
        deltas += _thoughts(whole)
        self._held = self._held[len(whole) :]


def _thoughts(text: str) -> list[Delta]:
    return [ThinkingDelta(text)] if text else []
