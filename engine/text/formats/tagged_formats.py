"""The formats whose arguments stand between tags, one by one."""

from engine.text.formats.argument_types import ALL_TYPES
from engine.text.formats.call_format import CallFormat, Written, of_syntax, tagged
from engine.text.formats.patterns import NAME, SPACE, Maybe, Word
from engine.text.formats.syntax_calls import CallSyntax
from engine.text.formats.tagged_input import TagSyntax

_QUOTED_KEY = Word("key", r'[^"<>]')
_XML_KEY = Word("key", r"[^<>]")
_DSML = "｜DSML｜"


def dsml(block: str) -> CallFormat:
    """DeepSeek's markup since V3.2; the block's name changed with V4."""
    return tagged(
        f"<{_DSML}{block}>",
        f"</{_DSML}{block}>",
        f'<{_DSML}invoke name="{{name}}">',
        TagSyntax(
            open=(
                f'<{_DSML}parameter name="',
                _QUOTED_KEY,
                '" string="',
                Word("kind", "[a-z]"),
                '">',
            ),
            close=f"</{_DSML}parameter>",
            end=f"</{_DSML}invoke>",
            others=(f"</{_DSML}{block}>",),
            kinds={kind: "true" if kind == "string" else "false" for kind in ALL_TYPES},
        ),
        Written(
            begin=f"<{_DSML}{block}>\n",
            call=f'<{_DSML}invoke name="{{name}}">\n{{input}}</{_DSML}invoke>',
            separator="\n",
            end=f"\n</{_DSML}{block}>",
        ),
    )


def kimi_k3() -> CallFormat:
    opens, closes = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
    kinds = {kind: kind for kind in ALL_TYPES} | {"integer": "number"}
    return of_syntax(
        CallSyntax(
            opens=(opens,),
            head=(
                '<|open|>call tool="',
                NAME,
                '" index="',
                Word("index", r"\d"),
                '"<|sep|>',
            ),
            closes=(closes, Maybe("<|close|>message<|sep|>")),
            arguments=TagSyntax(
                open=(
                    '<|open|>argument key="',
                    _QUOTED_KEY,
                    '" type="',
                    Word("kind", "[a-z]"),
                    '"<|sep|>',
                ),
                close="<|close|>argument<|sep|>",
                end="<|close|>call<|sep|>",
                others=(closes,),
                kinds=kinds,
            ),
            is_opened=True,
        ),
        Written(
            begin=f"<|close|>response<|sep|>{opens}",
            call='<|open|>call tool="{name}" index="{digits}"<|sep|>{input}<|close|>call<|sep|>',
            end=closes,
        ),
    )


def qwen3_coder(opens: str, closes: str, *, has_lines: bool) -> CallFormat:
    calls = [
        Written(
            begin=f"{opens}\n",
            call="<function={name}>\n{input}</function>",
            separator=f"\n{closes}{between}{opens}\n",
            end=f"\n{closes}",
        )
        for between in ("\n", "")
    ]
    return tagged(
        opens,
        closes,
        "<function={name}>",
        TagSyntax(
            open=("<parameter=", _XML_KEY, ">"),
            close="</parameter>",
            end="</function>",
            others=(closes,),
            has_lines=has_lines,
        ),
        *calls,
    )


def glm() -> CallFormat:
    def written(line: str) -> Written:
        return Written(call=f"<tool_call>{{name}}{line}{{input}}</tool_call>", separator=line or "")

    return of_syntax(
        CallSyntax(
            head=("<tool_call>", SPACE, NAME, SPACE),
            arguments=TagSyntax(
                open=("<arg_key>", _XML_KEY, "</arg_key>", SPACE, "<arg_value>"),
                close="</arg_value>",
                end="</tool_call>",
            ),
        ),
        written("\n"),
        written(""),
    )


def minimax() -> CallFormat:
    opens, closes = "<minimax:tool_call>", "</minimax:tool_call>"
    return tagged(
        opens,
        closes,
        '<invoke name="{name}">',
        TagSyntax(
            open=('<parameter name="', _QUOTED_KEY, '">'),
            close="</parameter>",
            end="</invoke>",
            others=(closes,),
        ),
        Written(
            begin=f"{opens}\n",
            call='<invoke name="{name}">\n{input}</invoke>',
            separator="\n",
            end=f"\n{closes}",
        ),
    )


def minimax_m3() -> CallFormat:
    """Each tag stands behind a token of its own; lists and objects are elements in elements."""
    prefix = "]<]minimax[>["
    opens, closes = f"{prefix}<tool_call>", f"{prefix}</tool_call>"
    return of_syntax(
        CallSyntax(
            opens=(opens, SPACE),
            head=(f'{prefix}<invoke name="', NAME, '">'),
            closes=(closes,),
            arguments=TagSyntax(
                open=(f"{prefix}<", Word("key", r"[^<>/]"), ">"),
                close=f"{prefix}</{{key}}>",
                end=f"{prefix}</invoke>",
                others=(closes,),
                elements=prefix,
            ),
            is_opened=True,
        ),
        Written(
            begin=f"{opens}\n",
            call=f'{prefix}<invoke name="{{name}}">{{input}}{prefix}</invoke>\n',
            end=closes,
        ),
    )
