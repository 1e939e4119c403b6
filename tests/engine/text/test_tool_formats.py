"""Tool calls of every format: found, streamed, the same however the text is cut, nothing lost."""

import json
from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import Delta, TextDelta, ThinkingDelta, Tool, ToolInputDelta, ToolUseStart
from engine.text.formats import arguments
from engine.text.formats.arguments import Elements
from engine.text.formats.calls import FormatParser, PlainText
from engine.text.formats.reasoning import REASONING_FORMATS, ThinkingParser
from engine.text.formats.table import TOOL_FORMATS
from engine.text.template.messages import TemplateTraits

Block = tuple[str, str]
TOOLS = ["f", "get_time"]

ARGUMENTS = '{"a": [1, {"b": "}]; \\"é\\""}], "c": null}'
HERMES = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA = f'{{"name": "f", "parameters": {ARGUMENTS}}}'
MISTRAL = f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}]'
NAMED = f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}"


def new_parser(tool_format: str) -> FormatParser:
    numbers = count()
    tools = [Tool(name, {}) for name in TOOLS]
    return TOOL_FORMATS[tool_format].new_parser(lambda: f"id{next(numbers)}", tools)


def blocks(parser: FormatParser, pieces: Sequence[str]) -> list[Block]:
    """What a reader makes of the deltas: neighbours of one kind are one block."""
    deltas: list[Delta] = [delta for piece in pieces for delta in parser.feed(piece)]
    found: list[Block] = []
    for delta in [*deltas, *parser.close()]:
        match delta:
            case TextDelta(text) | ThinkingDelta(text):
                kind = "text" if isinstance(delta, TextDelta) else "thinking"
                if found and found[-1][0] == kind:
                    found[-1] = (kind, found[-1][1] + text)
                else:
                    found.append((kind, text))
            case ToolUseStart():
                found.append((delta.name, ""))
            case ToolInputDelta(partial):
                name, written = found[-1]
                assert name not in ("text", "thinking"), "input outside of a call"
                found[-1] = (name, written + partial)
    return found


def parse(tool_format: str, text: str) -> list[Block]:
    whole = blocks(new_parser(tool_format), [text])
    assert blocks(new_parser(tool_format), list(text)) == whole
    return whole


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
    found = parse(tool_format, text)
    assert [name for name, _ in found] == names
    assert all(isinstance(json.loads(written), dict) for _, written in found)
    if "{" + ARGUMENTS[1:] in text:
        assert json.loads(found[0][1]) == json.loads(ARGUMENTS)


