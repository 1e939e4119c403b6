"""What one way to write calls consists of, and how such formats are put together from markup."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.protocol import Tool
from engine.text.formats.call_stream import FormatParser
from engine.text.formats.element_values import TAGS
from engine.text.formats.literal_input import LiteralSyntax
from engine.text.formats.patterns import NAME, SPACE, Maybe, Space, literals
from engine.text.formats.syntax_calls import CallSyntax, SyntaxCalls
from engine.text.formats.tagged_input import TagSyntax

LIST = Space(",;")
"""What stands between the calls of a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How a model writes calls, for forcing one: texts with the places `{name}` and `{input}`.

    `{digits}` and `{id}` are a number and nine letters or digits, at the model's choice; `{more}`
    is an id as a last key, or nothing.
    """

    call: str
    begin: str = ""
    separator: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """One way to write calls.

    `markers` are the texts it is made of, which may be control tokens. `opening` is what every call
    of a template in this format begins with, though models may leave it out. Of `written`, the
    first whose call is what the template renders is the model's. `in_content`: where a template
    renders no calls, they are written into the text of the turn. `arguments` is the notation of
    inputs that are no JSON.
    """

    new_parser: Callable[[Callable[[], str], Sequence[Tool]], FormatParser]
    markers: frozenset[str]
    opening: str = ""
    written: tuple[Written, ...] = ()
    in_content: bool = False
    arguments: TagSyntax | LiteralSyntax | None = None


def of_syntax(syntax: CallSyntax, *written: Written, in_content: bool = False) -> CallFormat:
    arguments = syntax.arguments
    patterns = [syntax.opens, syntax.head, syntax.tail, syntax.closes]
    more: set[str] = set()
    if isinstance(arguments, TagSyntax):
        patterns.append(arguments.open)
        before, _, behind = arguments.close.partition("{key}")
        more = {before, behind, arguments.end, *arguments.others} - {""}
        if arguments.elements:
            more |= {arguments.elements + tag for tag in TAGS}
    elif arguments is not None and arguments.quote:
        more = {arguments.quote}

    def new_parser(new_id: Callable[[], str], tools: Sequence[Tool]) -> FormatParser:
        return SyntaxCalls(syntax, new_id, tools)

    return CallFormat(
        new_parser=new_parser,
        markers=literals(*patterns) | more,
        opening=syntax.starts[0],
        written=written,
        in_content=in_content,
        arguments=arguments,
    )


def object_list(opening: str, closing: str, *, in_content: bool = False) -> CallFormat:
    """`OPENING[{"name": …, "arguments": …}, …]CLOSING`."""
    syntax = CallSyntax(
        opens=(opening, SPACE, Maybe("[")),
        separator=LIST,
        closes=(Maybe("]"), SPACE, closing) if closing else ("]",),
    )
    call = '{"name": "{name}", "arguments": {input}}'
    return of_syntax(
        syntax,
        Written(begin=f"{opening}[", call=call, separator=", ", end=f"]{closing}"),
        in_content=in_content,
    )


def tagged(opens: str, closes: str, head: str, tags: TagSyntax, *written: Written) -> CallFormat:
    """XML-like calls within `opens` and `closes`; `head` has the place `{name}`."""
    before, _, behind = head.partition("{name}")
    return of_syntax(
        CallSyntax(
            opens=(opens, SPACE),
            head=(before, NAME, behind),
            closes=(closes,),
            arguments=tags,
        ),
        *written,
    )
