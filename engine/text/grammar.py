"""Grammars of output that must have a form: a forced tool call, or an answer of a JSON schema.

llguidance keeps a grammar in step with the tokens and says which may come next. JSON is written as
templates write it (`", "`, `": "`, no other white space), so that a replayed call renders to the
tokens that were sampled, and so that no model can go on with white space for ever. Inputs that are
no JSON get rules of their own, argument by argument.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from engine.cache.ids import TokenId
from engine.errors import SchemaRefused
from engine.protocol import GenerateRequest, Tool
from engine.text.formats.arguments import ALL_TYPES, LiteralSyntax, TagSyntax, types_of
from engine.text.formats.proof import LAST_WORD, ModelFormats
from engine.text.formats.reasoning import ReasoningFormat
from engine.text.formats.table import CallFormat
from engine.text.template.messages import Written

_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
_JSON_OPTIONS = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": True,
    "lenient": False,
}
# An object schema with none of these and no properties says nothing of its keys. A forced call has
# no keys then: a model that must write on would invent some.
_MAY_HAVE_KEYS = ("additionalProperties", "patternProperties", "propertyNames", "required", "$ref",
                  "allOf", "anyOf", "oneOf", "minProperties", "unevaluatedProperties")  # fmt: skip
_MAX_REASON = 200
_ANY = "/(.|\\n)*/"
_TRIED_TOKENS = 64
"""How many tokens of text a pattern is tried on. The library's limits are met early or never."""
_TRIED_PATTERNS = 64
"""How many patterns of a schema are tried. Another one that is too costly ends the answer
instead."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
_POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


class Constraint:
    """One choice's state in a grammar."""

    def __init__(self, matcher: LLMatcher, grammar: str) -> None:
        # In llguidance's form of Lark.
        self.grammar = grammar
        # Nothing but the end may come.
        self.is_complete = False
        # The library gave up, by its limits on time and memory. No token is known to be allowed.
        self.is_failed = False
        self._matcher = matcher
        self._allowed: bytes | None = None
        self._settle()

    @property
    def is_ready(self) -> bool:
        """Whether the token mask is known."""
        return self._allowed is not None

    @property
    def allowed(self) -> bytes:
        """The token mask: a bit per token id, lowest first. Beyond its end no token is allowed."""
        self.compute()
        assert self._allowed is not None
        return self._allowed

    def take(self, token_id: TokenId) -> None:
        is_taken = self._matcher.consume_token(token_id)
        self._allowed = None
        self._settle()
        self.is_failed = self.is_failed or not is_taken

    def compute(self) -> None:
        """Find the token mask. Nothing happens where it is known.

        It may take long. It frees the interpreter's lock meanwhile.
        """
        if self._allowed is None:
            mask: bytes = self._matcher.compute_bitmask()
            self.is_failed = self._matcher.is_error()
            # From here on the engine's thread may take a token.
            self._allowed = b"" if self.is_failed else mask

    def copy(self) -> "Constraint":
        """The same for another choice; what was compiled is shared."""
        copy = Constraint(self._matcher.deep_copy(), self.grammar)
        copy._allowed = self._allowed
        return copy

    def _settle(self) -> None:
        """Is it over? Asked after every token."""
        self.is_failed = self._matcher.is_error()
        if self.is_failed or self._matcher.is_stopped():
            self.is_complete = not self.is_failed
            self._allowed = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStyle:
    """How one format writes calls, as Lark."""

    # Takes a tool's name and the name of the rule of its input.
    call: Callable[[str, str], str]
    # Writes the rule of an input that is no JSON. Raises SchemaRefused for what it can't guarantee.
    input_rules: Callable[[Tool, str], list[str]] | None = None
    # Stands before all calls.
    begin: str = ""
    # Stands between calls.
    separator: str = ""
    # Stands behind all calls.
    end: str = ""
    # The texts that calls begin with (`free_rules`). Empty: text may begin like a call.
    starts: tuple[str, ...] = ()


