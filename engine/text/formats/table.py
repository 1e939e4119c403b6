"""The formats in which models write tool calls, as data.

The names are those of vLLM's `--tool-call-parser` where it has one. A format is never chosen by its
name or by words in a template: `engine.text.formats.proof` renders a call and takes the format
whose parser reads back exactly that call.
"""

from collections.abc import Sequence

from engine.protocol import Tool
from engine.text.formats import harmony
from engine.text.formats.call_format import (
    LIST,
    CallFormat,
    Written,
    object_list,
    of_syntax,
)
from engine.text.formats.harmony import HarmonyParser
from engine.text.formats.literal_input import LiteralSyntax
from engine.text.formats.patterns import NAME, SPACE, Maybe, Word
from engine.text.formats.syntax_calls import CallSyntax
from engine.text.formats.tagged_formats import dsml, glm, kimi_k3, minimax, minimax_m3, qwen3_coder
from engine.text.formats.tool_calls import Llama3Calls, MistralCalls

_HERMES_CALL = '{"name": "{name}", "arguments": {input}}'
_COHERE_CALL = '{"tool_call_id": "{digits}", "tool_name": "{name}", "parameters": {input}}'
_PYTHON = LiteralSyntax(assign="=", end=")")


def _python(opening: str, closing: str) -> CallFormat:
    syntax = CallSyntax(
        opens=(opening, SPACE, Maybe("[")) if opening else ("[", SPACE),
        head=(NAME, SPACE, "("),
        separator=LIST,
        closes=(Maybe("]"), SPACE, closing) if closing else ("]",),
        arguments=_PYTHON,
        knows_names=not opening,
    )
    return of_syntax(
        syntax,
        Written(begin=f"{opening}[", call="{name}({input})", separator=", ", end=f"]{closing}"),
    )


def _deepseek_v3() -> CallFormat:
    opens, closes = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call_begin, call_end, sep = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    head = (call_begin, "function", sep, NAME, SPACE, "```json", SPACE)
    return of_syntax(
        CallSyntax(
            opens=(opens, SPACE), head=head, tail=(SPACE, "```", SPACE, call_end), closes=(closes,)
        ),
        Written(
            begin=opens,
            call=f"{call_begin}function{sep}{{name}}\n```json\n{{input}}\n```{call_end}",
            separator="\n",
            end=closes,
        ),
    )


def _deepseek_v31() -> CallFormat:
    opens, closes = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call_begin, call_end, sep = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    return of_syntax(
        CallSyntax(
            opens=(opens, SPACE),
            head=(call_begin, NAME, sep, SPACE),
            tail=(call_end,),
            closes=(closes,),
        ),
        Written(begin=opens, call=f"{call_begin}{{name}}{sep}{{input}}{call_end}", end=closes),
    )


def _kimi() -> CallFormat:
    opens, closes = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    number = Word("index", r"\d", may_be_empty=True)
    return of_syntax(
        CallSyntax(
            opens=(opens, SPACE),
            head=(
                begin,
                SPACE,
                Maybe("functions."),
                NAME,
                Maybe(":"),
                number,
                SPACE,
                middle,
                SPACE,
            ),
            tail=(end,),
            closes=(closes,),
        ),
        Written(
            begin=opens,
            call=f"{begin}functions.{{name}}:{{digits}}{middle}{{input}}{end}",
            end=closes,
        ),
    )


def _gemma4() -> CallFormat:
    return of_syntax(
        CallSyntax(
            opens=("<|tool_call>", SPACE),
            head=("call:", NAME, SPACE, "{"),
            closes=("<tool_call|>",),
            arguments=LiteralSyntax(assign=":", end="}", quote='<|"|>'),
        ),
        Written(
            begin="<|tool_call>",
            call="call:{name}{{input}}",
            separator="<tool_call|><|tool_call>",
            end="<tool_call|>",
        ),
    )


def _function_gemma() -> CallFormat:
    return of_syntax(
        CallSyntax(
            opens=("<start_function_call>", SPACE),
            head=("call:", NAME, SPACE, "{"),
            closes=("<end_function_call>",),
            arguments=LiteralSyntax(assign=":", end="}", quote="<escape>"),
        ),
        Written(
            begin="<start_function_call>",
            call="call:{name}{{input}}",
            separator="<end_function_call><start_function_call>",
            end="<end_function_call>",
        ),
    )


