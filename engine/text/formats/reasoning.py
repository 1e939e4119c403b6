"""Thinking out of a model's text: what a turn begins with between two tags."""

from dataclasses import dataclass

from engine.protocol import Delta, ThinkingDelta
from engine.text.formats.calls import FormatParser
from engine.text.formats.stops import is_begun_markup, overlap


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
