"""`strict` tools that the model may call or not: the grammar begins where a call begins."""

from typing import Any

import pytest

from engine.protocol import Delta, GenerateRequest, Prompt, TextDelta, Tool
from engine.schedule.output import OutputParser
from engine.text.formats.calls import calls_of
from engine.text.renderer import ChatRenderer
from tests.engine.text.format_cases import source
from tests.engine.text.test_format_proof import (
    CALLING,
    FORCED,
    QUESTION,
    calls,
    from_call,
    of,
    request,
    written,
)

# Their calls begin like ordinary text: a brace, a bracket, a word, or a channel of the turn.
UNTRIGGERED = {"gemma-4", "kimi-k3", "llama-3.1", "llama-4-pythonic", "openai-gpt-oss-120b"}
GOOD: dict[str, Any] = {"city": "Bern it is", "count": 12, "flag": True, "unit": "kelvin"}


def follow(parser: OutputParser, model: ChatRenderer, text: str) -> tuple[str, list[Delta]]:
    """Feed a text's tokens up to the first that is not allowed: what was fed, and its deltas."""
    fed: list[int] = []
    deltas: list[Delta] = []
    for token in model.tokenizer.encode(text, add_special_tokens=False).ids:
        assert parser.allowed is not None
        if parser.finish is not None or not parser.allowed[token // 8] >> token % 8 & 1:
            break
        fed.append(token)
        deltas += parser.feed(token)
    return model.tokenizer.decode(fed, skip_special_tokens=False), deltas


def asked_of(model: ChatRenderer, *, strict: bool = True) -> Any:
    tool = Tool("get_weather", FORCED, "Weather.", strict=strict)
    return request(prompt=Prompt([QUESTION], [tool, Tool("other", {}, "Other.")]))


THERE = [name for name in CALLING if source(name) is not None]
TRIGGERED = [name for name in THERE if name not in UNTRIGGERED]


def thinking_end(model: ChatRenderer, asked: GenerateRequest) -> str:
    """What a turn has to begin with where the prompt ends inside of thinking."""
    tags = model.formats.tags
    return tags.close if tags is not None and model._begins_thinking(asked) else ""


def test_most_formats_can_hold_calls_among_text() -> None:
    assert len(TRIGGERED) >= len(THERE) // 2, TRIGGERED


@pytest.mark.parametrize("name", THERE)
def test_a_format_waits_for_the_beginning_of_a_call_where_it_has_one(name: str) -> None:
    assert of(name).can_trigger == (name in TRIGGERED)


@pytest.mark.parametrize("name", TRIGGERED)
def test_text_and_the_templates_own_call_are_allowed_and_read(name: str) -> None:
    model = of(name)
    asked = asked_of(model)
    if name == "hermes-3":
        pytest.skip("it shows the name first and writes it last: what it shows is held")
    call = from_call(model, written(model, calls(GOOD)))
    begin = thinking_end(model, asked)
    call = call.removeprefix(begin)
    parser = model.parser(asked)
    text = f"{begin}I look it up, 1 < 2.\n{call.lstrip()}"
    fed, deltas = follow(parser, model, text)
    assert fed.strip().endswith(text.strip()[-8:]), (fed, text)
    deltas += parser.feed(next(iter(model.end_token_ids)))
    deltas += parser.close()
    assert parser.finish == "tool_use"
    assert calls_of(deltas) == [("get_weather", GOOD)]
    said = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    assert said.strip() == "I look it up, 1 < 2."


@pytest.mark.parametrize("name", TRIGGERED)
def test_a_call_of_another_schema_cannot_be_written(name: str) -> None:
    model = of(name)
    asked = asked_of(model)
    begin = thinking_end(model, asked)
    bad = {**GOOD, "unit": "furlong"}
    call = from_call(model, written(model, calls(bad))).removeprefix(begin).lstrip()
    fed, deltas = follow(model.parser(asked), model, f"{begin}Well.\n{call}")
    assert "furlong" not in fed and "Well." in fed
    assert all(given != bad for _, given in calls_of(deltas))


@pytest.mark.parametrize("name", TRIGGERED)
def test_a_turn_may_be_text_alone_and_end(name: str) -> None:
    model = of(name)
    asked = asked_of(model)
    parser = model.parser(asked)
    begin = thinking_end(model, asked)
    fed, _ = follow(parser, model, f"{begin}It is what it is: [1, 2] {{a}} (b).")
    assert fed.endswith("(b).")
    end = next(iter(model.end_token_ids))
    assert parser.allowed is not None and parser.allowed[end // 8] >> end % 8 & 1
    parser.feed(end)
    assert parser.finish == "stop"


@pytest.mark.parametrize("name", CALLING)
def test_tools_that_are_not_strict_bind_nothing(name: str) -> None:
    model = of(name)
    assert model.parser(asked_of(model, strict=False)).allowed is None


def test_a_tool_that_is_named_in_the_conversation_is_held_as_well() -> None:
    model = of("qwen3")
    tool = Tool("get_weather", FORCED, "Weather.", strict=True)
    asked = request(prompt=Prompt([QUESTION], [Tool("other", {}, "Other.")], named_tools=[tool]))
    bad = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "unit": "furlong"}}'
    fed, _ = follow(model.parser(asked), model, bad)
    assert "get_weather" in fed and "furlong" not in fed
