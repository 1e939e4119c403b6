"""Formats of calls and thinking, proven on templates: what they write is what the parser reads."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import SchemaRefused
from engine.protocol import (
    GenerateRequest,
    Prompt,
    TextDelta,
    Tool,
    ToolChoice,
    ToolUsePart,
)
from engine.text.formats.calls import calls_of
from engine.text.renderer import ChatRenderer
from tests.engine.text.format_cases import EXPECTED, OF_REAL, REAL, renderer, source
from tests.engine.text.templates import renderer_for
from tests.engine.text.written_turns import (
    FORCED,
    QUESTION,
    TOOLS,
    calls,
    follow,
    from_call,
    read,
    render,
    request,
    thinking_end,
    tokens_of,
    written,
)

CALLING = [name for name, (calls, _) in EXPECTED.items() if calls is not None]
THINKING = [name for name, (_, thinking) in EXPECTED.items() if thinking is not None]
# What a template's own notation can't carry is left out of the random inputs for it.
WITHOUT_ESCAPES = {"llama-4-pythonic", "lfm2"}
WITHOUT_LISTS = {"llama-4-pythonic", "lfm2"}
ONE_CALL = {"openai-gpt-oss-120b"}
# Their calls begin like ordinary text: a brace, a bracket, a word, or a channel of the turn.
UNTRIGGERED = {
    "functionary-v3.2",
    "gemma-4",
    "gigachat-3",
    "glm-4-0414",
    "hammer",
    "kimi-k3",
    "llama-3.1",
    "llama-4-json",
    "llama-4-pythonic",
    "muse",
    "openai-gpt-oss-120b",
    "phi-4-mini-bare",
    "xlam",
}
TRIGGERED = [name for name in CALLING if name not in UNTRIGGERED]
IN_MESSAGES = {
    "openai": "<|channel|>analysis<|message|>Hm, 1 < 2.<|end|><|start|>assistant"
    "<|channel|>final<|message|>It is.",
    "muse": " to=self<|message|>Hm, 1 < 2.<|eom|><|start|>assistant to=user<|message|>It is.",
}
GOOD: dict[str, Any] = {"city": "Bern it is", "count": 12, "flag": True, "unit": "kelvin"}


def of(name: str) -> ChatRenderer:
    if source(name) is None:
        pytest.skip(f"{REAL} is not there: real templates are not part of the project")
    return renderer(name)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_template_proves_its_formats(name: str) -> None:
    model = of(name)
    assert (model.tool_format, model.reasoning_format) == EXPECTED[name]
    assert model.can_trigger == (name in TRIGGERED)


def test_a_format_that_nobody_knows_is_refused() -> None:
    model = of("unknown-format")
    assert model.tool_format is None
    # A model may write other formats' markup: still nothing is parsed.
    assert read(model, "<tool_call>x", request())[0] == []


@pytest.mark.parametrize(
    ("why", "before", "behind"),
    [
        ("an object of JSON that is none", '<call>{"name": "NAME, "input": ', "}</call>"),
        ("a beginning that any text may have", "call NAME with ", "."),
        ("no name", "<call>", "</call>"),
        ("a value without its braces", "<call>NAME|", "</call>"),
    ],
)
def test_what_tells_no_call_from_text_is_no_format(why: str, before: str, behind: str) -> None:
    name = "' ~ call.function.name ~ '"
    expression = "call.function.arguments | tojson"
    if why == "a value without its braces":
        expression = f"({expression})[1:-1]"
    template = f"""\
{{{{- tools | tojson }}}}
{{%- for message in messages %}}{{{{- message.role ~ '>' ~ message.content }}}}
{{%- for call in message.tool_calls or [] %}}{{{{- '{before.replace("NAME", name)}' }}}}
{{{{- {expression} }}}}{{{{- '{behind}' }}}}{{% endfor %}}{{{{- '<|im_end|>' }}}}{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{- 'assistant>' }}}}{{% endif %}}"""
    assert renderer_for(template).tool_format is None, why
    # The same with markup of its own is one, so the reason is the one that is told.
    whole = template.replace(before.replace("NAME", name), f"<call>{name}|")
    whole = whole.replace(f"{{{{- '{behind}' }}}}", "{{- '</call>' }}")
    whole = whole.replace(expression, "call.function.arguments | tojson")
    assert renderer_for(whole).tool_format == "template"


def inputs_for(name: str) -> st.SearchStrategy[dict[str, Any]]:
    letters = st.text("ab c<>\"'\\{}[]=,:;é😀7\n", max_size=14)
    if name in WITHOUT_ESCAPES:
        letters = st.text("ab cé7<>", min_size=1, max_size=14)
    # White space at a text's ends is trimmed by templates that write it between tags.
    words = letters.map(lambda text: "x" + text + "y") | st.sampled_from(["42", "true", "null"])
    optional = {
        "count": st.integers(-(10**6), 10**6),
        "flag": st.booleans(),
        "note": words,
    }
    if name not in WITHOUT_LISTS:
        optional |= {
            "deep": st.fixed_dictionaries({"k": words}),
            "list": st.lists(words, max_size=3),
        }
    return st.fixed_dictionaries({"city": words}, optional=optional)


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_a_template_writes_of_calls_is_read_back_however_it_is_cut(
    name: str, data: st.DataObject
) -> None:
    model = of(name)
    count = 1 if name in ONE_CALL else data.draw(st.integers(1, 3))
    parts = calls(*(data.draw(inputs_for(name)) for _ in range(count)))
    if model.traits.splits_calls:
        parts = parts[:1]
    text = written(model, parts)
    expected = [(part.name, part.input) for part in parts]
    assert read(model, text, request())[0] == expected
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read(model, text, request(), cuts) == read(model, text, request())
    # What was read is written again with the same text: a replayed call has its own tokens.
    pairs = read(model, text, request())[0]
    again = [ToolUsePart(part.id, *call) for part, call in zip(parts, pairs, strict=True)]
    assert written(model, again) == text


@pytest.mark.parametrize("name", CALLING)
def test_a_call_that_is_cut_off_leaves_no_markup(name: str) -> None:
    model = of(name)
    text = from_call(model, written(model, calls({"city": "Bern", "note": "n"})))
    offsets = model.tokenizer.encode(text, add_special_tokens=False).offsets
    for cut in sorted({end for _, end in offsets if end < len(text)}):
        parser = model.formats.new_parser(request(), is_open=False)
        deltas = [*parser.feed(text[:cut]), *parser.close(is_cut=True)]
        answer_text = "".join(
            delta.text for delta in deltas if isinstance(delta, TextDelta)
        ).strip()
        # Before the first marker is whole nothing tells a call from text.
        assert not answer_text or (
            text.strip().startswith(answer_text) and len(answer_text) < 32
        ), (cut, answer_text)
        assert "get_weather" not in answer_text


@pytest.mark.parametrize("name", CALLING)
def test_a_forced_call_that_is_cut_off_anywhere_is_a_call_or_nothing(name: str) -> None:
    model = of(name)
    prompt = Prompt([QUESTION], [Tool("get_weather", FORCED, "Weather.")])
    turn_request = request(prompt=prompt, tool_choice=ToolChoice("tool", "get_weather"))
    text = from_call(model, written(model, calls({"city": "Bern", "count": 2})))
    token_ids = tokens_of(model, thinking_end(model, turn_request) + text)
    for count in range(len(token_ids)):
        parser = model.parser(turn_request)
        deltas = [delta for token in token_ids[:count] for delta in parser.feed(token)]
        deltas += parser.close()
        assert not any(isinstance(delta, TextDelta) for delta in deltas)
        assert [call for call, _ in calls_of(deltas)] in ([], ["get_weather"])


@pytest.mark.parametrize("name", THINKING)
def test_thinking_is_read_as_thinking_and_never_as_text(name: str) -> None:
    model = of(name)
    tools = TOOLS if model.tool_format else []
    for thinking in (True, False):
        turn_request = request(prompt=Prompt([QUESTION], tools), thinking=thinking)
        end = render(model, turn_request.prompt, thinking=thinking)
        text = IN_MESSAGES.get(model.reasoning_format or "", "")
        if not text:
            tags = model.formats.tags
            assert tags is not None
            opened = end.rfind(tags.open.strip()) > end.rfind(tags.close)
            assert model.begins_thinking(turn_request) == opened
            begin = "" if opened else tags.open
            wrapper = tags.wrapper or ("",)
            closing = "".join(wrapper[1:])
            text = f"{begin}\nHm, 1 < 2.\n{tags.close}\n\n{wrapper[0]}It is.{closing}"
        for cuts in ((), range(len(text))):
            assert read(model, text, turn_request, cuts) == ([], "Hm, 1 < 2.", "It is.")


def test_what_closes_an_answer_is_no_text_and_ends_no_turn() -> None:
    model = of("kimi-k3")
    cut = model.formats.new_parser(request(), is_open=False)
    assert [*cut.feed("It.<|close|>"), *cut.close(is_cut=True)] == [TextDelta("It.")]
    assert {model.tokenizer.id_to_token(t) for t in model.end_token_ids} == {"<|end_of_msg|>"}
    closing = "<|close|>response<|sep|><|close|>message<|sep|>"
    for tools in ([], TOOLS):
        turn_request = request(prompt=Prompt([QUESTION], tools))
        for text in (f"It is.{closing}", "It is.", f"<|open|>response<|sep|>It is.{closing}"):
            for cuts in ((), range(len(text))):
                assert read(model, text, turn_request, cuts) == ([], "", "It is.")


def test_a_turn_that_begins_with_the_end_of_thinking_has_none() -> None:
    model = of("minimax-m3")
    call = from_call(model, written(model, calls({"city": "Bern"})))
    for turn_request in (request(), request(thinking=True)):
        for text in (f"</mm:think>{call}", f"\n</mm:think>It is.{call}"):
            for cuts in ((), range(len(text))):
                pairs, thought, answer_text = read(model, text, turn_request, cuts)
                assert pairs == [("get_weather", {"city": "Bern"})]
                assert (thought, answer_text) == ("", "It is." if "It is." in text else "")


def test_tags_around_an_answer_are_text_within_one() -> None:
    model = of("command-r7b")
    tags = model.formats.tags
    assert tags is not None and tags.wrapper is not None
    opening, closing = tags.wrapper
    text = f"It says {opening}so{closing}."
    for cuts in ((), range(len(text))):
        assert read(model, text, request(), cuts) == ([], "", text)
        assert read(model, f"{opening}It.{closing}", request(), cuts) == ([], "", "It.")


@pytest.mark.parametrize("name", CALLING)
def test_a_forced_call_without_properties_invents_none(name: str) -> None:
    model = of(name)
    for schema in ({"type": "object", "properties": {}}, {"type": "object"}, {}):
        tool = Tool("get_weather", schema, "Weather.")
        turn_request = request(prompt=Prompt([QUESTION], [tool]), tool_choice=ToolChoice("any"))
        text = written(model, calls({}))
        pairs, _, _ = read(model, text, turn_request)
        assert pairs == [("get_weather", {})]
        parser = model.parser(turn_request)
        assert parser.grammar is not None
        assert '"additionalProperties": false' in parser.grammar or "%json" not in parser.grammar


def test_a_text_that_no_rule_can_hold_is_refused_with_its_name() -> None:
    schema = {"type": "object", "properties": {"id": {"type": "string", "pattern": "^a+$"}}}
    turn_request = request(
        prompt=Prompt([QUESTION], [Tool("look", schema, "d")]), tool_choice=ToolChoice("any")
    )
    with pytest.raises(SchemaRefused, match=r"`look`.*`pattern` of `id`"):
        of("glm-4.7").parser(turn_request)
    assert of("qwen3").parser(turn_request).allowed


def test_every_real_template_that_is_there_is_expected() -> None:
    if not REAL.is_dir():
        pytest.skip(f"{REAL} is not there")
    assert json.dumps(sorted(path.stem for path in REAL.glob("*.jinja"))) == json.dumps(
        sorted(OF_REAL)
    )


# `strict` tools that the model may call or not: the grammar begins where a call begins.


def asked_of(*, strict: bool = True) -> GenerateRequest:
    tool = Tool("get_weather", FORCED, "Weather.", strict=strict)
    return request(prompt=Prompt([QUESTION], [tool, Tool("other", {}, "Other.")]))


@pytest.mark.parametrize("name", [name for name in TRIGGERED if name != "hermes-3"])
def test_text_and_the_templates_own_call_are_allowed_and_read(name: str) -> None:
    """hermes-3 shows the name first and writes it last: what it shows is held."""
    model = of(name)
    turn_request = asked_of()
    begin = thinking_end(model, turn_request)
    call = from_call(model, written(model, calls(GOOD))).removeprefix(begin)
    parser = model.parser(turn_request)
    text = f"{begin}I look it up, 1 < 2.\n{call.lstrip()}"
    fed, deltas = follow(parser, model, text)
    assert fed.strip().endswith(text.strip()[-8:]), (fed, text)
    deltas += parser.feed(next(iter(model.end_token_ids)))
    deltas += parser.close()
    assert parser.finish == "tool_use"
    assert calls_of(deltas) == [("get_weather", GOOD)]
    answer_text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    assert answer_text.strip() == "I look it up, 1 < 2."


@pytest.mark.parametrize("name", TRIGGERED)
def test_a_turn_may_be_text_alone_and_end_but_no_call_of_another_schema(name: str) -> None:
    model = of(name)
    turn_request = asked_of()
    begin = thinking_end(model, turn_request)
    bad = {**GOOD, "unit": "furlong"}
    call = from_call(model, written(model, calls(bad))).removeprefix(begin).lstrip()
    fed, deltas = follow(model.parser(turn_request), model, f"{begin}Well.\n{call}")
    assert "furlong" not in fed and "Well." in fed
    assert all(arguments != bad for _, arguments in calls_of(deltas))
    parser = model.parser(turn_request)
    fed, _ = follow(parser, model, f"{begin}It is what it is: [1, 2] {{a}} (b).")
    assert fed.endswith("(b).")
    end = next(iter(model.end_token_ids))
    assert parser.allowed is not None and parser.allowed[end // 8] >> end % 8 & 1
    parser.feed(end)
    assert parser.finish == "stop"
    assert model.parser(asked_of(strict=False)).allowed is None, "it binds nothing"


def test_a_tool_that_is_named_in_the_conversation_is_held_as_well() -> None:
    model = of("qwen3")
    tool = Tool("get_weather", FORCED, "Weather.", strict=True)
    turn_request = request(
        prompt=Prompt([QUESTION], [Tool("other", {}, "Other.")], named_tools=[tool])
    )
    bad = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "unit": "furlong"}}'
    fed, _ = follow(model.parser(turn_request), model, bad)
    assert "get_weather" in fed and "furlong" not in fed


@pytest.mark.parametrize("name", [name for name in TRIGGERED if name != "hermes-3"])
def test_only_the_tools_that_a_choice_names_can_be_called(name: str) -> None:
    """All tools are in the prompt, none is strict, and the model may call or not."""
    model = of(name)
    tools = [Tool("get_time", FORCED, "The time."), Tool("get_weather", FORCED, "Weather.")]
    for allowed, fed_whole in (("get_weather", True), ("get_time", False)):
        choice = ToolChoice("auto", names=[allowed])
        turn_request = request(prompt=Prompt([QUESTION], tools), tool_choice=choice)
        begin = thinking_end(model, turn_request)
        call = from_call(model, written(model, calls(GOOD))).removeprefix(begin).lstrip()
        fed, deltas = follow(model.parser(turn_request), model, f"{begin}Well.\n{call}")
        assert "Well." in fed
        assert ("get_weather" in [name for name, _ in calls_of(deltas)]) == fed_whole, fed
