"""From a model's text to deltas, however it is cut: calls of every format, thinking, stop strings,
and nothing lost in between."""

import json
import random
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from engine.errors import SchemaRefused
from engine.protocol import (
    Delta,
    Sampling,
    TextDelta,
    ThinkingDelta,
    Tool,
    ToolChoice,
    ToolInputDelta,
    ToolUseStart,
)
from engine.text.formats import arguments
from engine.text.formats.arguments import Elements
from engine.text.formats.calls import FormatParser, JsonObjectStream, PlainText
from engine.text.formats.matching import StopFinder, StopStrings
from engine.text.formats.reasoning import REASONING_FORMATS, ThinkingParser
from engine.text.formats.table import TOOL_FORMATS
from engine.text.grammar import GrammarWriter
from engine.text.renderer import TurnParser
from engine.text.template.messages import TemplateTraits
from engine.text.tokens.detokenize import Vocabulary
from tests.engine.backends.local import prompt, request
from tests.engine.text.templates import demo_renderer

Block = tuple[str, str]

END = 2
ARGUMENTS = '{"a": [1, {"b": "}]; \\"é\\""}], "c": null}'
HERMES = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA = f'{{"name": "f", "parameters": {ARGUMENTS}}}'
MISTRAL = f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}]'
NAMED = f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def blocks_of(deltas: Sequence[Delta]) -> list[Block]:
    """What a reader makes of the deltas: neighbours of one kind are one block."""
    pairs: list[Block] = []
    for delta in deltas:
        match delta:
            case TextDelta(text) | ThinkingDelta(text):
                kind = "text" if isinstance(delta, TextDelta) else "thinking"
                if pairs and pairs[-1][0] == kind:
                    pairs[-1] = (kind, pairs[-1][1] + text)
                else:
                    pairs.append((kind, text))
            case ToolUseStart():
                pairs.append((delta.name, ""))
            case ToolInputDelta(partial):
                name, arguments = pairs[-1]
                assert name not in ("text", "thinking"), "input outside of a call"
                pairs[-1] = (name, arguments + partial)
    return pairs


def blocks(parser: FormatParser, pieces: Sequence[str]) -> list[Block]:
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return blocks_of([*deltas, *parser.close()])


def new_parser(tool_format: str) -> FormatParser:
    return TOOL_FORMATS[tool_format].new_parser([Tool(name, {}) for name in ("f", "get_time")])


def parse(tool_format: str, text: str) -> list[Block]:
    whole = blocks(new_parser(tool_format), [text])
    assert blocks(new_parser(tool_format), list(text)) == whole
    return whole


def split(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    borders = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 12))))
    return [text[a:b] for a, b in pairwise([0, *borders, len(text)])]


