"""The formats in which models write tool calls, as data.

The names are those of vLLM's `--tool-call-parser` where it has one. A format is never chosen by its
name or by words in a template: `engine.text.formats.proof` renders a call and takes the format
whose parser reads back exactly that call.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.protocol import Tool
from engine.text.formats import harmony
from engine.text.formats.arguments import ALL_TYPES, LiteralSyntax, TagSyntax
from engine.text.formats.calls import CallParser, CallSyntax, FormatParser
from engine.text.formats.harmony import HarmonyParser
from engine.text.formats.patterns import SPACE, Maybe, Pattern, Space, pattern_of, written
from engine.text.template.messages import Written

_LIST = Space(",;")
"""What stands between the calls of a list."""


def _syntax(way: Written, arguments: TagSyntax | LiteralSyntax | None) -> CallSyntax:
    """How calls that are written so are read."""
    head, _, tail = way.call.replace("{more}", "").partition("{input}")
    opens, closes = way.begin.rstrip(), way.end.lstrip()
    separator = _LIST if way.separator.strip() in (",", ";") else SPACE
    begin = object_begin(head, tail)
    if begin is not None and arguments is None:
        # A call that is one object of JSON is read as such, whatever the order of its keys.
        head, tail, separator = head[:begin], tail[tail.index("}") + 1 :], _LIST
    opening, closing = pattern_of(opens), pattern_of(closes)
    if begin is not None or opens.endswith("["):
        opening, closing = _list(opens, closes)
    if isinstance(arguments, LiteralSyntax):
        arguments, tail = replace(arguments, end=tail[0]), tail[1:]
    elif arguments is not None:
        others = (written(closes),) if closes else ()
        arguments, tail = replace(arguments, end=tail.strip(), others=others), ""
    return CallSyntax(
        opens=(*opening, SPACE) if opening else (),
        head=_stripped(pattern_of(head)),
        tail=_stripped(pattern_of(tail)),
        separator=separator,
        closes=closing,
        arguments=arguments,
    )


def _list(opens: str, closes: str) -> tuple[Pattern, Pattern]:
    """Around a list of JSON or Python; its brackets may be missing beside other markup."""
    before, behind = opens.removesuffix("[").rstrip(), closes.removeprefix("]").lstrip()
    opening: Pattern = pattern_of(opens)
    closing: Pattern = pattern_of(closes)
    if before:
        opening = (*pattern_of(before), SPACE, Maybe(("[",)))
    if behind:
        closing = (Maybe(("]",)), SPACE, *pattern_of(behind))
    return opening, closing


def _stripped(pattern: Pattern) -> Pattern:
    return pattern[1:] if pattern[:1] == (SPACE,) else pattern


def object_begin(head: str, tail: str) -> int | None:
    """Where in the head the object of JSON begins that the whole call is."""
    fill = {"{name}": "n", "{digits}": "0", "{id}": "i", "{more}": ""}
    for at in (found.start() for found in re.finditer(r"\{(?!\w+\})", head)):
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


NewParser = Callable[[Callable[[], str], Sequence[Tool]], FormatParser]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """One way to write calls.

    `opening` is what every call of a template in this format begins with, though models may leave
    it out. `markers` are the texts it is made of, which may be control tokens. Of `written`, the
    first whose call is what the template renders is the model's. `in_content`: where a template
    renders no calls, they are written into the text of the turn. `ways` are what is read, empty
    where a parser of its own reads it. `arguments` is the notation of inputs that are no JSON.
    """

    written: tuple[Written, ...]
    ways: tuple[CallSyntax, ...] = ()
    markers: frozenset[str] = frozenset()
    in_content: bool = False
    parser: NewParser | None = field(default=None, compare=False)

    @property
    def opening(self) -> str:
        return next(iter(self.starts), "")

    @property
    def arguments(self) -> TagSyntax | LiteralSyntax | None:
        return self.ways[0].arguments if self.ways else None

    @property
    def starts(self) -> tuple[str, ...]:
        """The texts at which calls are looked for; none where they need no such text."""
        if any(way.begins_turn for way in self.ways):
            return ()
        return tuple(dict.fromkeys(start for way in self.ways for start in way.starts))

    def new_parser(self, new_id: Callable[[], str], tools: Sequence[Tool]) -> FormatParser:
        if self.parser is not None:
            return self.parser(new_id, tools)
        return CallParser(self.ways, new_id, tools)


def format_of(
    *ways: Written,
    arguments: TagSyntax | LiteralSyntax | None = None,
    in_content: bool = False,
    **flags: Any,
) -> CallFormat:
    """From the texts of a format, with parts that `pattern_of` takes for others than they are
    written; `flags` are fields of its `CallSyntax`."""
    found: list[CallSyntax] = []
    for way in ways:
        syntax = replace(_syntax(way, arguments), **flags)
        if syntax not in found:
            found.append(syntax)
    return CallFormat(
        written=tuple(
            Written(
                call=written(way.call),
                begin=written(way.begin),
                separator=written(way.separator),
                end=written(way.end),
            )
            for way in ways
        ),
        ways=tuple(found),
        markers=frozenset(marker for way in found for marker in way.markers),
        in_content=in_content,
    )


_OBJECT = '{"name": "{name}", "arguments": {input}}'


def _objects(
    opening: str, closing: str, call: str = _OBJECT, *, in_content: bool = False
) -> CallFormat:
    """`OPENING[{"name": …, "arguments": …}, …]CLOSING`."""
    way = Written(begin=f"{opening}[", call=call, separator=", ", end=f"]{closing}")
    return format_of(way, in_content=in_content)


def _python(opening: str, closing: str) -> CallFormat:
    return format_of(
        Written(begin=f"{opening}[", call="{name}‹\n›({input})", separator=", ", end=f"]{closing}"),
        arguments=LiteralSyntax(assign="="),
        knows_names=not opening,
    )


def _gemma(opening: str, closing: str, quote: str) -> CallFormat:
    return format_of(
        Written(
            begin=opening,
            call="call:{name}‹\n›{{input}}",
            separator=closing + opening,
            end=closing,
        ),
        arguments=LiteralSyntax(assign=":", quote=quote),
    )


def _qwen3_coder(opens: str, closes: str, *, has_lines: bool) -> CallFormat:
    ways = [
        Written(
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
    """MiniMax's M2 and DeepSeek's since V3.2: `tag` stands in front of the names of tags."""
    return format_of(
        Written(
            begin=f"<{block}>\n",
            call=f'<{tag}invoke name="{{name}}">\n{{input}}</{tag}invoke>',
            separator="\n",
            end=f"\n</{block}>",
        ),
        arguments=TagSyntax(
            open=f'<{tag}parameter name="{{key}}"{kind}>',
            close=f"</{tag}parameter>",
            kinds=kinds or {},
        ),
    )


_DSML = "｜DSML｜"
_DSML_KINDS = {kind: "true" if kind == "string" else "false" for kind in ALL_TYPES}
_KIMI_BEGIN = "<|tool_call_begin|>‹\n›«functions.»{name}«:»{digits}‹\n›<|tool_call_argument_begin|>"
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_ELEMENT = "]<]minimax[>["
_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"

TOOL_FORMATS: dict[str, CallFormat] = {
    "hermes": format_of(
        *(
            Written(
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
            Written(
                begin=f"[TOOL_CALLS]{space}[",
                call='{"name": "{name}", "arguments": {input}{more}}',
                separator=", ",
                end="]",
            )
            for space in (" ", "")
        ),
        Written(call="[TOOL_CALLS]‹\n›{name}‹\n›«[CALL_ID]‹\n›{id}‹\n›»«[ARGS]»{input}"),
        Written(call="[TOOL_CALLS]{name}[ARGS]{input}"),
    ),
    "llama3_json": replace(
        format_of(
            *(
                Written(call=call, separator="; ")
                for call in (
                    '{"name": "{name}", "parameters": {input}}',
                    '{"type": "function", "name": "{name}", "parameters": {input}}',
                    _OBJECT,
                )
            )
        ),
        ways=(CallSyntax(opens=("<|python_tag|>",), separator=_LIST, begins_turn=True),),
        markers=frozenset({"<|python_tag|>"}),
    ),
    # What Llama 4 writes beside its Python.
    "llama4_json": replace(
        format_of(
            Written(
                begin="<|python_start|>",
                call='{"name": "{name}", "parameters": {input}}',
                end="<|python_end|>",
            )
        ),
        ways=(
            CallSyntax(
                opens=("<|python_start|>", SPACE),
                separator=_LIST,
                closes=("<|python_end|>",),
                begins_turn=True,
            ),
        ),
    ),
    "internlm2": format_of(
        Written(
            begin="<|action_start|><|plugin|>\n",
            call='{"name": "{name}", "parameters": {input}}',
            end="<|action_end|>",
        )
    ),
    "openai": CallFormat(
        parser=lambda new_id, tools: HarmonyParser(new_id, [tool.name for tool in tools]),
        markers=harmony.MARKERS,
        written=(
            Written(
                call=" to=functions.{name}<|channel|>commentary json<|message|>{input}<|call|>"
            ),
            Written(
                call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
                "{input}<|call|>"
            ),
        ),
    ),
    "qwen3_coder": _qwen3_coder("<tool_call>", "</tool_call>", has_lines=True),
    "seed_oss": _qwen3_coder("<seed:tool_call>", "</seed:tool_call>", has_lines=False),
    "glm45": format_of(
        *(
            Written(call=f"<tool_call>‹\n›{{name}}{line}{{input}}</tool_call>", separator=line)
            for line in ("\n", "")
        ),
        arguments=TagSyntax(open="<arg_key>{key}</arg_key>\n<arg_value>", close="</arg_value>"),
    ),
    "minimax_m2": _invoke("minimax:tool_call", ""),
    # Each tag stands behind a token of its own; lists and objects are elements in elements.
    "minimax_m3": format_of(
        Written(
            begin=f"{_ELEMENT}<tool_call>\n",
            call=f'{_ELEMENT}<invoke name="{{name}}">{{input}}{_ELEMENT}</invoke>\n',
            end=f"{_ELEMENT}</tool_call>",
        ),
        arguments=TagSyntax(
            open=f"{_ELEMENT}<{{key}}>", close=f"{_ELEMENT}</{{key}}>", elements=_ELEMENT
        ),
        is_opened=True,
    ),
    "deepseek_v32": _invoke(f"{_DSML}function_calls", _DSML, ' string="{kind}"', _DSML_KINDS),
    "deepseek_v4": _invoke(f"{_DSML}tool_calls", _DSML, ' string="{kind}"', _DSML_KINDS),
    "deepseek_v31": format_of(
        Written(begin=_DEEPSEEK[0], call=_CALL.format("{name}", "{input}"), end=_DEEPSEEK[1])
    ),
    "deepseek_v3": format_of(
        Written(
            begin=_DEEPSEEK[0],
            call=_CALL.format("function", "{name}\n```json\n{input}\n```‹\n›"),
            separator="\n",
            end=_DEEPSEEK[1],
        )
    ),
    "kimi_k2": format_of(
        Written(
            begin="<|tool_calls_section_begin|>",
            call=_KIMI_BEGIN + "{input}<|tool_call_end|>",
            end="<|tool_calls_section_end|>",
        )
    ),
    "kimi_k3": format_of(
        Written(
            begin="«<|close|>response<|sep|>»<|open|>tools<|sep|>",
            call='<|open|>call tool="{name}" index="{digits}"<|sep|>{input}<|close|>call<|sep|>',
            end="<|close|>tools<|sep|>‹<|close|>message<|sep|>›",
        ),
        arguments=TagSyntax(
            open='<|open|>argument key="{key}" type="{kind}"<|sep|>',
            close="<|close|>argument<|sep|>",
            kinds={kind: kind for kind in ALL_TYPES} | {"integer": "number"},
        ),
        is_opened=True,
    ),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "functionary": format_of(Written(call="<function={name}>{input}</function>")),
    "cohere": format_of(
        Written(
            begin="<|START_ACTION|>[\n    ",
            call='{"tool_call_id": "{digits}", "tool_name": "{name}", "parameters": {input}}',
            separator=",\n    ",
            end="\n]<|END_ACTION|>",
        )
    ),
    "lfm2": _python("<|tool_call_start|>", "<|tool_call_end|>"),
    "lfm2_json": _objects("<|tool_call_start|>", "<|tool_call_end|>"),
    "llama4_pythonic": _python("<|python_start|>", "<|python_end|>"),
    "olmo3": _python("<function_calls>", "</function_calls>"),
    "pythonic": _python("", ""),
    "phi4_mini_json": _objects("<|tool_call|>", "<|/tool_call|>"),
    "granite": _objects("<|tool_call|>", "", in_content=True),
    "nemotron_json": _objects("<TOOLCALL>", "</TOOLCALL>"),
    "jamba": _objects("<tool_calls>", "</tool_calls>"),
}
