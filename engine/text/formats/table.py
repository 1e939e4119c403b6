"""The formats in which models write tool calls, as data. A format in no table can be derived.

A format has the name of vLLM's `--tool-call-parser` for it, if there is one. A format is never
chosen by its name or by words in a template. Instead `engine.text.formats.proof` renders a call,
and takes the format whose parser reads exactly that call.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from string import ascii_lowercase
from typing import Any

from engine.protocol import Tool
from engine.text.formats.arguments import (
    ALL_TYPES,
    LiteralSyntax,
    TagSyntax,
)
from engine.text.formats.calls import (
    CallParser,
    CallSyntax,
    FormatParser,
    PlainText,
    starts_of,
)
from engine.text.formats.matching import SPACE, Maybe, Space, pattern_of, places_of, template_text
from engine.text.formats.reasoning import MESSAGES, MessagesParser, MessageSyntax
from engine.text.template.messages import CallTexts

_LIST = Space(",;")
"""The text between the calls of a list."""


def _syntax(way: CallTexts, arguments: TagSyntax | LiteralSyntax | None) -> CallSyntax:
    """The markup by which calls are read that are written in this way."""
    head, _, tail = way.call.replace("{more}", "").partition("{input}")
    opens = way.begin.rstrip()
    closes = way.end.lstrip()
    separator = _LIST if way.separator.strip() in (",", ";") else SPACE
    begin = object_begin(head, tail)
    if begin is not None and arguments is None:
        # A call that is one JSON object is read as an object, whatever the order of its keys.
        head = head[:begin]
        tail = tail[tail.index("}") + 1 :]
        separator = _LIST
    opening = pattern_of(opens)
    closing = pattern_of(closes)
    if begin is not None or opens.endswith("["):
        # The markup stands around a list of JSON or Python. If there is other markup, the list's
        # brackets may be missing.
        before = opens.removesuffix("[").rstrip()
        behind = closes.removeprefix("]").lstrip()
        if before and not before[-1].isalnum():
            opening = (*pattern_of(before), SPACE, Maybe(("[",)))
        if behind:
            closing = (Maybe(("]",)), SPACE, *pattern_of(behind))
    if isinstance(arguments, LiteralSyntax):
        arguments = replace(arguments, end=tail[0])
        tail = tail[1:]
    elif arguments is not None:
        others = (template_text(closes),) if closes else ()
        arguments = replace(arguments, end=tail.strip(), others=others)
        tail = ""
    return CallSyntax(
        opens=(*opening, SPACE) if opening else (),
        head=pattern_of(head.lstrip()),
        tail=pattern_of(tail.lstrip()),
        separator=separator,
        closes=closing,
        arguments=arguments,
    )


def object_begin(head: str, tail: str) -> int | None:
    """The place in the head at which a JSON object begins that is the whole call; None if the call
    is no object."""
    fill = {"{name}": "n", "{digits}": "0", "{id}": "i", "{more}": ""}
    for brace in re.finditer(r"\{(?!\w+\})", head):
        at = brace.start()
        text = head[at:] + '{"":0}' + tail
        for place, value in fill.items():
            text = text.replace(place, value)
        try:
            read, _ = json.JSONDecoder().raw_decode(text)
        except ValueError:
            continue
        if isinstance(read, dict) and len(read) > 1:
            return at
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes calls, and how they are read."""

    # The ways in which templates write calls. A model's way is the first that its template renders.
    call_texts: tuple[CallTexts, ...]
    # The ways in which calls are read. Models write in more ways than templates do.
    ways: tuple[CallSyntax, ...] = ()
    # The texts of the format's markup. They may be control tokens.
    markers: frozenset[str] = frozenset()
    # The messages of a turn, in which calls stand; None if a turn has no messages.
    messages: MessageSyntax | None = None

    @property
    def opening(self) -> str:
        """The text with which a template in this format begins calls. Models may leave it out."""
        return next(iter(self.starts), "")

    @property
    def arguments(self) -> TagSyntax | LiteralSyntax | None:
        """The notation of inputs; None if they are JSON."""
        return self.ways[0].arguments if self.ways else None

    @property
    def starts(self) -> tuple[str, ...]:
        """The texts by which calls are found in a turn; none if calls need no such text."""
        if self.messages is not None or any(way.begins_turn for way in self.ways):
            return ()
        return starts_of(self.ways)

    def new_parser(self, tools: Sequence[Tool]) -> FormatParser:
        calls = CallParser(self.ways, tools) if self.ways else None
        if self.messages is not None:
            return MessagesParser(self.messages, tools, calls)
        return calls or PlainText()


