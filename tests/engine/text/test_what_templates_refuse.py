"""Prompts that a template can't take as they come: they are changed, and it is told where."""

import pytest

from engine.protocol import GenerateRequest, Prompt, Sampling, TextDelta, ThinkingDelta, Tool
from tests.engine.text.templates import decode, demo_renderer, renderer_for
from tests.engine.text.test_boundaries import SYSTEM, prefixes, text

# Fails on a tool without a description, and does not end on a parameter of several types.
DEMANDING = """\
{%- macro kind(t) %}{% if t is string %}{{ t }}{% else %}{{ kind(t) }}{% endif %}{% endmacro %}
{%- for tool in tools or [] %}
{{- '[' + tool.function.name + ': ' + tool.function.description + ']' }}
{%- for name, field in tool.function.parameters.properties.items() %}{{ kind(field.type) }}
{%- endfor %}{% endfor %}
{%- for m in messages %}{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"""


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"properties": {"a": {"type": ["string", "null"]}, "b": {"enum": [1]}, "c": True}},
    ],
)
def test_a_tool_that_leaves_out_what_the_template_asks_for_is_completed(
    schema: dict[str, object],
) -> None:
    renderer = renderer_for(DEMANDING)
    prompt = Prompt([text("user", "hello")], [Tool("bare", schema)])
    found = prefixes(renderer, prompt)
    assert found[0] is not None and found[0].startswith("[bare")
    assert found[1] is not None and found[1].endswith("user>hello")


REFUSING = """\
{%- for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('system first') }}{% endif %}{{ m.role }}>{{ m.content }}<|im_end|>
{%- endfor %}"""
DROPPING = """\
{%- for m in messages %}{% if m.role != 'system' or loop.first %}
{{- m.role }}>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"""
MOVING = """\
{%- for m in messages if m.role == 'system' %}{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}
{%- for m in messages if m.role != 'system' %}{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"""


@pytest.mark.parametrize("template", [REFUSING, DROPPING, MOVING])
def test_a_late_system_message_stays_in_its_place_in_the_users_turn(template: str) -> None:
    renderer = renderer_for(template)
    before = [text("user", "one"), text("assistant", "two")]
    told = [*before, text("system", "be brief", "be kind"), text("user", "three")]
    rendered = renderer.render(Prompt(told, system=SYSTEM), thinking=False)
    assert list(rendered.folded) == [5, 6]
    found = prefixes(renderer, Prompt(told, system=SYSTEM))
    assert found[-1] is not None
    assert found[-1].endswith("two<|im_end|>user>System: be brief\n\nbe kind\n\nthree")
    # What came before stays as it was, and so does the message itself in the turns behind it.
    first = renderer.render(Prompt(before + told[2:3], system=SYSTEM), thinking=False)
    end = first.segments[-1].end
    assert end == rendered.segments[6].end and first.token_ids[:end] == rendered.token_ids[:end]
    behind = prefixes(renderer, Prompt([text("user", "one"), text("system", "late")]))
    assert behind[-1] == "user>one\n\nSystem: late"


def test_a_template_that_takes_late_system_messages_gets_them() -> None:
    renderer = demo_renderer()
    messages = [text("user", "one"), text("assistant", "two"), text("system", "late")]
    prompt = Prompt([*messages, text("user", "three")])
    assert list(renderer.render(prompt, thinking=False).folded) == []
    found = prefixes(renderer, prompt)
    assert found[2] is not None and found[2].endswith("<|im_start|>system\nlate")


ALWAYS_THINKING = """\
{%- if enable_thinking is defined and not enable_thinking %}
{{- raise_exception('thinking can not be disabled') }}{% endif %}
{%- for m in messages %}{{ m.role }}>{% if m.reasoning_content %}
{{- '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}assistant><think>{% endif %}"""


def test_a_model_that_always_thinks_serves_requests_that_do_not_ask_for_thinking() -> None:
    renderer = renderer_for(ALWAYS_THINKING)
    asked = GenerateRequest(
        request_id="r",
        scope="0" * 32,
        prompt=Prompt([text("user", "one")]),
        sampling=Sampling(max_tokens=9),
    )
    rendered = renderer.render(asked.prompt, thinking=False)
    assert decode(renderer, rendered.token_ids).endswith("user>one<|im_end|>assistant><think>")
    parser = renderer.parser(asked)
    written = renderer.tokenizer.encode("Hm.</think>Two.", add_special_tokens=False).ids
    deltas = [delta for token in written for delta in parser.feed(token)] + [*parser.close()]
    thought = "".join(d.text for d in deltas if isinstance(d, ThinkingDelta))
    said = "".join(d.text for d in deltas if isinstance(d, TextDelta))
    assert (thought, said) == ("Hm.", "Two.")


ASKING_WHETHER_DEFINED = """\
{%- if tools is defined %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}tools!
{%- endif %}{% for m in messages %}{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"""


def test_a_template_that_fails_where_there_are_no_tools_is_not_told_of_tools() -> None:
    renderer = renderer_for(ASKING_WHETHER_DEFINED)
    assert prefixes(renderer, Prompt([text("user", "one")])) == ["user>one"]
    tool = Tool("look", {"type": "object", "properties": {}}, "d")
    assert prefixes(renderer, Prompt([text("user", "one")], [tool]))[-1] == "[look]tools!user>one"