def test_a_call_that_stops_being_json_keeps_the_rest_as_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1 oops}}</tool_call>'
    assert parse("hermes", text) == [("f", '{"a": 1 '), ("text", "oops}}</tool_call>")]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", '{"arguments": {}, "name": ["f"]}'),
        ("llama3_json", '{"name": "Ada", "parameters": {"born": 1815}}'),
        ("llama3_json", '{"name": "Ada", "born": 1815}'),
        ("llama3_json", "Then {\"name\": \"f\", \"parameters\": {}}"),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", "<|python"),
        ("llama3_json", '{"name": "f", "parameters": "x"}'),
        ("llama3_json", '{"name": "f"'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] [no JSON]"),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", "[TOOL_CALLS] I think not"),
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
        ("hermes", "<tool_call>"),
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
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_cut_of_any_output_gives_the_same_blocks(tool_format: str, data: st.DataObject) -> None:
    fragment = st.sampled_from([*FRAGMENTS[tool_format], " ", "\n", "text é", '"', "{", "}"])
    text = "".join(data.draw(st.lists(fragment, max_size=8)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    pieces = [text[a:b] for a, b in pairwise(sorted([0, *cuts, len(text)]))]
    whole = blocks(new_parser(tool_format), [text])
    assert blocks(new_parser(tool_format), pieces) == whole
    assert blocks(new_parser(tool_format), list(text)) == whole


@pytest.mark.parametrize("tool_format", list(FRAGMENTS))
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_text_without_a_whole_call_is_never_lost(tool_format: str, data: st.DataObject) -> None:
    parts = [p for p in FRAGMENTS[tool_format] if p not in (HERMES, LLAMA, MISTRAL, NAMED)]
    text = "".join(data.draw(st.lists(st.sampled_from([*parts, "word", " ", "{"]), max_size=7)))
    parser = new_parser(tool_format)
    found = blocks(parser, [text])
    if all(kind == "text" for kind, _ in found):
        assert "".join(written for _, written in found) == text


# Thinking.


def think(text: str, *, is_open: bool = False, name: str = "think") -> list[Block]:
    def parser() -> FormatParser:
        return ThinkingParser(REASONING_FORMATS[name], PlainText(), is_open=is_open)

    whole = blocks(parser(), [text])
    assert blocks(parser(), list(text)) == whole
    return whole


def test_thinking_is_taken_out_with_the_space_around_it() -> None:
    expected = [("thinking", "Hm.\n\nYes < no"), ("text", "Answer <b>\n")]
    assert think("<think>\nHm.\n\nYes < no\n</think>\n\nAnswer <b>\n") == expected
    assert think("Hm.\n\nYes < no\n</think>\n\nAnswer <b>\n", is_open=True) == expected
    assert think("[THINK]Hm.[/THINK]A", name="mistral") == [("thinking", "Hm."), ("text", "A")]


def test_only_the_beginning_of_a_turn_is_thinking() -> None:
    assert think("I say <think>x</think>") == [("text", "I say <think>x</think>")]
    assert think("<thin air>") == [("text", "<thin air>")]
    assert think(" <think") == [("text", " <think")]
    assert think("<think>\n\n</think>\n\nA") == [("text", "A")]
    assert think("<think>never </thi") == [("thinking", "never </thi")]


def test_calls_in_thinking_are_thoughts_and_calls_behind_it_are_calls() -> None:
    inner = new_parser("hermes")
    parser = ThinkingParser(REASONING_FORMATS["think"], inner, is_open=True)
    found = blocks(parser, list(f"I write {HERMES}</think>\n{HERMES}"))
    assert [kind for kind, _ in found] == ["thinking", "f"]
    assert parser.num_calls == 1


@pytest.mark.parametrize(
    ("written", "tail"),
    [("a1b2C3d4e", "a1b2C3d4e"), ("short", "000000000"), ("with_bars", "000000000")],
)
def test_the_id_that_mistral_writes_before_an_input_comes_back(written: str, tail: str) -> None:
    ours = "toolu_" + "0" * 24
    parser = TOOL_FORMATS["mistral"].new_parser(lambda: ours, [])
    deltas = parser.feed(f'[TOOL_CALLS]f[CALL_ID]{written}[ARGS]{{"a": 1}}')
    (start,) = [delta for delta in deltas if isinstance(delta, ToolUseStart)]
    assert start.id == ours[:-9] + tail
    assert TemplateTraits(shortens_ids=True).call_id(start.id) == tail


# Values that are written as elements: what they stand for is told by the schema.

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}},
        "none": {"type": "array"},
    },
    "$defs": {"row": {"type": "object", "properties": {"id": {"type": "string"}}}},
}


def with_prefix(text: str) -> str:
    return text.replace("<", "~<")


def value(text: str, schema: Any = SCHEMA) -> Any:
    return Elements("~", SCHEMA).value(with_prefix(text), schema)


def test_elements_are_lists_and_objects_by_the_schema() -> None:
    rows = "<rows><item><id>7</id></item><item><id>8</id></item></rows>"
    text = f"<name>true</name><count>3</count>{rows}<none></none>"
    expected = {"name": "true", "count": 3, "rows": [{"id": "7"}, {"id": "8"}], "none": []}
    assert value(text) == expected


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("<item>1</item><item>a</item>", {}, [1, "a"]),
        ("<item>1</item>", {"type": "object"}, {"item": 1}),
        ("<a>1</a><b><c>x</c></b>", None, {"a": 1, "b": {"c": "x"}}),
        ("", {"type": "object"}, {}),
        ("", {"type": "string"}, ""),
        ("<a>1</a>", {"type": "string"}, with_prefix("<a>1</a>")),
        ("some <a>1</a>", {}, with_prefix("some <a>1</a>")),
        ("<a>1</b>", {}, with_prefix("<a>1</b>")),
        ("<a>1", {}, with_prefix("<a>1")),
    ],
)
def test_what_is_no_element_is_text(text: str, schema: Any, expected: Any) -> None:
    assert value(text, schema) == expected


def test_markup_without_the_prefix_is_text() -> None:
    assert Elements("~", SCHEMA).value("<item>1</item>", {}) == "<item>1</item>"


def test_a_deep_nest_ends() -> None:
    text = "<a>" * 500 + "</a>" * 500
    found, depth = value(text, None), 0
    while isinstance(found, dict):
        found, depth = found["a"], depth + 1
    assert 10 < depth < 100 and isinstance(found, str)


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
    text = "~<item>1~</item>" * 500
    assert Elements("~", {}).value(text, items) == [1] * 500
    assert len(looked) == 2
