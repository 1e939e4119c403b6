"""How each tool format writes calls, as grammar rules for forcing one."""

import json
from collections.abc import Callable

from engine.text.grammar import CallStyle, GrammarWriter

_ID = "/[a-zA-Z0-9]{9}/"


def find_call_style(tool_format: str, shown: str, writer: GrammarWriter) -> CallStyle:
    """`shown` is what the template renders of a call, which tells variants of a format apart.

    Where templates differ in white space only, the grammar leaves the choice to the model.
    """
    match tool_format:
        case "hermes":
            return _hermes(writer)
        case "llama3_json":
            return CallStyle(call=_object("parameters"), separator=_text("; "))
        case "mistral" if "[ARGS]" in shown:
            return _mistral_named(writer, has_id="[CALL_ID]" in shown)
        case "mistral":
            call = _object("arguments", f'({_text(", " + json.dumps("id") + ": ")} /"/ {_ID} /"/)?')
            begin = f'{writer.marker("[TOOL_CALLS]")} " "? "["'
            return CallStyle(call=call, begin=begin, separator=_text(", "), end=_text("]"))
    raise ValueError(f"no tool format {tool_format!r}")


def _hermes(writer: GrammarWriter) -> CallStyle:
    opening, closing = writer.marker("<tool_call>"), writer.marker("</tool_call>")
    inner = _object("arguments")

    def call(name: str, input_rule: str) -> str:
        return f'{opening} "\\n"? {inner(name, input_rule)} "\\n"? {closing}'

    return CallStyle(call=call, separator='"\\n"?')


def _mistral_named(writer: GrammarWriter, *, has_id: bool) -> CallStyle:
    call_id = f"{writer.marker('[CALL_ID]')} {_ID} " if has_id else ""

    def call(name: str, input_rule: str) -> str:
        opening, arguments = writer.marker("[TOOL_CALLS]"), writer.marker("[ARGS]")
        return f"{opening} {_text(name)} {call_id}{arguments} {input_rule}"

    return CallStyle(call=call)


def _object(input_key: str, more: str = "") -> Callable[[str, str], str]:
    def call(name: str, input_rule: str) -> str:
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{input_key}": '
        return f"{_text(head)} {input_rule} {more} {_text('}')}"

    return call


def _text(text: str) -> str:
    """A string as Lark writes it, which is how JSON does."""
    return json.dumps(text, ensure_ascii=False)