def _functionary() -> CallFormat:
    return of_syntax(
        CallSyntax(head=("<function=", NAME, ">", SPACE), tail=("</function>",)),
        Written(call="<function={name}>{input}</function>"),
    )


def _names(tools: Sequence[Tool]) -> list[str]:
    return [tool.name for tool in tools]


TOOL_FORMATS: dict[str, CallFormat] = {
    "hermes": of_syntax(
        CallSyntax(
            opens=("<tool_call>", SPACE, Maybe("[")),
            separator=LIST,
            closes=(Maybe("]"), SPACE, "</tool_call>"),
        ),
        *(
            Written(
                begin=f"<tool_call>{line}",
                call=_HERMES_CALL,
                separator=f"{line}</tool_call>{between}<tool_call>{line}",
                end=f"{line}</tool_call>",
            )
            for line, between in (("\n", "\n"), ("\n", ""), ("", "\n"), ("", ""))
        ),
    ),
    "mistral": CallFormat(
        new_parser=lambda new_id, tools: MistralCalls(new_id, _names(tools)),
        markers=frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}),
        written=(
            Written(
                begin="[TOOL_CALLS] [",
                call='{"name": "{name}", "arguments": {input}{more}}',
                separator=", ",
                end="]",
            ),
            Written(
                begin="[TOOL_CALLS][",
                call='{"name": "{name}", "arguments": {input}{more}}',
                separator=", ",
                end="]",
            ),
            Written(call="[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{input}"),
            Written(call="[TOOL_CALLS]{name}[ARGS]{input}"),
        ),
    ),
    "llama3_json": CallFormat(
        new_parser=lambda new_id, tools: Llama3Calls(new_id, _names(tools)),
        markers=frozenset({"<|python_tag|>"}),
        written=(
            Written(call='{"name": "{name}", "parameters": {input}}', separator="; "),
            Written(
                call='{"type": "function", "name": "{name}", "parameters": {input}}',
                separator="; ",
            ),
            Written(call='{"name": "{name}", "arguments": {input}}', separator="; "),
        ),
    ),
    "openai": CallFormat(
        new_parser=lambda new_id, tools: HarmonyParser(new_id, _names(tools)),
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
    "qwen3_coder": qwen3_coder("<tool_call>", "</tool_call>", has_lines=True),
    "seed_oss": qwen3_coder("<seed:tool_call>", "</seed:tool_call>", has_lines=False),
    "glm45": glm(),
    "minimax_m2": minimax(),
    "minimax_m3": minimax_m3(),
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v31": _deepseek_v31(),
    "deepseek_v3": _deepseek_v3(),
    "kimi_k2": _kimi(),
    "kimi_k3": kimi_k3(),
    "gemma4": _gemma4(),
    "functiongemma": _function_gemma(),
    "functionary": _functionary(),
    "cohere": of_syntax(
        CallSyntax(
            opens=("<|START_ACTION|>", SPACE, Maybe("[")),
            separator=LIST,
            closes=(Maybe("]"), SPACE, "<|END_ACTION|>"),
        ),
        Written(
            begin="<|START_ACTION|>[\n    ",
            call=_COHERE_CALL,
            separator=",\n    ",
            end="\n]<|END_ACTION|>",
        ),
    ),
    "lfm2": _python("<|tool_call_start|>", "<|tool_call_end|>"),
    "lfm2_json": object_list("<|tool_call_start|>", "<|tool_call_end|>"),
    "llama4_pythonic": _python("<|python_start|>", "<|python_end|>"),
    "olmo3": _python("<function_calls>", "</function_calls>"),
    "pythonic": _python("", ""),
    "phi4_mini_json": object_list("<|tool_call|>", "<|/tool_call|>"),
    "granite": object_list("<|tool_call|>", "", in_content=True),
    "nemotron_json": object_list("<TOOLCALL>", "</TOOLCALL>"),
    "jamba": object_list("<tool_calls>", "</tool_calls>"),
}
