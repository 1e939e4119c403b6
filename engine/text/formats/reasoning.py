"""Separates thinking from text in a turn.

Thinking stands between tags at the turn's beginning, or in messages with headers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import Delta, ThinkingDelta, Tool
from engine.text.formats.calls import CallObject, FormatParser, texts
from engine.text.formats.matching import is_begun_markup, overlap, places_of

_MAX_HEADER = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSyntax:
    """The notation of a turn of several messages. Each message has a header that says its kind."""

    # The beginning of a header. The prompt has the beginning of the first message's header.
    start: str
    # The end of a header.
    stop: str
    # The texts that may follow `start`. The place `{name}` stands for the name of each tool.
    begins: tuple[str, ...]
    # Matches in the headers of calls. Its group `name` is the tool's name. Without that group the
    # message is an object with a name.
    calls: re.Pattern[str] | None = None
    # Matches in the headers of thinking.
    thinks: re.Pattern[str] | None = None
    # The texts that may follow a message.
    ends: tuple[str, ...] = ()
    # The texts that end the turn as well.
    turn_ends: frozenset[str] = frozenset()

    @property
    def markers(self) -> frozenset[str]:
        return frozenset({self.start, self.stop, *self.begins, *self.ends} - {""})


MESSAGES = {
    "openai": MessageSyntax(
        start="<|start|>",
        stop="<|message|>",
        begins=("<|channel|>", "<|message|>", "<|constrain|>", "assistant", " to=", "to="),
        calls=re.compile(r"\bto=functions\.(?P<name>[\w.\-]+)"),
        thinks=re.compile(r"<\|channel\|>\s*analysis\b"),
        ends=("<|end|>", "<|return|>", "<|call|>"),
        turn_ends=frozenset({"<|return|>", "<|call|>"}),
    ),
    "muse": MessageSyntax(
        start="<|start|>",
        stop="<|message|>",
        begins=("assistant", " to=", "to=", "<|message|>"),
        thinks=re.compile(r"\bto=self\b"),
        ends=("<|eom|>", "<|eot|>"),
        turn_ends=frozenset({"<|eot|>"}),
    ),
    "functionary_v3": MessageSyntax(
        start=">>>",
        stop="\n",
        begins=("all\n", "{name}\n{"),
        calls=re.compile(r"^(?!all$)(?P<name>.+)"),
    ),
    "glm4": MessageSyntax(
        start="<|assistant|>",
        stop="\n",
        begins=("\n", "{name}\n{"),
        calls=re.compile(r"(?P<name>.+)"),
        turn_ends=frozenset({"<|user|>", "<|observation|>"}),
    ),
    "gigachat3": MessageSyntax(
        start="",
        stop="<|role_sep|>\n",
        begins=("function call<|role_sep|>",),
        calls=re.compile("function call"),
        ends=("<|message_sep|>",),
    ),
}
"""The notations of messages, by the name of their format of calls and thinking."""


class MessagesParser:
    """A `FormatParser` for a whole turn of messages: thinking, text and calls.

    Without tools nothing is a call. Text outside of all messages is text. `inner` reads the text of
    messages, if calls stand in the text and not in headers.
    """

    def __init__(
        self, syntax: MessageSyntax, tools: Sequence[Tool], inner: FormatParser | None = None
    ) -> None:
        self.is_thinking = False
        self._syntax = syntax
        self._inner = inner
        self._calls = syntax.calls if tools else None
        names = [tool.name for tool in tools]
        begins: list[str] = []
        for begin in syntax.begins:
            if "{name}" in begin:
                begins.extend(begin.replace("{name}", name) for name in names)
            else:
                begins.append(begin)
        self._begins = tuple(begins)
        self._num_calls = 0
        self._num_ended = 0
        self._pending = ""
        self._is_in_header = True
        self._call: CallObject | None = None
        # The message has text. Until then white space of thinking is dropped.
        self._is_begun = False

    @property
    def num_calls(self) -> int:
        return self._num_calls + (0 if self._inner is None else self._inner.num_calls)

    def feed(self, text: str) -> list[Delta]:
        self._pending += text
        deltas: list[Delta] = []
        while self._read_header() if self._is_in_header else self._read_body(deltas):
            pass
        return deltas

    def close(self, *, is_cut: bool = False) -> list[Delta]:
        pending = self._pending
        self._pending = ""
        is_header = self._is_header(pending)
        if self._is_in_header and (is_header or is_cut or not pending.strip()):
            pending = "" if is_header is not False else pending
        deltas = self._deltas_of(pending.rstrip() if self.is_thinking else pending)
        return deltas if self._inner is None else [*deltas, *self._inner.close(is_cut=is_cut)]

    def _is_header(self, text: str) -> bool | None:
        """Whether the text begins with a header; None if only more text can decide."""
        may_be = False
        for whole in (text, text.lstrip()):
            body = whole.removeprefix(self._syntax.start)
            if body.startswith(self._begins):
                return True
            may_be = may_be or self._syntax.start.startswith(whole)
            may_be = may_be or any(begin.startswith(body) for begin in self._begins)
        return None if may_be else False

    def _read_header(self) -> bool:
        syntax = self._syntax
        pending = self._pending
        is_header = self._is_header(pending)
        at = pending.find(syntax.stop)
        if is_header is None or (is_header and at < 0 and len(pending) <= _MAX_HEADER):
            return False
        if not is_header and not syntax.start and self._num_ended:
            self._pending = ""  # it is another role's message
            return False
        self._is_in_header = False
        self._is_begun = False
        if is_header and at >= 0:
            header = pending[:at]
            self._pending = pending[at + len(syntax.stop) :]
            header = header.strip().removeprefix(syntax.start)
            call = None if self._calls is None else self._calls.search(header)
            if call is not None:
                self._call = CallObject(name=call.groupdict().get("name"))
            else:
                self.is_thinking = bool(syntax.thinks and syntax.thinks.search(header))
        return True

    def _read_body(self, deltas: list[Delta]) -> bool:
        call = self._call
        if call is not None and not call.is_over:
            deltas += call.feed(self._pending)
            self._pending = call.rest
            self._num_calls += call.has_input
            if not call.is_over:
                return False
        # Text behind a call's input is dropped, up to the end of the message.
        start = self._syntax.start
        pending = self._pending
        ends = places_of(pending, self._syntax.ends)
        begun = pending.find(start) if start else -1
        while begun >= 0 and self._is_header(pending[begun:]) is False:
            begun = pending.find(start, begun + 1)
        if begun >= 0:
            ends.append((begun, ""))
        kept = max(overlap(pending, end) for end in (*self._syntax.ends, start) if end)
        at, end = min(ends, default=(len(pending) - kept, ""))
        body = pending[:at].rstrip() if self.is_thinking else pending[:at]
        deltas += self._deltas_of(body)
        if not ends:
            self._pending = pending[len(body) :]
            return False
        self._pending = pending[at + len(end) :]
        self.is_thinking = False
        self._is_in_header = True
        self._call = None
        self._num_ended += 1
        return True

    def _deltas_of(self, text: str) -> list[Delta]:
        if self._call is not None:
            return []
        if self.is_thinking and not self._is_begun:
            text = text.lstrip()
        self._is_begun = self._is_begun or bool(text)
        if self.is_thinking:
            return [ThinkingDelta(text)] if text else []
        return texts(text) if self._inner is None else self._inner.feed(text)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around thinking. Their texts may be control tokens."""

    open: str
    close: str
    # The tags that some models write around the answer behind their thinking. The first one opens
    # the answer, and the others close it, in their order.
    wrapper: tuple[str, ...] | None = None
    # Whether a prompt without thinking ends behind the first tag of the wrapper.
    opens_answer: bool = False
    # A text in the templates of models that write the wrapper.
    template_text: str = ""

    @property
    def markers(self) -> frozenset[str]:
        return frozenset({self.open, self.close, *(self.wrapper or ())})


REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "granite": ReasoningFormat(
        "<think>",
        "</think>",
        ("<response>", "</response>"),
        template_text="<response></response>",
    ),
    "hunyuan": ReasoningFormat(
        "<think>", "</think>", ("<answer>\n", "\n</answer>"), template_text="<|extra_4|>"
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "cohere": ReasoningFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    # Apriel's prompts end with the words that open the thinking.
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


class ThinkingParser:
    """A `FormatParser` that takes the thinking out and passes the rest on to `inner`.

    Only the beginning of a turn may be thinking: a tag anywhere else is text. `is_open` says that
    the prompt ended behind the opening tag. White space inside the tags and behind them is dropped,
    because templates write it anew. If the model repeats the opening tag of the prompt, the tag is
    dropped. If a turn begins with the closing tag, it has no thinking.
    """

    def __init__(self, tags: ReasoningFormat, inner: FormatParser, *, is_open: bool) -> None:
        self.is_thinking = is_open
        self._opening = tags.open.strip()
        self._close = tags.close
        self._inner = inner if tags.wrapper is None else _Unwrapped(tags, inner)
        self._pending = ""
        self._may_begin = True
        self._drops_space = is_open

    @property
    def num_calls(self) -> int:
        return self._inner.num_calls

    def feed(self, text: str) -> list[Delta]:
        self._pending += text
        deltas: list[Delta] = []
        if self._may_begin:
            begin = self._pending.lstrip()
            tags = self._opening, self._close
            tag = next(filter(begin.startswith, tags), "")
            if not tag and any(text.startswith(begin) for text in tags):
                return deltas
            self._may_begin = False
            if tag:
                self._pending = begin[len(tag) :]
                self.is_thinking = tag == self._opening
                self._drops_space = True
        if self._drops_space:
            self._pending = self._pending.lstrip()
            self._drops_space = not self._pending
        if self.is_thinking:
            thought, close, rest = self._pending.partition(self._close)
            if not close:
                thought = thought[: len(thought) - overlap(thought, self._close)]
            deltas += _thoughts(thought.rstrip())
            if not close:
                self._pending = self._pending[len(thought.rstrip()) :]
                return deltas
            self.is_thinking = False
            self._pending = rest.lstrip()
            self._drops_space = not self._pending
        pending = self._pending
        self._pending = ""
        return [*deltas, *self._inner.feed(pending)] if pending else deltas

    def close(self, *, is_cut: bool = False) -> list[Delta]:
        pending = self._pending
        self._pending = ""
        if self.is_thinking:
            pending = pending.lstrip() if self._drops_space else pending
            return [*_thoughts(pending.rstrip()), *self._inner.close(is_cut=is_cut)]
        return [*self._inner.feed(pending), *self._inner.close(is_cut=is_cut)]


class _Unwrapped:
    """Drops the tags around an answer, if the answer begins with the first of them.

    With `opens_answer` the later tags are dropped in any case.
    """

    is_thinking = False

    def __init__(self, tags: ReasoningFormat, inner: FormatParser) -> None:
        self._opening, *self._closing = tags.wrapper or ("",)
        self._opens_answer = tags.opens_answer
        self._inner = inner
        self._may_begin = True
        self._pending = ""

    @property
    def num_calls(self) -> int:
        return self._inner.num_calls

    def feed(self, text: str) -> list[Delta]:
        self._pending += text
        deltas: list[Delta] = []
        if self._may_begin:
            begin = self._pending.lstrip()
            if begin.startswith(self._opening):
                self._pending = begin[len(self._opening) :]
            elif self._opening.startswith(begin):
                return deltas
            elif not self._opens_answer:
                self._closing = []
            self._may_begin = False
        places = places_of(self._pending, self._closing)
        while places:
            at, tag = min(places)
            before = self._pending[:at]
            self._pending = self._pending[at + len(tag) :]
            self._closing = self._closing[self._closing.index(tag) + 1 :]
            deltas += self._inner.feed(before)
            places = places_of(self._pending, self._closing)
        kept = max((overlap(self._pending, tag) for tag in self._closing), default=0)
        passed = self._pending[: len(self._pending) - kept]
        self._pending = self._pending[len(passed) :]
        return [*deltas, *self._inner.feed(passed)] if passed else deltas

    def close(self, *, is_cut: bool = False) -> list[Delta]:
        pending = self._pending
        self._pending = ""
        pending = "" if is_cut and is_begun_markup(pending) else pending
        return [*self._inner.feed(pending), *self._inner.close(is_cut=is_cut)]


def _thoughts(text: str) -> list[Delta]:
    return [ThinkingDelta(text)] if text else []