@pytest.mark.parametrize(
    ("tool_format", "text", "names"),
    [
        ("hermes", HERMES, ["f"]),
        ("hermes", HERMES + "\n" + HERMES, ["f", "f"]),
        ("hermes", HERMES.removesuffix("\n</tool_call>"), ["f"]),
        ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', ["f"]),
        ("hermes", '<tool_call>{"type": "function", "name": "x", "arguments": {}}', ["x"]),
        ("llama3_json", LLAMA, ["f"]),
        ("llama3_json", f"{LLAMA}; {LLAMA}", ["f", "f"]),
        ("llama3_json", f"\n{LLAMA}\n{LLAMA};", ["f", "f"]),
        ("llama3_json", "<|python_tag|>" + LLAMA.replace('"f"', '"unknown"'), ["unknown"]),
        ("llama3_json", '{"parameters": {"x": 1}, "name": "f"}', ["f"]),
        ("llama3_json", '{"name": "get_time"}', ["get_time"]),
        ("llama3_json", '{"type": "function", "name": "f", "arguments": {}}', ["f"]),
        ("llama4_json", f"<|python_start|>{LLAMA}<|python_end|>", ["f"]),
        ("llama4_json", f"{LLAMA}", ["f"]),
        ("internlm2", f"<|action_start|><|plugin|>\n{LLAMA}<|action_end|>\n", ["f"]),
        ("mistral", MISTRAL, ["f"]),
        ("mistral", MISTRAL[:-1] + ', {"name": "g", "arguments": {}}]', ["f", "g"]),
        ("mistral", MISTRAL.replace("] [", "]["), ["f"]),
        ("mistral", MISTRAL.removesuffix("]"), ["f"]),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"x": 1}}', ["f"]),
        ("mistral", NAMED, ["f"]),
        ("mistral", NAMED + NAMED.replace("]f[", "]g-h[CALL_ID]a1b2c3d4e["), ["f", "g-h"]),
        ("mistral", "[TOOL_CALLS]f" + ARGUMENTS, ["f"]),
    ],
)  # fmt: skip
def test_calls_are_found(tool_format: str, text: str, names: list[str]) -> None:
    calls = parse(tool_format, text)
    assert [name for name, _ in calls] == names
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    if "{" + ARGUMENTS[1:] in text:
        assert json.loads(calls[0][1]) == json.loads(ARGUMENTS)


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", '{"arguments": {}, "name": ["f"]}'),
        ("llama3_json", '{"name": "Ada", "parameters": {"born": 1815}}'),
        ("llama3_json", "Then {\"name\": \"f\", \"parameters\": {}}"),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", "<|python"),
        ("llama3_json", '{"name": "f", "parameters": "x"}'),
        ("llama3_json", '{"name": "f"'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] [no JSON]"),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", "[TOOL_CALLS]two words{}"),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("mistral", '[TOOL_CALLS] [{"name": 3}]'),
        ("mistral", "see [1] and [TOOL"),
        ("hermes", "<tool_call>[1]</tool_call>"),
        ("hermes", "Before \n<tool_call>no JSON</tool_call>"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call> and on'),
        ("hermes", '<tool_call>{"name": "f"'),
        ("hermes", "<tool_call><function=f></function></tool_call>"),
        ("hermes", "<tool_cal"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_text(tool_format: str, text: str) -> None:
    assert parse(tool_format, text) == [("text", text)]


FRAGMENTS = {
    "hermes": [HERMES, "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', '"a": 1}}'],
    "llama3_json": [LLAMA, "<|python_tag|>", ";", '{"name": "f", ', '"parameters": {"a": 1', "}}"],
    "mistral": [MISTRAL, NAMED, "[TOOL_CALLS]", "[ARGS]", "[", "]", ",", "f", '{"name": "f"}'],
}


@pytest.mark.parametrize("tool_format", list(FRAGMENTS))
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_output_gives_the_same_blocks_however_it_is_cut_and_loses_nothing(
    tool_format: str, data: st.DataObject
) -> None:
    fragment = st.sampled_from([*FRAGMENTS[tool_format], " ", "\n", "text é", '"', "{", "}"])
    text = "".join(data.draw(st.lists(fragment, max_size=8)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    pieces = [text[a:b] for a, b in pairwise(sorted([0, *cuts, len(text)]))]
    whole = parse(tool_format, text)
    assert blocks(new_parser(tool_format), pieces) == whole
    if all(kind == "text" for kind, _ in whole):
        assert "".join(text_piece for _, text_piece in whole) == text


def test_a_call_that_stops_being_json_keeps_the_rest_as_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1 oops}}</tool_call>'
    assert parse("hermes", text) == [("f", '{"a": 1 '), ("text", "oops}}</tool_call>")]


@pytest.mark.parametrize(
    ("call_id", "comes_back"), [("a1b2C3d4e", True), ("short", False), ("with_bars", False)]
)
def test_the_id_that_mistral_writes_before_an_input_comes_back(
    call_id: str, comes_back: bool
) -> None:
    parser = TOOL_FORMATS["mistral"].new_parser([])
    deltas = parser.feed(f'[TOOL_CALLS]f[CALL_ID]{call_id}[ARGS]{{"a": 1}}')
    (start,) = [delta for delta in deltas if isinstance(delta, ToolUseStart)]
    assert re.fullmatch("toolu_[0-9a-zA-Z]{24}", start.id)
    assert start.id.endswith(call_id) == comes_back
    assert TemplateTraits(shortens_ids=True).call_id(start.id) == start.id[-9:]


# Thinking.

HM = [("thinking", "Hm.\n\nYes < no"), ("text", "Answer <b>\n")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nHm.\n\nYes < no\n</think>\n\nAnswer <b>\n", HM),
        ("(open)Hm.\n\nYes < no\n</think>\n\nAnswer <b>\n", HM),
        ("[THINK]Hm.[/THINK]A", [("thinking", "Hm."), ("text", "A")]),
        ("I say <think>x</think>", [("text", "I say <think>x</think>")]),
        ("<thin air>", [("text", "<thin air>")]),
        (" <think", [("text", " <think")]),
        ("<think>\n\n</think>\n\nA", [("text", "A")]),
        ("<think>never </thi", [("thinking", "never </thi")]),
    ],
)
def test_only_the_beginning_of_a_turn_is_thinking_without_the_space_around_it(
    text: str, expected: list[Block]
) -> None:
    tags = REASONING_FORMATS["mistral" if text[0] == "[" else "think"]
    is_open = text.startswith("(open)")
    text = text.removeprefix("(open)")
    for pieces in ([text], list(text)):
        assert blocks(ThinkingParser(tags, PlainText(), is_open=is_open), pieces) == expected


def test_calls_in_thinking_are_thoughts_and_calls_behind_it_are_calls() -> None:
    parser = ThinkingParser(REASONING_FORMATS["think"], new_parser("hermes"), is_open=True)
    kinds = blocks(parser, list(f"I write {HERMES}</think>\n{HERMES}"))
    assert [kind for kind, _ in kinds] == ["thinking", "f"]
    assert parser.num_calls == 1


# A turn: tokens, calls and stop strings.


def turn(text: str, *, ends: bool = True, **options: Any) -> tuple[list[Delta], TurnParser]:
    stops = Sampling(max_tokens=99, stop_sequences=options.pop("stops", []))
    turn_request = request(prompt("u", tools=[Tool("f", {})]), sampling=stops, **options)
    parser = demo_renderer().parser(turn_request)
    assert isinstance(parser, TurnParser)
    token_ids = demo_renderer().tokenizer.encode(text, add_special_tokens=False).ids
    deltas: list[Delta] = []
    for token_id in [*token_ids, *([END] if ends else [])]:
        deltas += parser.feed(token_id)
        if parser.finish is not None:
            break
    return [*deltas, *parser.close()], parser


def test_a_call_streams_and_ends_the_turn_with_tool_use() -> None:
    deltas, parser = turn("I look.\n" + HERMES)
    first_block, (name, arguments) = blocks_of(deltas)
    assert first_block == ("text", "I look.")
    assert (name, json.loads(arguments)) == ("f", json.loads(ARGUMENTS))
    assert sum(isinstance(delta, ToolInputDelta) for delta in deltas) > 3
    assert parser.finish == "tool_use"
    deltas, parser = turn(HERMES, tool_choice=ToolChoice("none"))
    assert (blocks_of(deltas), parser.finish) == ([("text", HERMES)], "stop")


@pytest.mark.parametrize("tail", [HERMES, " and text", "<tool_call>{", "<tool_ca"])
def test_nothing_behind_the_first_call_is_told_without_parallel_calls(tail: str) -> None:
    text = "Hm. " + HERMES.replace("}}", "} }") + tail
    deltas, _ = turn(text, tool_choice=ToolChoice(parallel=False), stops=["}}"])
    assert [kind for kind, _ in blocks_of(deltas)] == ["text", "f"]


def test_a_stop_string_across_tokens_ends_the_turn_and_is_not_shown() -> None:
    text = "This is the EN and the END of it, no more"
    deltas, parser = turn(text, stops=["END of it", "zzz"], ends=False)
    assert blocks_of(deltas) == [("text", "This is the EN and the ")]
    assert (parser.finish, parser.stop_sequence) == ("stop_sequence", "END of it")


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
       st.integers(0, 99))  # fmt: skip
def test_the_first_completed_stop_string_wins_however_the_text_is_cut(
    text: str, stops: list[str], seed: int
) -> None:
    finder = StopFinder(StopStrings(stops))
    passed = "".join(finder.feed(piece) for piece in split(text, seed)) + finder.flush()
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert passed == (text[: min(ends)[1]] if ends else text)
    assert (finder.found is None) == (not ends)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=5), st.integers(0, 99), st.booleans())
