"""From tokens to deltas: stop strings, tool calls, and nothing lost in between."""

import json
import random
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from engine.errors import SchemaRefused
from engine.protocol import (
    Delta,
    GenerateRequest,
    Message,
    Prompt,
    Sampling,
    TextDelta,
    TextPart,
    Tool,
    ToolChoice,
    ToolInputDelta,
    ToolUseStart,
)
from engine.schedule.output import OutputParser
from engine.text.formats.calls import PlainText, new_tool_use_id
from engine.text.formats.json_stream import JsonObjectStream
from engine.text.formats.stops import StopFinder, StopStrings
from engine.text.formats.turn_parser import TurnEnd, TurnParser
from engine.text.grammar import GrammarWriter
from engine.text.tokens.detokenize import Vocabulary
from tests.engine.text.templates import demo_renderer

END = 2
CALL = (
    '<tool_call>\n{"name": "f", "arguments": {"a": [1, -2.5e3, true], "b": "}\\"é"}}\n</tool_call>'
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def request(choice: ToolChoice | None = None, stops: list[str] | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        scope="0" * 32,
        prompt=Prompt([Message("user", [TextPart("u")])], [Tool("f", {})]),
        sampling=Sampling(max_tokens=99, stop_sequences=stops or []),
        tool_choice=choice or ToolChoice(),
    )


def feed(parser: OutputParser, text: str, *, ends: bool = True) -> list[Delta]:
    token_ids = demo_renderer().tokenizer.encode(text, add_special_tokens=False).ids
    deltas: list[Delta] = []
    for token_id in [*token_ids, *([END] if ends else [])]:
        deltas += parser.feed(token_id)
        if parser.finish is not None:
            break
    return [*deltas, *parser.close()]


def texts(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


def calls(deltas: Iterable[Delta]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, ToolUseStart):
            found.append((delta.name, ""))
        elif isinstance(delta, ToolInputDelta):
            name, written = found[-1]
            found[-1] = (name, written + delta.partial_json)
    return found


def split(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    borders = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 12))))
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-8") | st.sampled_from("😀\n é")))
def test_text_without_calls_comes_out_as_it_was(text: str) -> None:
    if "<" not in text:
        parser = demo_renderer().parser(request())
        assert texts(feed(parser, text)) == text
        assert parser.finish == "stop"


def test_a_call_streams_and_ends_the_turn_with_tool_use() -> None:
    parser = demo_renderer().parser(request())
    deltas = feed(parser, "I look.\n" + CALL)
    assert texts(deltas) == "I look."
    [(name, written)] = calls(deltas)
    assert (name, json.loads(written)) == ("f", {"a": [1, -2500.0, True], "b": '}"é'})
    assert sum(isinstance(delta, ToolInputDelta) for delta in deltas) > 3
    assert parser.finish == "tool_use"


def test_tool_choice_none_parses_no_calls() -> None:
    parser = demo_renderer().parser(request(ToolChoice("none")))
    assert texts(feed(parser, CALL)) == CALL
    assert parser.finish == "stop"


def test_nothing_behind_the_first_call_is_told_without_parallel_calls() -> None:
    for more in (CALL, " and text", "<tool_call>{", "<tool_ca"):
        parser = demo_renderer().parser(request(ToolChoice(parallel=False), stops=["}}"]))
        deltas = feed(parser, "Hm. " + CALL.replace("}}", "} }") + more)
        assert [type(delta).__name__ for delta in deltas][-1] == "ToolInputDelta"
        assert (len(calls(deltas)), texts(deltas)) == (1, "Hm.")


def test_ids_look_like_anthropics() -> None:
    ids = {new_tool_use_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(i) == 30 and i.startswith("toolu_") and i[6:].isalnum() for i in ids)


def test_a_stop_string_across_tokens_ends_the_turn_and_is_not_shown() -> None:
    parser = demo_renderer().parser(request(stops=["END of it", "zzz"]))
    deltas = feed(parser, "This is the EN and the END of it, no more", ends=False)
    assert texts(deltas) == "This is the EN and the "
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


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=5), st.integers(0, 99), st.booleans())
def test_any_json_object_streams_through_unchanged(
    value: dict[str, object], seed: int, ascii_only: bool
) -> None:
    written = json.dumps(value, ensure_ascii=ascii_only, indent=seed % 3 or None)
    stream = JsonObjectStream()
    out = "".join(stream.feed(piece) for piece in split(written, seed))
    assert out == written
    assert stream.is_complete and not stream.is_broken


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"a": "one\ntwo"}', {"a": "one\ntwo"}),
        (r'{"a": "\d+ \uZZ"}', {"a": r"\d+ \uZZ"}),
        (r'{"a": "C:\w\""}', {"a": 'C:\\w"'}),
    ],
)
def test_mistakes_inside_strings_are_corrected(written: str, meant: dict[str, str]) -> None:
    stream = JsonObjectStream()
    assert msgspec.json.decode(stream.feed(written)) == meant


@pytest.mark.parametrize(
    "broken",
    [
        "{a: 1}",
        "{'a': 1}",
        '{"a" 1}',
        '{"a": 01}',
        '{"a": nul}',
        '{"a": 1,}',
        '{"a": [1,]}',
        '{"a": tru e}',
        "[1]",
        '{"a": }',
        "{,}",
        '{"a": 1 "b": 2}',
    ],
)
def test_what_is_no_json_is_noticed_and_kept(broken: str) -> None:
    stream = JsonObjectStream()
    out = stream.feed(broken)
    assert stream.is_broken
    assert out + stream.rest == broken


def test_a_demand_that_outgrows_the_grammars_limits_ends_as_failed() -> None:
    schema = {"type": "object", "additionalProperties": {"pattern": "^(a|b)*c{1,50}$"}}
    asked = msgspec.structs.replace(request(), output_schema=schema)
    asked = msgspec.structs.replace(asked, prompt=Prompt(asked.prompt.messages))
    tokenizer = demo_renderer().tokenizer

    def parser(limits: LLParserLimits) -> TurnParser:
        constraint = GrammarWriter(tokenizer, [END], limits).constraint(asked, None, None)
        return TurnParser(
            Vocabulary(tokenizer).detokenizer(),
            StopFinder(StopStrings([])),
            PlainText(),
            TurnEnd(token_ids=frozenset({END})),
            constraint,
        )

    with pytest.raises(SchemaRefused):
        parser(LLParserLimits(step_max_items=1))
    failing = parser(LLParserLimits(max_lexer_states=2))
    assert failing.allowed
    failing.feed(tokenizer.encode("{").ids[0])
    assert failing.mask is not None and not failing.mask.is_ready
    failing.mask.compute()
    assert failing.mask.is_failed and failing.allowed == b""
    assert parser(LLParserLimits()).feed(tokenizer.encode("{").ids[0])