def format_of(
    *ways: CallTexts, arguments: TagSyntax | LiteralSyntax | None = None, **flags: Any
) -> CallFormat:
    """A format from its texts, which may have the optional parts of `pattern_of`.

    `flags` are fields of its `CallSyntax`.
    """
    syntaxes: list[CallSyntax] = []
    for way in ways:
        syntax = replace(_syntax(way, arguments), **flags)
        if syntax not in syntaxes:
            syntaxes.append(syntax)
    return CallFormat(
        call_texts=tuple(
            CallTexts(
                call=template_text(way.call),
                begin=template_text(way.begin),
                separator=template_text(way.separator),
                end=template_text(way.end),
                assign=arguments.assign if isinstance(arguments, LiteralSyntax) else "",
            )
            for way in ways
        ),
        ways=tuple(syntaxes),
        markers=_markers(syntaxes),
    )


def _markers(ways: Sequence[CallSyntax]) -> frozenset[str]:
    return frozenset[str]().union(*(way.markers for way in ways))


def with_ways_of(call_format: CallFormat, others: Sequence[str]) -> CallFormat:
    """The format, which also reads what the `others` of the table read."""
    ways = list(call_format.ways)
    for name in others:
        ways.extend(TOOL_FORMATS[name].ways)
    unique = tuple(way for at, way in enumerate(ways) if way not in ways[:at])
    return replace(call_format, ways=unique, markers=call_format.markers | _markers(unique))


def _in_messages(name: str, *ways: CallTexts, calls: CallFormat | None = None) -> CallFormat:
    messages = MESSAGES[name]
    call_format = calls or CallFormat(call_texts=ways)
    return replace(
        call_format,
        call_texts=ways,
        messages=messages,
        markers=call_format.markers | messages.markers,
    )


def _between(
    begin: str,
    call: str,
    end: str,
    separator: str = "",
    arguments: TagSyntax | LiteralSyntax | None = None,
    **flags: Any,
) -> CallFormat:
    way = CallTexts(begin=begin, call=call, separator=separator, end=end)
    return format_of(way, arguments=arguments, **flags)


_OBJECT = '{"name": "{name}", "arguments": {input}}'
_PARAMETERS = '{"name": "{name}", "parameters": {input}}'


def _objects(opening: str, closing: str, *more: str) -> CallFormat:
    """`OPENING[{"name": …, "arguments": …}, …]CLOSING`. `more` are openings without a closing."""
    ways = [CallTexts(begin=f"{opening}[", call=_OBJECT, separator=", ", end=f"]{closing}")]
    for start in more:
        ways.append(CallTexts(begin=f"{start}[", call=_OBJECT, separator=", ", end="]"))
    return format_of(*ways)


def _python(opening: str, closing: str, separator: str = ", ") -> CallFormat:
    is_list = separator == ", "
    begin = f"{opening}[" if is_list else opening
    end = f"]{closing}" if is_list else closing
    call = "{name}‹\n›({input})"
    arguments = LiteralSyntax(assign="=")
    return _between(begin, call, end, separator, arguments, knows_names=not opening)


def _gemma(opening: str, closing: str, quote: str) -> CallFormat:
    call = "call:{name}‹\n›{{input}}"
    arguments = LiteralSyntax(assign=":", quote=quote)
    return _between(opening, call, closing, closing + opening, arguments)


def _qwen3_coder(opens: str, closes: str, *, has_lines: bool) -> CallFormat:
    ways = [
        CallTexts(
            begin=f"{opens}\n",
            call="<function={name}>\n{input}</function>",
            separator=f"\n{closes}{between}{opens}\n",
            end=f"\n{closes}",
        )
        for between in ("\n", "")
    ]
    tags = TagSyntax(open="<parameter={key}>", close="</parameter>", has_lines=has_lines)
    return format_of(*ways, arguments=tags)


