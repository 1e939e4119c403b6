"""Renders a model's chat template as transformers does, with cuts and marks in the prompt.

The environment is that of transformers' `utils/chat_template_utils.py`: sandboxed, trimmed blocks,
loop controls, `generation` blocks, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`.

A client may write the text of a control token. A *cut* is put into each such text, so that neither
the template nor the tokenizer takes it for the real token. *Marks* go around each segment's
content. Their places in the rendered text are the segment's place. Cuts and marks are characters
that do not occur in the prompt. So the text without them is the text that the prompt would give.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequest
from engine.text.rendered import TemplateRefused

# The two private planes come first, because their characters are the rarest in real text.
_RANGES = ((0xF0000, 0xFFFFD), (0x100000, 0x10FFFD), (0xE000, 0xF8FF))
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_RARE = re.compile("[\U0002a000-\U0002a6dd]")
# Cuts are rare letters. Some templates write a text as Python's `repr` does, which keeps letters.
_CUTS = range(0x2A000, 0x2A6DE)


def choose_cut(texts: Iterable[str]) -> str:
    """A character for cuts that occurs in none of the texts. Raise InvalidRequest if none is
    left."""
    used = set(chain.from_iterable(map(_RARE.findall, texts)))
    cut = next((chr(code) for code in _CUTS if chr(code) not in used), "")
    if not cut:
        raise InvalidRequest("the prompt has too many rare letters")
    return cut


class MarkAlphabet:
    """Characters for marks, none of which occurs in the given texts. `num_free` are left."""

    def __init__(self, texts: Iterable[str]) -> None:
        used = set(chain.from_iterable(map(_PRIVATE.findall, texts)))
        self.num_free = sum(last - first + 1 for first, last in _RANGES) - len(used)
        codes = chain.from_iterable(range(first, last + 1) for first, last in _RANGES)
        self._free = (mark for mark in map(chr, codes) if mark not in used)

    def take(self) -> str:
        """A mark that was not taken before. Raise InvalidRequest if none is left."""
        mark = next(self._free, None)
        if mark is None:
            raise InvalidRequest("the prompt has too many private-use characters")
        self.num_free -= 1
        return mark


@dataclass(frozen=True, slots=True)
class SegmentMarks:
    """The pair of marks around one segment's content."""

    begin: str
    end: str
    # The pairs for the fields of a segment that is a JSON object. A template that writes an object
    # key by key loses the pair around the whole object.
    inner: "tuple[SegmentMarks, ...]" = ()


class Marked:
    """A JSON value that `tojson` and `str` write with marks around it.

    A template that reads its keys and values gets the value's own.
    """

    marks: SegmentMarks
    # The content without inner marks, which `tojson` and `str` write.
    plain: Any

    def __str__(self) -> str:
        return f"{self.marks.begin}{self.plain}{self.marks.end}"


_MARKED: dict[type, Any] = {
    kind: type(f"Marked{kind.__name__.title()}", (Marked, kind), {})
    for kind in (dict, list, int, float)
}


class WrittenInput(str):
    """A call's input that is no JSON object. `tojson` writes it as the client wrote it."""


def mark_value(value: Any, marks: SegmentMarks, plain: Any = None) -> Any:
    """The JSON value, which is written with the marks around it. True, false and null get none.

    `plain` is the content that is written; None: the value itself.
    """
    if isinstance(value, str):
        return surround(value, marks)
    kind = _MARKED.get(type(value))
    if kind is None:
        return value
    marked: Marked = kind(value)
    marked.marks = marks
    marked.plain = value if plain is None else plain
    return marked


def surround(text: str, marks: SegmentMarks) -> str:
    """Put the marks around the text, inside its outer white space.

    So a template that trims removes the same white space with and without marks.
    """
    body = text.strip()
    if not body:
        return text
    begin = text.index(body)
    end = begin + len(body)
    return text[:begin] + marks.begin + body + marks.end + text[end:]


@dataclass(frozen=True, slots=True)
class Unmarked:
    """A text without its marks."""

    text: str
    # By mark: the characters of `text` before which the mark stood, in order.
    positions: dict[str, list[int]]