def test_any_json_object_streams_through_unchanged(
    value: dict[str, object], seed: int, ascii_only: bool
) -> None:
    json_text = json.dumps(value, ensure_ascii=ascii_only, indent=seed % 3 or None)
    stream = JsonObjectStream()
    out = "".join(stream.feed(piece) for piece in split(json_text, seed))
    assert out == json_text
    assert stream.is_complete and not stream.is_broken


@pytest.mark.parametrize(
    ("json_text", "meant"),
    [
        ('{"a": "one\ntwo"}', {"a": "one\ntwo"}),
        (r'{"a": "\d+ \uZZ"}', {"a": r"\d+ \uZZ"}),
        (r'{"a": "C:\w\""}', {"a": 'C:\\w"'}),
    ],
)
def test_mistakes_inside_strings_are_corrected(json_text: str, meant: dict[str, str]) -> None:
    assert msgspec.json.decode(JsonObjectStream().feed(json_text)) == meant


@pytest.mark.parametrize(
    "broken",
    [
        *("{a: 1}", "{'a': 1}", '{"a" 1}', '{"a": 01}', '{"a": nul}', '{"a": 1,}', '{"a": [1,]}'),
        *('{"a": tru e}', "[1]", '{"a": }', "{,}", '{"a": 1 "b": 2}'),
    ],
)
def test_what_is_no_json_is_noticed_and_kept(broken: str) -> None:
    stream = JsonObjectStream()
    out = stream.feed(broken)
    assert stream.is_broken
    assert out + stream.rest == broken