def default_limits() -> LLParserLimits:
    """What one grammar may cost: milliseconds for a token's mask, tens of MiB for all of it.

    The library's own `initial_lexer_fuel` of a million lets `((a{1000}){1000}){1000}` take a second
    and 300 MiB. Its 2,000 items in a row are no more than 500 optional properties.
    """
    return LLParserLimits(
        max_items_in_row=20_000,
        initial_lexer_fuel=100_000,
        step_lexer_fuel=100_000,
        max_lexer_states=100_000,
        verbose_errors=False,
    )


class GrammarWriter:
    """Writes grammars for one tokenizer. Raises ValueError for a tokenizer llguidance can't use.

    `limits` say what one grammar may cost, at compilation and at every token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_token_ids: Iterable[TokenId],
        limits: LLParserLimits | None = None,
    ) -> None:
        ends = sorted(end_token_ids)
        self._tokenizer = tokenizer
        controls = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if len(token.content) > 1
        }
        self._controls = controls
        longest_first = sorted(map(re.escape, controls), key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(longest_first)})") if controls else None
        self._library = LLTokenizer(tokenizer.to_str(), eos_token=ends or None)
        self._limits = limits or default_limits()

    def marker(self, text: str) -> str:
        """A marker's rule: the control token where it is one, else its text."""
        token_id = self._tokenizer.token_to_id(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def texts(self, text: str) -> list[str]:
        """A text as Lark, in which control tokens' texts are those tokens."""
        pieces = [text] if self._control is None else self._control.split(text)
        return [
            f"<[{self._controls[piece]}]>"
            if piece in self._controls
            else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        ]

    def constraint(
        self,
        request: GenerateRequest,
        style: CallStyle | None,
        thinking: "ThinkingRule | None",
    ) -> Constraint | None:
        """What constrains a choice of the request, None where nothing does.

        Raises SchemaRefused, which names the tool whose schema the library can't compile.
        """
        choice = request.tool_choice
        tools = _called(request)
        rules: list[str] = []
        answers: list[str] = []
        is_forced = choice.mode in ("any", "tool")
        may_call = is_forced or (request.constrains_text and choice.mode == "auto")
        if style is not None and may_call and tools:
            rules += self._calls(style, tools, parallel=choice.parallel)
            answers.append("calls")
        if style is not None and style.starts and request.constrains_calls:
            rules += self._free_calls(style, tools, parallel=choice.parallel)
            answers.append("free")
        if request.constrains_text and not is_forced:
            rules.append(f"answer: {text_rule(request)}")
            answers.append("answer")
        if not answers:
            return None
        begin = "" if thinking is None else "thinking "
        rules.insert(0, f"start: {begin}({' | '.join(answers)})")
        if thinking is not None:
            rules += thinking.rules(self)
        grammar = "\n".join(["%llguidance {}", *rules])
        matcher = self._compile(grammar)
        constraint = Constraint(matcher, grammar)
        constraint.compute()
        if constraint.is_failed:
            raise self._refusal(request, matcher)
        for where, schema in _demanded(request):
            for pattern in islice(dict.fromkeys(_patterns(schema)), _TRIED_PATTERNS):
                fault = self._try_pattern(pattern)
                if fault:
                    raise SchemaRefused(f"{where}: can't be guaranteed: {fault}")
        return constraint

    def _refusal(self, request: GenerateRequest, matcher: LLMatcher) -> SchemaRefused:
        """Why the library takes no grammar of these schemas. It names the schema at fault, if it is
        one. `matcher` failed on all of them together."""
        demanded = [(where, json_rule(schema)) for where, schema in _demanded(request)]
        if request.output_pattern is not None:
            demanded.append(("output_pattern", text_rule(request)))
        for where, rule in demanded:
            single = self._compile(f"%llguidance {{}}\nstart: {rule}")
            if single.is_error():
                return SchemaRefused(f"{where}: can't be guaranteed: {_reason(single)}")
        return SchemaRefused(f"the schemas are too much together: {_reason(matcher)}")

    def _free_calls(self, style: CallStyle, tools: Sequence[Tool], *, parallel: bool) -> list[str]:
        """The rules of calls among free text, and of that text."""
        pieces = self.texts(style.starts[0])
        rules = free_rules(style.starts, pieces, parallel=parallel)
        # Inputs of tools that are not strict are any objects, where they are JSON.
        loose = {tool.name for tool in tools if not tool.strict}
        behind = style
        if not is_control(pieces[0]) and style.begin:
            behind = replace(style, begin=behind_head(style.begin, pieces))
        elif not is_control(pieces[0]):
            parallel = False
            behind = replace(
                style, call=lambda name, rule: behind_head(style.call(name, rule), pieces)
            )
        return [*rules, *self._calls(behind, tools, parallel=parallel, loose=loose)]

    def _calls(
        self,
        style: CallStyle,
        tools: Sequence[Tool],
        *,
        parallel: bool,
        loose: Collection[str] = (),
    ) -> list[str]:
        calls = " | ".join(f"call_{index}" for index in range(len(tools)))
        more = f"({style.separator} ({calls}))*" if parallel else ""
        rules = [f"calls: {style.begin} ({calls}) {more} {style.end}"]
        for index, tool in enumerate(tools):
            rules.append(f"call_{index}: {style.call(tool.name, f'input_{index}')}")
            if style.input_rules is None and tool.name in loose:
                rules.append(f"input_{index}: {json_rule({'type': 'object'})}")
                continue
            tool = Tool(tool.name, _object_schema(tool), tool.description)
            if style.input_rules is None:
                rules.append(f"input_{index}: {json_rule(tool.input_schema)}")
            else:
                rules += style.input_rules(tool, f"input_{index}")
        return rules

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._library, grammar, log_level=0, limits=self._limits)

    def _try_pattern(self, pattern: str) -> str:
        """Why the library gives up on text of a pattern. Empty: it does not."""
        schema = {"type": "string", "pattern": pattern}
        matcher = self._compile(f"%llguidance {{}}\nstart: {json_rule(schema)}")
        rng = Random(0)  # noqa: S311
        for _ in range(_TRIED_TOKENS):
            mask = b"" if matcher.is_error() or matcher.is_stopped() else matcher.compute_bitmask()
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            if not len(allowed):
                break
            matcher.consume_token(int(rng.choice(allowed)))
        return f"pattern: {_reason(matcher)}" if matcher.is_error() else ""