def take_out(text: str, marks: frozenset[str]) -> Unmarked:
    """Take the marks out of a text."""
    pieces: list[str] = []
    positions: dict[str, list[int]] = {}
    length = 0
    last = 0
    for match in _PRIVATE.finditer(text):
        mark = match.group()
        if mark not in marks:
            continue
        piece = text[last : match.start()]
        pieces.append(piece)
        length += len(piece)
        last = match.end()
        positions.setdefault(mark, []).append(length)
    pieces.append(text[last:])
    return Unmarked("".join(pieces), positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInput:
    """A template's variables of a prompt: messages and tools in OpenAI's form."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    add_generation_prompt: bool = True
    thinking: bool = False


class TemplateFails(InvalidRequest):
    """A template failed on the prompt. It did not refuse the prompt by intention."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """transformers' sandbox, in which lists may also grow and shrink.

    The templates of Kimi K2 and DeepSeek V3.2 keep queues in lists. Dictionaries can't be changed.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, list) and attr in ("append", "extend", "insert", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training. Its content is rendered as it
    is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's chat template. One thread at a time may use it.

    `sources` are templates by name: `default`, and `tool_use` if prompts with tools have their own.
    `special_tokens` (`bos_token`, …) are variables of the template. `now` gives the moment that a
    template writes.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        def raise_exception(message: str) -> None:
            raise _RaisedByTemplate(message)

        self.now = now
        self._moment: datetime | None = None
        sandbox = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        sandbox.filters["tojson"] = write_json
        sandbox.globals["raise_exception"] = raise_exception
        sandbox.globals["strftime_now"] = lambda form: (self._moment or self.now()).strftime(form)
        try:
            self._templates = {name: sandbox.from_string(text) for name, text in sources.items()}
        except TemplateError as error:
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise TemplateRefused(f"the chat template does not compile: {line}{error}") from error
        if "default" not in self._templates:
            raise TemplateRefused("the model has no chat template")
        self._special_tokens = dict(special_tokens)
        self.source = "\n".join(sources.values())
        # Find a variable that the template can't take as transformers gives it. Qwen3.8-Max refuses
        # every prompt that turns thinking off, because its model always thinks. Some templates ask
        # only whether tools are defined, and fail on `None`.
        probe = TemplateInput(messages=[{"role": "user", "content": "probe-user"}], tools=[])
        for refused in ((False, False), (True, False), (False, True)):
            self._always_thinks, self._omits_tools = refused
            with suppress(InvalidRequest):
                self.render(probe)
                break
        else:
            self._always_thinks = False
            self._omits_tools = False

    @property
    def writes_date(self) -> bool:
        """Whether the template asks for the date."""
        return "strftime_now" in self.source

    @contextmanager
    def at(self, moment: datetime) -> Iterator[None]:
        """Inside this context the template writes this moment."""
        self._moment = moment
        try:
            yield
        finally:
            self._moment = None

    def render(self, variables: TemplateInput) -> str:
        """The rendered text.

        Raises InvalidRequest if the template refuses the messages, and TemplateFails if it fails on
        them.
        """
        name = "tool_use" if variables.tools and "tool_use" in self._templates else "default"
        thinking = variables.thinking or self._always_thinks
        tools = (
            {} if self._omits_tools and not variables.tools else {"tools": variables.tools or None}
        )
        try:
            return self._templates[name].render(
                messages=variables.messages,
                documents=None,
                add_generation_prompt=variables.add_generation_prompt,
                # Qwen3's name of the variable, and DeepSeek-V3.1's.
                enable_thinking=thinking,
                thinking=thinking,
                **tools,
                **self._special_tokens,
            )
        except _RaisedByTemplate as error:
            raise InvalidRequest(f"the chat template refuses the prompt: {error}") from error
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # The error's text may quote the prompt, so the message has only its type.
            kind = type(error).__name__
            raise TemplateFails(f"the chat template fails on the prompt: {kind}") from error
        except RecursionError as error:
            raise TemplateFails("the chat template does not end on the prompt") from error


class _RaisedByTemplate(TemplateError):
    """The template called `raise_exception`."""


_MARKED_DEPTH = 4
"""The depth of marked inputs in a list of calls that a template writes as a whole."""
# Private-use characters are not escaped, because they may be marks.
_ASCII_ESCAPED = re.compile("[^\x00-\x7f\ue000-\uf8ff\U000f0000-\U0010ffff]")


def write_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers' `tojson` does, with the marks around marked values."""
    if isinstance(value, WrittenInput):
        return str(value)
    dump = partial(
        json.dumps, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    marked_values: list[Marked] = []
    text = dump(_without_marked(value, marked_values, _MARKED_DEPTH))
    for marked in marked_values:
        before, _, behind = text.partition(f'"{marked.marks.begin}"')
        line = before[before.rfind("\n") + 1 :]
        margin = line[: len(line) - len(line.lstrip())]
        inner = dump(marked.plain).replace("\n", "\n" + margin)
        text = f"{before}{marked.marks.begin}{inner}{marked.marks.end}{behind}"
    if ensure_ascii:
        text = _ASCII_ESCAPED.sub(lambda match: json.dumps(match.group())[1:-1], text)
    return text


def _without_marked(value: Any, marked_values: list[Marked], depth: int) -> Any:
    """The value, in which each marked value is replaced by its first mark.

    The marked values are added to `marked_values`.
    """
    if isinstance(value, Marked):
        marked_values.append(value)
        return value.marks.begin
    if depth == 0 or not isinstance(value, dict | list | tuple):
        return value
    if isinstance(value, dict):
        return {key: _without_marked(item, marked_values, depth - 1) for key, item in value.items()}
    return [_without_marked(item, marked_values, depth - 1) for item in value]
