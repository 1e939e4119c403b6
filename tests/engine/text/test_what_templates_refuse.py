"""Prompts that a template can't take as they come: they are changed, and it is told where."""

import pytest

from engine.protocol import Prompt, TextDelta, ThinkingDelta, Tool
from tests.engine.backends.local import request
from tests.engine.text.templates import decode, demo_renderer, renderer_of
from tests.engine.text.test_boundaries import SYSTEM, prefixes, text, whole

PROPERTIES = {"a": {"type": ["string", "null"]}, "b": {"enum": [1]}, "c": True}


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"properties": PROPERTIES}])
def test_a_tool_that_leaves_out_what_the_template_asks_for_is_completed(
    schema: dict[str, object],
) -> None:
    prompt = Prompt([text("user", "hello")], [Tool("bare", schema)])
    first, last = whole(renderer_of("demanding"), prompt)
    assert first.startswith("[bare") and last.endswith("user>hello")


@pytest.mark.parametrize("template", ["refusing", "dropping", "moving"])
def test_a_late_system_message_stays_in_its_place_in_the_users_turn(template: str) -> None:
    renderer = renderer_of(template)
    before = [text("user", "one"), text("assistant", "two")]
    messages = [*before, text("system", "be brief", "be kind"), text("user", "three")]
    rendered = renderer.render(Prompt(messages, system=SYSTEM), thinking=False)
    assert list(rendered.folded) == [5, 6]
    last = prefixes(renderer, Prompt(messages, system=SYSTEM))[-1] or ""
    assert last.endswith("two<|im_end|>user>System: be brief\n\nbe kind\n\nthree")
    # What came before stays as it was, and so does the message itself in the turns behind it.
    first = renderer.render(Prompt(before + messages[2:3], system=SYSTEM), thinking=False)
    end = first.segments[-1].end
    assert end == rendered.segments[6].end and first.token_ids[:end] == rendered.token_ids[:end]
    behind = prefixes(renderer, Prompt([text("user", "one"), text("system", "late")]))
    assert behind[-1] == "user>one\n\nSystem: late"


def test_a_template_that_takes_late_system_messages_gets_them() -> None:
    messages = [text("user", "one"), text("assistant", "two"), text("system", "late")]
    prompt = Prompt([*messages, text("user", "three")])
    assert list(demo_renderer().render(prompt, thinking=False).folded) == []
    assert whole(demo_renderer(), prompt)[2].endswith("<|im_start|>system\nlate")


def test_a_model_that_always_thinks_serves_requests_that_do_not_ask_for_thinking() -> None:
    renderer = renderer_of("always-thinking")
    turn_request = request("one")
    rendered = renderer.render(turn_request.prompt, thinking=False)
    assert decode(renderer, rendered.token_ids).endswith("user>one<|im_end|>assistant><think>")
    parser = renderer.parser(turn_request)
    token_ids = renderer.tokenizer.encode("Hm.</think>Two.", add_special_tokens=False).ids
    deltas = [delta for token in token_ids for delta in parser.feed(token)] + [*parser.close()]
    for kind, expected in ((ThinkingDelta, "Hm."), (TextDelta, "Two.")):
        assert "".join(d.text for d in deltas if isinstance(d, kind)) == expected


def test_a_template_that_fails_where_there_are_no_tools_is_not_told_of_tools() -> None:
    renderer = renderer_of("asking-whether-defined")
    assert prefixes(renderer, Prompt([text("user", "one")])) == ["user>one"]
    tool = Tool("look", {"type": "object", "properties": {}}, "d")
    assert prefixes(renderer, Prompt([text("user", "one")], [tool]))[-1] == "[look]tools!user>one"