def _invoke(
    block: str, tag: str, kind: str = "", kinds: dict[str, str] | None = None
) -> CallFormat:
    """The format of MiniMax M2, and of DeepSeek since V3.2. `tag` begins the names of tags."""
    call = f'<{tag}invoke name="{{name}}">\n{{input}}</{tag}invoke>'
    tags = TagSyntax(
        open=f'<{tag}parameter name="{{key}}"{kind}>',
        close=f"</{tag}parameter>",
        kinds=kinds or {},
    )
    return _between(f"<{block}>\n", call, f"\n</{block}>", "\n", tags)


_DSML = "｜DSML｜"
_DSML_KINDS = {kind: "true" if kind == "string" else "false" for kind in ALL_TYPES}
_KIMI_BEGIN = "<|tool_call_begin|>‹\n›«functions.»{name}«:»{digits}‹\n›<|tool_call_argument_begin|>"
_DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_END = "<｜tool▁calls▁end｜>"
_ELEMENT = "]<]minimax[>["
_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"

TOOL_FORMATS: dict[str, CallFormat] = {
    "hermes": format_of(
        *(
            CallTexts(
                begin=f"<tool_call>{line}",
                call=_OBJECT,
                separator=f"{line}</tool_call>{between}<tool_call>{line}",
                end=f"{line}</tool_call>",
            )
            for line, between in (("\n", "\n"), ("\n", ""), ("", "\n"), ("", ""))
        )
    ),
    "mistral": format_of(
        *(
            CallTexts(
                begin=f"[TOOL_CALLS]{space}[",
                call='{"name": "{name}", "arguments": {input}{more}}',
                separator=", ",
                end="]",
            )
            for space in (" ", "")
        ),
        CallTexts(call="[TOOL_CALLS]‹\n›{name}‹\n›«[CALL_ID]‹\n›{id}‹\n›»«[ARGS]»{input}"),
        CallTexts(call="[TOOL_CALLS]{name}[ARGS]{input}"),
    ),
    "llama3_json": replace(
        format_of(
            *(
                CallTexts(call=call, separator="; ")
                for call in (
                    _PARAMETERS,
                    '{"type": "function", "name": "{name}", "parameters": {input}}',
                    _OBJECT,
                )
            )
        ),
        ways=(CallSyntax(opens=("<|python_tag|>",), separator=_LIST, begins_turn=True),),
        markers=frozenset({"<|python_tag|>"}),
    ),
    # Llama 4 writes it beside its Python.
    "llama4_json": replace(
        _between("<|python_start|>", _PARAMETERS, "<|python_end|>"),
        ways=(
            CallSyntax(
                opens=("<|python_start|>", SPACE),
                separator=_LIST,
                closes=("<|python_end|>",),
                begins_turn=True,
            ),
        ),
    ),
    "internlm2": _between("<|action_start|><|plugin|>\n", _PARAMETERS, "<|action_end|>"),
    "openai": _in_messages(
        "openai",
        CallTexts(call=" to=functions.{name}<|channel|>commentary json<|message|>{input}<|call|>"),
        CallTexts(
            call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            "{input}<|call|>"
        ),
    ),
    "muse": _in_messages(
        "muse",
        CallTexts(
            call=' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
            "{input}</atem:invoke>\n</atem:function_calls>",
            separator="<|eom|><|start|>assistant",
        ),
        calls=_invoke("atem:function_calls", "atem:"),
    ),
    "functionary_v3": _in_messages(
        "functionary_v3", CallTexts(call="{name}\n{input}", separator=">>>")
    ),
    "glm4": _in_messages("glm4", CallTexts(call="{name}\n{input}", separator="<|assistant|>")),
    "gigachat3": _in_messages(
        "gigachat3", CallTexts(call=f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_OBJECT}")
    ),
    "qwen3_coder": _qwen3_coder("<tool_call>", "</tool_call>", has_lines=True),
    "seed_oss": _qwen3_coder("<seed:tool_call>", "</seed:tool_call>", has_lines=False),
    "glm45": format_of(
        *(
            CallTexts(call=f"<tool_call>‹\n›{{name}}{line}{{input}}</tool_call>", separator=line)
            for line in ("\n", "")
        ),
        arguments=TagSyntax(open="<arg_key>{key}</arg_key>\n<arg_value>", close="</arg_value>"),
    ),
    "minimax_m2": _invoke("minimax:tool_call", ""),
    # Each tag stands behind a token of its own. Lists and objects are elements.
    "minimax_m3": _between(
        f"{_ELEMENT}<tool_call>\n",
        f'{_ELEMENT}<invoke name="{{name}}">{{input}}{_ELEMENT}</invoke>\n',
        f"{_ELEMENT}</tool_call>",
        arguments=TagSyntax(
            open=f"{_ELEMENT}<{{key}}>", close=f"{_ELEMENT}</{{key}}>", elements=_ELEMENT
        ),
        is_opened=True,
    ),
    "deepseek_v32": _invoke(f"{_DSML}function_calls", _DSML, ' string="{kind}"', _DSML_KINDS),
    "deepseek_v4": _invoke(f"{_DSML}tool_calls", _DSML, ' string="{kind}"', _DSML_KINDS),
    "deepseek_v31": _between(_DEEPSEEK_BEGIN, _CALL.format("{name}", "{input}"), _DEEPSEEK_END),
    "deepseek_v3": _between(
        _DEEPSEEK_BEGIN,
        _CALL.format("function", "{name}\n```json\n{input}\n```‹\n›"),
        _DEEPSEEK_END,
        "\n",
    ),
    "kimi_k2": _between(
        "<|tool_calls_section_begin|>",
        _KIMI_BEGIN + "{input}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "kimi_k3": _between(
        "«<|close|>response<|sep|>»<|open|>tools<|sep|>",
        '<|open|>call tool="{name}" index="{digits}"<|sep|>{input}<|close|>call<|sep|>',
        "<|close|>tools<|sep|>‹<|close|>message<|sep|>›",
        arguments=TagSyntax(
            open='<|open|>argument key="{key}" type="{kind}"<|sep|>',
            close="<|close|>argument<|sep|>",
            kinds={kind: kind for kind in ALL_TYPES} | {"integer": "number"},
        ),
        is_opened=True,
    ),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "functionary": format_of(CallTexts(call="<function={name}>{input}</function>")),
    "cohere": _between(
        "<|START_ACTION|>[\n    ",
        '{"tool_call_id": "{digits}", "tool_name": "{name}", "parameters": {input}}',
        "\n]<|END_ACTION|>",
        ",\n    ",
    ),
    "lfm2": _python("<|tool_call_start|>", "<|tool_call_end|>"),
    "lfm2_json": _objects("<|tool_call_start|>", "<|tool_call_end|>"),
    "minicpm3": _python("<|tool_call_start|>\n```python\n", "\n```\n<|tool_call_end|>", "\n"),
    "llama4_pythonic": _python("<|python_start|>", "<|python_end|>"),
    "olmo3": _python("<function_calls>", "</function_calls>"),
    "pythonic": _python("", ""),
    "phi4_mini_json": _objects("<|tool_call|>", "<|/tool_call|>", "functools"),
    "granite": _objects("<|tool_call|>", ""),
    "nemotron_json": _objects("<TOOLCALL>", "</TOOLCALL>"),
    "jamba": _objects("<tool_calls>", "</tool_calls>"),
    # A list stands alone or in a block of code.
    "xlam": format_of(
        CallTexts(begin="[", call=_OBJECT, separator=", ", end="]"),
        CallTexts(begin="```‹json›\n[\n    ", call=_OBJECT, separator=",\n    ", end="\n]\n```"),
        knows_names=True,
    ),
}