def test_a_demand_that_outgrows_the_grammars_limits_ends_by_name() -> None:
    schema = {"type": "object", "additionalProperties": {"pattern": "^(a|b)*cc*$"}}
    turn_request = request("u", output_schema=schema)
    tokenizer = demo_renderer().tokenizer

    def parser(limits: LLParserLimits) -> TurnParser:
        constraint = GrammarWriter(tokenizer, [END], limits).constraint(turn_request, None, None)
        return TurnParser(
            Vocabulary(tokenizer).detokenizer(),
            StopFinder(StopStrings([])),
            PlainText(),
            frozenset({END}),
            constraint,
        )

    with pytest.raises(SchemaRefused):
        parser(LLParserLimits(step_max_items=1))
    failing = parser(LLParserLimits(max_lexer_states=2))
    assert failing.allowed
    failing.feed(tokenizer.encode("{").ids[0])
    assert failing.constraint is not None and not failing.constraint.is_ready
    failing.constraint.compute()
    assert failing.constraint.is_failed and failing.allowed == b""
    assert parser(LLParserLimits()).feed(tokenizer.encode("{").ids[0])


# Values that are written as elements: what they stand for is told by the schema.

NUMBERS = {"type": "object", "properties": {"n": {"type": "integer"}, "t": {"type": "string"}}}
SCHEMA = {"type": "array", "items": {"$ref": "#/$defs/row"}, "$defs": {"row": NUMBERS}}


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("<item><n>3</n><t>3</t></item>", SCHEMA, [{"n": 3, "t": "3"}]),
        ("", {"type": "array"}, []),
        ("<item>1</item><item>a</item>", {}, [1, "a"]),
        ("<item>1</item>", {"type": "object"}, {"item": 1}),
        ("<a>1</a><b><c>x</c></b>", None, {"a": 1, "b": {"c": "x"}}),
        ("", {"type": "object"}, {}),
        ("", {"type": "string"}, ""),
        ("<a>1</a>", {"type": "string"}, "~<a>1~</a>"),
        ("some <a>1</a>", {}, "some ~<a>1~</a>"),
        ("<a>1</b>", {}, "~<a>1~</b>"),
        ("<a>1", {}, "~<a>1"),
    ],
)
def test_elements_are_lists_and_objects_by_the_schema_and_others_are_text(
    text: str, schema: Any, expected: Any
) -> None:
    assert Elements("~", SCHEMA).value(text.replace("<", "~<"), schema) == expected
    assert not text or Elements("~", SCHEMA).value(text, {}) == text, "it has no prefix"


def test_a_deep_nest_ends() -> None:
    value = Elements("~", SCHEMA).value("~<a>" * 500 + "~</a>" * 500, None)
    depth = 0
    while isinstance(value, dict):
        value = value["a"]
        depth = depth + 1
    assert 10 < depth < 100 and isinstance(value, str)


def test_a_schema_is_looked_at_once_however_many_elements_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[object] = []
    real = arguments.types_of

    def types_of(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
        looked.extend([schema] if depth == 0 else [])
        return real(schema, root, depth)

    monkeypatch.setattr(arguments, "types_of", types_of)
    items = {"type": "array", "items": {"anyOf": [{"type": "integer"}] * 100}}
    assert Elements("~", {}).value("~<item>1~</item>" * 500, items) == [1] * 500
    assert len(looked) == 2
