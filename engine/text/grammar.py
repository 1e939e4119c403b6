"""Grammars of output that must have a form: a forced tool call, or an answer of a JSON schema.

llguidance follows a grammar token by token, and says which tokens may come next. JSON is written as
templates write it: `", "`, `": "` and no other white space. So a replayed call renders to the
tokens that were sampled, and no model can write white space without end. `engine.text.call_styles`
writes the rules of calls in a model's format.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
from engine.text.formats.reasoning import ReasoningFormat

_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
_JSON_OPTIONS = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": True,
    "lenient": False,
}
# An object schema without properties and without any of these says nothing about its keys. A forced
# call then has no keys. Otherwise the model would invent some, because it must write on.
_MAY_HAVE_KEYS = ("additionalProperties", "patternProperties", "propertyNames", "required", "$ref",
                  "allOf", "anyOf", "oneOf", "minProperties", "unevaluatedProperties")  # fmt: skip
_MAX_REASON = 200
_ANY = "/(.|\\n)*/"
_TRIED_TOKENS = 64
"""The tokens of text on which a pattern is tried. It exceeds the library's limits early or never.
"""
_TRIED_PATTERNS = 64
"""The most patterns of a schema that are tried. A further pattern that is too costly ends the
answer when it comes."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
_POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


class Constraint:
    """One choice's state in a grammar."""

    def __init__(self, matcher: LLMatcher, grammar: str) -> None:
        # The grammar in llguidance's form of Lark.
        self.grammar = grammar
        # Only the end may come.
        self.is_complete = False
        # The library gave up at its limits on time and memory. So no token is allowed.
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
        """The token mask: a bit for each token id, the lowest first. Tokens beyond its end are not
        allowed."""
        self.compute()
        assert self._allowed is not None
        return self._allowed

    def take(self, token_id: TokenId) -> None:
        """Move on behind a token of the choice."""
        is_taken = self._matcher.consume_token(token_id)
        self._allowed = None
        self._settle()
        self.is_failed = self.is_failed or not is_taken

    def compute(self) -> None:
        """Compute the token mask, unless it is known.

        This may take long. The interpreter's lock is free meanwhile.
        """
        if self._allowed is None:
            mask: bytes = self._matcher.compute_bitmask()
            self.is_failed = self._matcher.is_error()
            # From here on the engine's thread may take a token.
            self._allowed = b"" if self.is_failed else mask

    def copy(self) -> "Constraint":
        """A copy for another choice. Both share the compiled grammar."""
        copy = Constraint(self._matcher.deep_copy(), self.grammar)
        copy._allowed = self._allowed
        return copy

    def _settle(self) -> None:
        """Note whether the grammar has ended or failed. It must be called after every token."""
        self.is_failed = self._matcher.is_error()
        if self.is_failed or self._matcher.is_stopped():
            self.is_complete = not self.is_failed
            self._allowed = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStyle:
    """How one format writes calls, as Lark."""

    # Writes one call. It takes a tool's name and the name of the rule of its input.
    call: Callable[[str, str], str]
    # Writes the rules of a tool's input that is no JSON. It takes the tool and the name of the
    # rule. It raises SchemaRefused for a schema that it can't guarantee. None: the input is JSON.
    input_rules: Callable[[Tool, str], list[str]] | None = None
    # The markup before all calls.
    begin: str = ""
    # The markup between calls.
    separator: str = ""
    # The markup behind all calls.
    end: str = ""
    # The texts with which calls begin (`free_rules`). Empty: ordinary text may begin like a call.
    starts: tuple[str, ...] = ()


def default_limits() -> LLParserLimits:
    """The limits of one grammar: milliseconds for a token's mask, tens of MiB for the grammar.

    With the library's own `initial_lexer_fuel` of a million, `((a{1000}){1000}){1000}` takes a
    second and 300 MiB. Its own limit of 2,000 items in a row allows only 500 optional properties.
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

    `limits` are the limits of one grammar, at compilation and at every token.
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
        """A marker as Lark: the control token if the marker is one, else its text."""
        token_id = self._tokenizer.token_to_id(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def texts(self, text: str) -> list[str]:
        """A text as Lark. The texts of control tokens in it become those tokens."""
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
        """The constraint of a choice of the request; None if nothing constrains it.

        Raises SchemaRefused, whose message names the schema that can't be guaranteed.
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
        """The refusal of a request whose grammar the library can't compile.

        It names the schema at fault, if a single schema is at fault. `matcher` failed on all of
        them together.
        """
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
        # The input of a tool that is not strict may be any object, if inputs are JSON.
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
        """The rule `calls` and the rules it needs. Inputs of the tools in `loose` are any
        objects."""
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
        """The reason why the library gives up on text of a pattern; empty if it does not."""
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
    """The thinking that may come before the constrained part."""

    tags: ReasoningFormat
    # Whether the prompt already has the opening tag.
    is_open: bool

    def rules(self, writer: GrammarWriter) -> list[str]:
        """The rule `thinking` and the rule it needs."""
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
    """The schemas that constrain the output, each with the name of its field."""
    called = {tool.name for tool in _called(request)}
    for index, tool in enumerate(request.prompt.callable_tools):
        if tool.name in called:
            yield f"tools[{index}].input_schema of `{tool.name}`", _object_schema(tool)
    if request.output_schema is not None:
        yield "output_schema", request.output_schema


def _patterns(value: Any) -> Iterator[str]:
    """The patterns with counted repetition in a schema. No others exceed the library's limits."""
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
    """The schema of a tool's input, which is always an object.

    Raises SchemaRefused if the schema allows no object.
    """
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
    """The right side of a rule for the text of a constrained answer."""
    if request.output_pattern is None:
        return json_rule(request.output_schema or {})
    # A slash or a line break would end the pattern, so it is escaped unless it already is.
    escaped = {"/": "\\/", "\n": "\\n"}
    pattern = _SLASH.sub(
        lambda match: escaped.get(match.group(), match.group()), request.output_pattern
    )
    return f"/{pattern}/"


def _reason(matcher: LLMatcher) -> str:
    """The reason why the library gave up, in one line."""
    lines: list[str] = matcher.get_error().strip().splitlines() or ["unknown"]
    return _POSITION.sub("", lines[0])[:_MAX_REASON]


def free_rules(starts: Sequence[str], pieces: Sequence[str], *, parallel: bool) -> list[str]:
    """The rule `free`, which is text with calls, and the rules it needs.

    It uses the rule `calls`. `pieces` are the first start as Lark. If the start begins with a
    control token, `calls` begins with that token. Otherwise the rule `head` has the beginning of
    the start, and `calls` continues behind it (`behind_head`).
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
    """Whether a piece of Lark is a control token."""
    return piece.startswith("<[")


def behind_head(rule: str, pieces: Sequence[str]) -> str:
    """A rule's Lark without the part that the rule `head` has."""
    if len(pieces) > 1:
        return rule.removeprefix(" ".join(pieces[:2])).lstrip()
    literal, end = json.JSONDecoder().raw_decode(rule)
    rest = str(literal).removeprefix(json.loads(pieces[0]))
    return f"{json.dumps(rest, ensure_ascii=False) if rest else ''}{rule[end:]}"


def _any_of(starts: Iterable[str]) -> str:
    """A regular expression for one of these texts."""
    return "|".join(map(_escaped, starts))


def _escaped(text: str) -> str:
    """A regular expression for this text."""
    return re.sub(r"([\\.^$*+?()\[\]{}|/#&~-])", r"\\\1", text)