FAMILIES = {
    "<|python_start|>": ("llama4_pythonic", "llama4_json", "pythonic"),
    "<|/tool_call|>": ("phi4_mini_json",),
    "<|tool_call_start|>": ("lfm2", "lfm2_json"),
}
"""The formats in which a model writes calls if it has this control token. Its template may write
only one of them."""


Show = Callable[[Sequence[dict[str, Any]]], str | None]
"""Returns the turn that a template writes for calls with these inputs; None if it refuses them."""

_KEYS = ("first_key", "other_key")
_VALUES = ("first value", "other value")
_ONE = dict(zip(_KEYS, _VALUES, strict=True))
_TWO = {"first_key": "third value"}
_OTHER_VALUES: dict[str, Any] = {
    "integer": 3, "number": 1.5, "boolean": True, "null": None, "array": ["x"], "object": {"k": "z"}
}  # fmt: skip
_MIN_MARKER = 3
_Atoms = list[str]
"""The smallest pieces of markup: control tokens, characters, and the places of a name and of
digits."""


@dataclass(frozen=True, slots=True)
class Derivation:
    """Derives a format from calls that a template renders."""

    # Renders calls.
    show: Show
    # The name of the tool in all calls.
    name: str
    # Finds the texts of control tokens.
    controls: "re.Pattern[str]"
    # The texts that end a turn.
    ends: Collection[str]

    def derive(self) -> CallFormat | None:
        """The format; None if the template's calls fit no form that is known here."""
        single = self.show([_ONE])
        double = self.show([_ONE, _TWO])
        if single is None or self.name not in single:
            return None
        # A call that begins with the end of a turn can't be distinguished from a turn's end.
        if any(end in single.partition(self.name)[0] for end in self.ends):
            return None
        return self._json_calls(single, double) or self._tagged_calls(single, double)

    def _json_calls(self, single: str, double: str | None) -> CallFormat | None:
        """The format of calls whose input is JSON; None if it is not.

        `single` is a turn with one call, and `double` is a turn with two.
        """
        place = _find_json(single, _ONE)
        if place is None:
            return None
        begin, end = place
        middle = None if double is None else self._between_inputs(double)
        call_texts = _call_texts(self._atoms(single[:begin]), self._behind(single[end:]), middle)
        if call_texts is None:
            return None
        head, _, tail = call_texts.call.partition("{input}")
        if '"name"' in head and object_begin(head, tail) is None:
            return None
        return _usable(format_of(call_texts, is_opened=bool(call_texts.begin)))

    def _between_inputs(self, double: str) -> _Atoms | None:
        """The markup between the inputs of a turn's two calls; None if they are no JSON."""
        first = _find_json(double, _ONE)
        if first is None:
            return None
        second = _find_json(double, _TWO, first[1])
        return None if second is None else self._atoms(double[first[1] : second[0]])

    def _tagged_calls(self, single: str, double: str | None) -> CallFormat | None:
        """The format of calls whose arguments stand between tags, one by one; None if they do
        not."""
        words = [_KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1]]
        any_word = re.compile("|".join(map(re.escape, words)))
        pieces = any_word.split(single)
        if len(pieces) != 5 or any_word.findall(single) != words:
            return None
        opening, assign, gap, again, rest = pieces
        between = self._atoms(gap)
        before = self._atoms(opening)
        num_open = _num_alike(before[::-1], between[::-1])
        opened = between[len(between) - num_open :]
        closed = "".join(between[: len(between) - num_open])
        close = closed.rstrip()
        kinds = self._kinds(assign, close)
        if assign != again or not num_open or not close or not rest.startswith(close):
            return None
        if kinds is None:
            return None
        middle: _Atoms | None = None
        begin = single[: len(single) - len(rest)] + close
        if double is not None and double.startswith(begin):
            # The markup between the arguments of two calls.
            third = _KEYS[0] + assign + _TWO[_KEYS[0]]
            at = double.find(_KEYS[0], len(begin))
            if double.startswith(third, at):
                middle = self._atoms(double[len(begin) : at])[:-num_open]
        behind = self._behind(rest[len(close) :])
        call_texts = _call_texts(
            before[: len(before) - num_open], behind, middle, closed[len(close) :]
        )
        if call_texts is None or not call_texts.call.partition("{input}")[2].strip():
            return None
        has_lines = assign.endswith("\n") and close.startswith("\n")
        if has_lines:
            assign = assign[:-1]
            close = close[1:]
        if kinds:
            head, _, tail = assign.rpartition(kinds["string"])
            assign = f"{head}{{kind}}{tail}"
        # Does the template write a string with markup as character data of XML?
        with_markup = self.show([{_KEYS[0]: "<x>&\n", _KEYS[1]: _VALUES[1]}]) or ""
        tags = TagSyntax(
            open="".join(opened) + "{key}" + assign,
            close=close,
            has_lines=has_lines,
            kinds=kinds,
            has_cdata="<![CDATA[<x>&\n]]>" in with_markup,
        )
        return _usable(format_of(call_texts, arguments=tags, is_opened=bool(call_texts.begin)))

    def _kinds(self, assign: str, close: str) -> Mapping[str, str] | None:
        """The tag's word for each JSON type; empty if the tag has no such word.

        The result is None if the template writes types in another way.
        """
        kinds: dict[str, str] = {}
        word = re.compile("[a-z]+")
        for kind, value in _OTHER_VALUES.items():
            turn = self.show([{_KEYS[0]: value, _KEYS[1]: _VALUES[1]}])
            if turn is None or _KEYS[0] not in turn:
                return None
            behind = turn.partition(_KEYS[0])[2]
            if not behind.startswith(assign):
                # The word at which `assign` and this text differ.
                at = len(assign[: _num_alike(assign, behind)].rstrip(ascii_lowercase))
                string_word = word.match(assign, at)
                kind_word = word.match(behind, at)
                if string_word is None or kind_word is None:
                    return None
                if not behind.startswith(assign[string_word.end() :], kind_word.end()):
                    return None
                kinds["string"] = string_word.group()
                kinds[kind] = kind_word.group()
        return kinds if not kinds or set(kinds) == ALL_TYPES else None

    def _behind(self, text: str) -> _Atoms:
        """The markup up to the turn's end. If no end is in the text, the last control token is
        taken for it."""
        ends = [at for at, _ in places_of(text, self.ends)]
        if not ends:
            ends = [control.end() for control in self.controls.finditer(text)][-1:]
        return self._atoms(text[: min(ends)] if ends else text)

    def _atoms(self, text: str) -> _Atoms:
        atom = re.compile(
            rf"(?:{self.controls.pattern})|(?P<name>{re.escape(self.name)})|(?P<digits>\d+)|(?s:.)"
        )
        return [
            f"{{{atom_match.lastgroup}}}" if atom_match.lastgroup else atom_match.group()
            for atom_match in atom.finditer(text)
        ]


