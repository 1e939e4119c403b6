"""Calls whose input is no JSON object, on every template: cut ones, and others that models make."""

from functools import cache
from pathlib import Path

import pytest

from engine.protocol import Message, Prompt, TextPart, ToolResultPart, ToolUsePart
from engine.text.renderer import ChatRenderer
from tests.engine.text.format_cases import REAL_PATHS, own_template_paths
from tests.engine.text.vocabularies import files_for
from tests.engine.text.written_turns import QUESTION, TOOLS

INPUTS = {
    "cut in a string": '{"city": "Lugano \\"Sü',
    "cut in a key": '{"city": "Lugano", "cou',
    "cut behind a backslash": '{"city": "Lugano\\',
    "null": "null",
    "list": '["Lugano"]',
    "string": '"Lugano"',
    "two objects": '{"city": "Lugano"}{"city": "Bern"}',
    "raw line end": '{"city": "Lugano\nSüd"}',
    "NaN": '{"city": "Lugano", "count": NaN}',
    "too large": '{"city": "Lugano", "count": 1e400}',
    "long integer": '{"city": "Lugano", "count": 123456789012345678901234567890}',
    "no JSON": "get_weather('Lugano')",
    "deep": '{"city": ' * 3000 + '"Lugano',
    "deep and whole": '{"city": ' * 300 + '"Lugano"' + "}" * 300,
}
WORDS = {"null": "null"}
"""What has to be in the prompt; `Lugano` where nothing stands here."""


@cache
def model_of(path: Path) -> ChatRenderer:
    return ChatRenderer(files_for(path.read_text("utf-8")))


def conversation(call_input: str) -> list[Message]:
    calls = [
        ToolUsePart(f"toolu_{'0Ab' * 7}{index:03}", "get_weather", arguments)
        for index, arguments in enumerate([call_input, {"city": "Bern"}])
    ]
    messages = [QUESTION]
    for call in calls:
        messages.append(Message("assistant", [TextPart("I look."), call]))
        messages.append(Message("user", [ToolResultPart(call.id, "Rain.")]))
    return messages


@pytest.mark.parametrize("path", [*own_template_paths(), *REAL_PATHS], ids=lambda path: path.stem)
def test_an_input_that_is_no_object_stands_in_the_prompt(path: Path) -> None:
    model = model_of(path)
    if model.tool_format is None:
        pytest.skip("its template renders no calls")
    for name, call_input in INPUTS.items():
        messages = conversation(call_input)
        whole = model.render(Prompt(messages, TOOLS), thinking=False)
        text = model.tokenizer.decode(whole.token_ids, skip_special_tokens=False)
        if model.traits.writes_text:
            assert call_input in text, name
        else:
            assert WORDS.get(name, "Lugano") in text, name
        # A prompt that ends behind the first result is a prefix of the whole one.
        begin = model.render(Prompt(messages[:3], TOOLS), thinking=False)
        end = begin.segments[-1].end
        if end is not None:
            assert whole.token_ids[:end] == begin.token_ids[:end], name


def test_an_input_that_is_an_object_is_no_text() -> None:
    """The same call is the same prompt, whichever API it came by."""
    models = (model_of(path) for path in REAL_PATHS)
    model = next((model for model in models if model.traits.writes_text), None)
    if model is None:
        pytest.skip("no template of a real model writes inputs as text")
    rendered = model.render(Prompt(conversation('{"city": "Uri"'), TOOLS), thinking=False)
    whole = model.render(Prompt(conversation({"city": "Uri"}), TOOLS), thinking=False)  # type: ignore[arg-type]
    assert rendered.token_ids != whole.token_ids