@dataclass(frozen=True, slots=True)
class ThinkingRule:
    """What may come before the constrained part."""

    tags: ReasoningFormat
    # The prompt opened the tag already.
    is_open: bool

    def rules(self, writer: GrammarWriter) -> list[str]:
        close = writer.marker(self.tags.close)
        lazy = "" if is_control(close) else "[lazy]"
        rule = "thought /\\s{0,4}/"
        if not self.is_open:
            rule = f"({writer.marker(self.tags.open)} {rule})?"
        return [f"thinking: {rule}", f"thought{lazy}: {_ANY} {close}"]


def _called(request: GenerateRequest) -> list[Tool]:
    """The tools that may be called."""
    tools = request.prompt.callable_tools
    return [tool for tool in tools if request.tool_choice.allows(tool.name)]


def _demanded(request: GenerateRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas that constrain the output, each with the field that it stands in."""
    called = {tool.name for tool in _called(request)}
    for index, tool in enumerate(request.prompt.callable_tools):
        if tool.name in called:
            yield f"tools[{index}].input_schema of `{tool.name}`", _object_schema(tool)
    if request.output_schema is not None:
        yield "output_schema", request.output_schema


def _patterns(value: Any) -> Iterator[str]:
    """The patterns with counted repetition, which alone outgrow the library's limits."""
    if isinstance(value, dict):
        keys = value.get("patternProperties")
        patterns = [value.get("pattern"), *(keys if isinstance(keys, dict) else ())]
        for pattern in patterns:
            if isinstance(pattern, str) and "{" in pattern:
                yield pattern
        value = [inner for name, inner in value.items() if name not in _VALUES]
    if isinstance(value, list):
        for inner in value:
            yield from _patterns(inner)


def _object_schema(tool: Tool) -> dict[str, Any]:
    """The input's schema; an input is an object whether or not the schema says so."""
    kinds = tool.input_schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise SchemaRefused(f"input_schema of `{tool.name}`: its `type` must be `object`")
    schema = {**tool.input_schema, "type": "object"}
    if not schema.get("properties") and not any(key in schema for key in _MAY_HAVE_KEYS):
        schema["additionalProperties"] = False
    return schema


def json_rule(schema: dict[str, Any]) -> str:
    """The right side of a rule for JSON of a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def text_rule(request: GenerateRequest) -> str:
    """The right side of a rule for the text of an answer that is constrained."""
    if request.output_pattern is None:
        return json_rule(request.output_schema or {})
    # A slash or a line break would end the pattern; what is escaped already stays.
    escaped = {"/": "\\/", "\n": "\\n"}
    pattern = _SLASH.sub(
        lambda match: escaped.get(match.group(), match.group()), request.output_pattern
    )
    return f"/{pattern}/"


def _reason(matcher: LLMatcher) -> str:
    lines: list[str] = matcher.get_error().strip().splitlines() or ["unknown"]
    return _POSITION.sub("", lines[0])[:_MAX_REASON]


def free_rules(starts: Sequence[str], pieces: Sequence[str], *, parallel: bool) -> list[str]:
    """The rule `free`: text, and calls by the rule `calls`. `pieces` are the first start as Lark.
    Where the start begins with a control token, `calls` begins with it. Else the start's beginning
    stands in `head`, and `calls` goes on behind that (`behind_head`).
    """
    times = "*" if parallel else "?"
    text = f"TEXT: {_ANY} & ~/(.|\\n)*({_any_of(starts)})(.|\\n)*/"
    if is_control(pieces[0]):
        return [f"free: TEXT (calls TEXT){times}", text]
    free = f"free: (head calls){times} TEXT"
    if len(pieces) > 1:
        before = _escaped(json.loads(pieces[0]))
        return [free, f"head: BEFORE {pieces[1]}", f"BEFORE: /(.|\\n)*{before}/", text]
    head = f"/(.|\\n)*{_escaped(starts[0])}/"
    if starts[1:]:
        head += f" & ~/(.|\\n)*({_any_of(starts[1:])})(.|\\n)*/"
    return [free, f"head[lazy]: {head}", text]


def is_control(piece: str) -> bool:
    return piece.startswith("<[")


def behind_head(rule: str, pieces: Sequence[str]) -> str:
    """A rule's Lark without the part that stands in `head`."""
    if len(pieces) > 1:
        return rule.removeprefix(" ".join(pieces[:2])).lstrip()
    literal, end = json.JSONDecoder().raw_decode(rule)
    rest = str(literal).removeprefix(json.loads(pieces[0]))
    return f"{json.dumps(rest, ensure_ascii=False) if rest else ''}{rule[end:]}"


def _any_of(starts: Iterable[str]) -> str:
    return "|".join(map(_escaped, starts))


def _escaped(text: str) -> str:
    return re.sub(r"([\\.^$*+?()\[\]{}|/#&~-])", r"\\\1", text)


_ID = "/[a-zA-Z0-9]{9}/"
_PLACES = {
    "{digits}": "/[0-9]{1,4}/",
    "{id}": _ID,
    "{more}": f'({json.dumps(", " + json.dumps("id") + ": ")} /"/ {_ID} /"/)?',
}
_SHOWN = {
    "{more}": '(, "id": "[^"]*")?',
    "{name}": r"[\w.\-]+",
    "{input}": ".*",
    "{digits}": r"\d+",
    "{id}": "[a-zA-Z0-9]{9}",
}
_MIN_START = 3
"""Characters of a text by which calls are found among free text."""
_PLACE = re.compile(r"(\{name\}|\{input\}|\{digits\}|\{id\}|\{more\})")
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
# What a schema of an object may say that rules of one argument after the other can't guarantee.
_UNHELD = ("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas",
           "minProperties", "maxProperties", "allOf", "anyOf", "oneOf", "not", "if",
           "$ref")  # fmt: skip
# A string outside of JSON can be constrained to a list of values and to nothing else.
_UNHELD_IN_TEXT = ("pattern", "format", "minLength", "maxLength", "not", "allOf", "anyOf", "oneOf")


def find_call_style(formats: ModelFormats, writer: GrammarWriter) -> CallStyle | None:
    """The style of a model's calls; None where it has no format."""
    of = formats.call_format
    proven = formats.calls
    if of is None:
        return None
    turn = "" if proven is None else proven.turn
    written = of.written[0]
    if proven is not None and proven.written is not None and of.arguments is None:
        written = proven.written
    written = next((way for way in of.written if _renders(way, turn)), written)
    rules: Callable[[Tool, str], list[str]] | None = None
    if isinstance(of.arguments, TagSyntax):
        tags = _spaced(of.arguments, turn)
        gap, last_gap = _gaps(tags, turn)
        written = replace(written, call=written.call.replace("{input}", "{input}" + last_gap))
        rules = _Tagged(writer, tags, gap, is_python="True" in turn).rules
    elif isinstance(of.arguments, LiteralSyntax):
        quoted = re.search(rf"\bword=(['\"]){LAST_WORD}", turn)
        mark = '"' if quoted is None else quoted.group(1)
        rules = _Literal(
            writer,
            of.arguments,
            mark,
            quotes_all=f"ratio={mark}" in turn,
            is_json="flag=true" in turn,
            comma="," if of.arguments.quote or "count=3,flag" in turn else ", ",
        ).rules

    return CallStyle(
        call=lambda name, input_rule: _lark(writer, written.call, name, input_rule),
        begin=_lark(writer, written.begin),
        separator=_lark(writer, written.separator),
        end=_lark(writer, written.end),
        input_rules=rules,
        starts=_free_starts(of, written),
    )


def _renders(way: Written, turn: str) -> bool:
    """Whether the template's turn has a call that is written so, with any number or id."""
    parts = filter(None, _PLACE.split(way.begin + way.call + way.end))
    pattern = "".join(_SHOWN.get(part) or re.escape(part) for part in parts)
    return re.search(pattern, turn, re.DOTALL) is not None


def _spaced(tags: TagSyntax, turn: str) -> TagSyntax:
    """With the white space that the template writes within an opening tag."""
    before, line, behind = tags.open.partition("\n")
    left = re.escape(before.rpartition("}")[2])
    spacing = re.search(rf"{left}(\s*){re.escape(behind)}", turn) if line else None
    if spacing is None:
        return tags
    return replace(tags, open=before + spacing.group(1) + behind)


def _gaps(tags: TagSyntax, turn: str) -> tuple[str, str]:
    """The white space that the template writes behind an argument, and behind the last alone."""
    at = turn.rfind(tags.end)
    last = turn.rfind(tags.close, 0, at)
    gap = ""
    if "{key}" not in tags.close:
        behind = turn[turn.find(tags.close) + len(tags.close) :] if last >= 0 else "\n"
        gap = behind[: len(behind) - len(behind.lstrip())]
    if last < 0:
        return gap, ""
    last_gap = turn[last + len(tags.close) : at].removeprefix(gap)
    return gap, "" if last_gap.strip() else last_gap


def _free_starts(of: CallFormat, written: Written) -> tuple[str, ...]:
    """The texts that calls begin with, the template's own first. None where the template's call
    begins with none of them. None also where one is so short or so plain that ordinary text has it.
    """
    whole = written.begin + written.call
    starts = tuple(sorted(of.starts, key=lambda start: not whole.startswith(start)))
    if not starts or not whole.startswith(starts[0]):
        return ()
    for start in starts:
        is_plain = start[0].isalnum() and not start.endswith("[")
        if len(start) < _MIN_START or is_plain:
            return ()
    return starts


def _lark(writer: GrammarWriter, text: str, name: str = "", input_rule: str = "") -> str:
    """A text with places as a sequence of Lark; control tokens in it are those tokens."""
    items: list[str] = []
    for part in _PLACE.split(text):
        match part:
            case "{name}":
                # Names in JSON are written as JSON; those of tools need no escapes elsewhere.
                items += writer.texts(json.dumps(name, ensure_ascii=False)[1:-1])
            case "{input}":
                items.append(input_rule)
            case _ if part in _PLACES:
                items.append(_PLACES[part])
            case _:
                items += writer.texts(part)
    return " ".join(items)


@dataclass(frozen=True, slots=True)
class _Rules:
    """The rules of one tool's input, argument by argument in the order of its schema."""

    writer: GrammarWriter

    def properties(self, tool: Tool) -> tuple[dict[str, Any], set[str]]:
        """Those of the schema, and which are required. Raises SchemaRefused where the schema says
        what such rules can't guarantee."""
        schema = tool.input_schema
        unheld = next((f"`{key}`" for key in _UNHELD if key in schema), "")
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        if unheld or required - properties.keys():
            fault = unheld or "`required` without a property"
            raise _refused(tool, f"{fault} can't be guaranteed", "arguments")
        return properties, required

    def json_of(self, schema: Any, tool: Tool) -> str:
        whole = tool.input_schema
        root: dict[str, Any] = {k: whole[k] for k in ("$defs", "definitions") if k in whole}
        return json_rule({**root, **(schema if isinstance(schema, Mapping) else {})})

    def text(
        self, tool: Tool, rule: str, name: str, schema: Any, around: tuple[str, str]
    ) -> list[str]:
        """A string between two texts, as it is."""
        begin = " ".join(self.writer.texts(around[0]))
        (first, *more) = self.writer.texts(around[1])
        choices = _choices(schema)
        if choices is not None:
            return [f"{rule}: {begin} ({choices}) {' '.join((first, *more))}"]
        self.check_text(tool, name, schema)
        lazy = "" if first.startswith("<[") else "[lazy]"
        return [
            f"{rule}: {begin} {rule}_v {' '.join(more)}",
            f"{rule}_v{lazy}: /(.|\\n)*/ {first}",
        ]

    def check_text(self, tool: Tool, name: str, schema: Any) -> None:
        for key in _UNHELD_IN_TEXT:
            if isinstance(schema, dict) and key in schema:
                raise _refused(tool, f"`{key}` of `{name}` can't be guaranteed", "strings")


@dataclass(frozen=True, slots=True)
class _Tagged(_Rules):
    """`gap` is the white space behind an argument."""

    tags: TagSyntax
    gap: str
    is_python: bool

    def rules(self, tool: Tool, rule: str) -> list[str]:
        properties, required = self.properties(tool)
        rules: list[str] = []
        items: list[str] = []
        for index, (name, schema) in enumerate(properties.items()):
            argument = f"{rule}_{index}"
            rules += self._argument(tool, argument, name, schema)
            items.append(argument if name in required else f"{argument}?")
        return [f"{rule}: {' '.join(items) or json.dumps('')}", *rules]

    def _argument(self, tool: Tool, rule: str, name: str, schema: Any) -> list[str]:
        types = types_of(schema, tool.input_schema)
        line = "\n" if self.tags.has_lines else ""
        # The word in the tag for the type. A tag with words for strings and for all else alone
        # takes either as JSON.
        kinds = self.tags.kinds
        words = {kinds[kind] for kind in types} if kinds else {""}
        if len(words) == 2 and words == set(kinds.values()):
            words = {kinds["null"]}
        if len(words) != 1:
            raise _refused(
                tool, f"a forced call can't have `{name}`, whose values may be of several types,"
            )
        (kind,) = words
        opened = self.tags.open.replace("{key}", name).replace("{kind}", kind) + line
        closed = line + self.tags.close_of(name) + self.gap
        if self.tags.elements and types & {"array", "object"}:
            raise _refused(
                tool, f"a forced call can't have `{name}`, whose values may be lists or objects,"
            )
        if types in ({"string"}, ALL_TYPES):
            return self.text(tool, rule, name, schema, (opened, closed))
        value = self.json_of(schema, tool)
        if self.is_python and types <= {"boolean", "null"} and _choices(schema) is None:
            python = {"boolean": '"True" | "False"', "null": '"None"'}
            value = " | ".join(word for name, word in python.items() if name in types)
        parts = [*self.writer.texts(opened), f"{rule}_v", *self.writer.texts(closed)]
        return [f"{rule}: {' '.join(parts)}", f"{rule}_v: {value}"]


@dataclass(frozen=True, slots=True)
class _Literal(_Rules):
    """`key=value, …`. A list of optional arguments has its commas right by rules for its tail."""

    syntax: LiteralSyntax
    # The quote around strings where they are Python's.
    mark: str
    # Whether numbers have the quote as well.
    quotes_all: bool
    # Whether words are JSON's.
    is_json: bool
    comma: str

    def rules(self, tool: Tool, rule: str) -> list[str]:
        properties, required = self.properties(tool)
        names = sorted(properties, key=lambda name: name not in required)
        num_required = len(required)
        rules: list[str] = []
        for index, name in enumerate(names):
            rules += self._argument(tool, f"{rule}_{index}", name, properties[name])
        comma = json.dumps(self.comma)
        tails = [f" {rule}_t{i}" if i < len(names) else "" for i in range(len(names) + 1)]
        for index in range(len(names) - 1, 0, -1):
            argument = f"{comma} {rule}_{index}"
            if index >= num_required:
                argument = f"({argument})?"
            rules.append(f"{rule}_t{index}: {argument}{tails[index + 1]}")
        firsts = range(1 if num_required else len(names))
        starts = [f"{rule}_{i}{tails[i + 1]}" for i in firsts]
        if not num_required:
            starts.append('""')
        return [f"{rule}: {' | '.join(starts)}", *rules]

    def _argument(self, tool: Tool, rule: str, name: str, schema: Any) -> list[str]:
        opened = name + self.syntax.assign
        quote = self.syntax.quote
        begin = " ".join(self.writer.texts(opened))
        types = types_of(schema, tool.input_schema)
        if types == {"string"} and quote:
            return self.text(tool, rule, name, schema, (opened + quote, quote))
        if quote and not types <= _SCALARS:
            raise _refused(
                tool, f"a forced call can't have `{name}`, whose values may be lists or objects,"
            )
        mark = json.dumps(self.mark)
        around = mark if self.quotes_all and types <= _SCALARS and not quote else ""
        if types == {"boolean"} and not quote and not self.is_json:
            return [f'{rule}: {begin} {around} ("True" | "False") {around}']
        if types == {"string"} and self.mark == "'" and not quote:
            choices = _choices(schema)
            if choices is not None:
                return [f"{rule}: {begin} {mark} ({choices}) {mark}"]
            self.check_text(tool, name, schema)
            return [f"{rule}: {begin} /'[^'\\\\\\n]*'/"]
        value = self.json_of(schema, tool)
        return [f"{rule}: {begin} {around} {rule}_v {around}", f"{rule}_v: {value}"]


def _refused(tool: Tool, fault: str, written: str = "them") -> SchemaRefused:
    return SchemaRefused(
        f"input_schema of `{tool.name}`: {fault} in the way in which this model writes {written}"
    )


def _choices(schema: Any) -> str | None:
    """The strings that a schema lists, None where it lists none or lists other values."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    if not all(isinstance(value, str) for value in values):
        return None
    return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