def _call_texts(
    before: _Atoms, behind: _Atoms, middle: _Atoms | None, gap: str = ""
) -> CallTexts | None:
    """The texts of calls, from the markup `before` and `behind` the input of a single call.

    `middle` is the markup between the inputs of two calls; None if it is not known. `gap` is the
    white space behind an argument, which belongs to the input. The result is None if the head of a
    call does not have the name exactly once.
    """
    num_head = len(before)
    num_tail = len(behind)
    rest = _Atoms()
    if middle is not None:
        num_head = _num_alike(before[::-1], middle[::-1])
        rest = middle[: len(middle) - num_head]
        num_tail = _num_alike(behind, rest)
    head = before[len(before) - num_head :]
    if head.count("{name}") != 1:
        return None
    return CallTexts(
        begin="".join(before[: len(before) - num_head]),
        call="".join(head) + "{input}" + "".join(behind[:num_tail]).removeprefix(gap),
        separator="".join(rest[num_tail:]),
        end="".join(behind[num_tail:]),
    )


def _find_json(text: str, value: Mapping[str, Any], begin: int = 0) -> tuple[int, int] | None:
    """The begin and end of the first place where a text has the value as JSON."""
    for brace in re.compile(r"\{").finditer(text, begin):
        try:
            read, end = json.JSONDecoder().raw_decode(text, brace.start())
        except ValueError:
            continue
        if read == value:
            return brace.start(), end
    return None


def _usable(call_format: CallFormat) -> CallFormat | None:
    """The format; None if its calls can't be distinguished from text or from each other."""
    if not call_format.starts or any(
        len(s) < _MIN_MARKER or s[0].isalnum() for s in call_format.starts
    ):
        return None
    return None if re.sub(r"[\s,;]", "", call_format.call_texts[0].separator) else call_format


def _num_alike(left: Sequence[str], right: Sequence[str]) -> int:
    """The number of first elements that are equal."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
