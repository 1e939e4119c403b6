"""Segment ends, whatever the template does with the segments."""

import json

import pytest

from engine.errors import InvalidRequest
from engine.protocol import (
    Message,
    Part,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from engine.text.renderer import ChatRenderer
from engine.text.template.boundaries import place_segments
from engine.text.template.chat_template import ChatTemplate, TemplateInput
from engine.text.template.messages import new_conversation
from tests.engine.text.templates import (
    QWEN,
    TOOLS_LAST,
    TRIMMING,
    decode,
    demo_renderer,
    metaspace,
    renderer_for,
    sentencepiece_like,
)

TOOLS = [
    Tool("get_weather", {"type": "object", "properties": {"città": {"type": "string"}}}, "Weather"),
    Tool("get_time", {"type": "object"}, "The time, 時間"),
]
SYSTEM = [TextPart("You are kind."), TextPart("  Be brief. 😀\n"), TextPart("Answer in verse.")]


def text(role: str, *texts: str) -> Message:
    return Message(role, [TextPart(part) for part in texts])  # type: ignore[arg-type]


def agent_prompt() -> Prompt:
    call: list[Part] = [
        ThinkingPart("They want the weather."),
        TextPart("Let me look."),
        ToolUsePart("toolu_1", "get_weather", {"città": "Zürich", "days": 3}),
        ToolUsePart("toolu_2", "get_time", {}),
    ]
    results: list[Part] = [
        ToolResultPart("toolu_1", "Rain, 12 °C"),
        ToolResultPart("toolu_2", "no clock", is_error=True),
        TextPart("And tomorrow?"),
    ]
    messages = [
        text("user", "Hello 👋", "What is the weather?"),
        Message("assistant", call),
        Message("user", results),
    ]
    return Prompt(messages, TOOLS, SYSTEM)


def prefixes(renderer: ChatRenderer, prompt: Prompt) -> list[str | None]:
    """The text before each segment's end."""
    rendered = renderer.render(prompt, thinking=False)
    return [
        None if span.end is None else decode(renderer, rendered.token_ids[: span.end])
        for span in rendered.segments
    ]


@pytest.fixture(params=["demo", "qwen", "trimming"])
def renderer(request: pytest.FixtureRequest) -> ChatRenderer:
    if request.param == "demo":
        return demo_renderer()
    return renderer_for(QWEN if request.param == "qwen" else TRIMMING)


def test_every_prefix_ends_with_its_segment(renderer: ChatRenderer) -> None:
    prompt = agent_prompt()
    found = prefixes(renderer, prompt)
    assert None not in found
    if renderer.prefix_order == "tools_first":
        endings = ["You are kind.", "Be brief. 😀", "Answer in verse."]
        for prefix, ending in zip(found[2:5], endings, strict=True):
            assert prefix is not None and prefix.endswith(ending)
    assert found[5] is not None and found[5].endswith("Hello 👋")
    assert found[6] is not None and found[6].endswith("What is the weather?")
    assert found[-1] is not None and found[-1].endswith("And tomorrow?")
    assert found[-2] is not None and found[-2].endswith("Error: no clock")
    assert found[-3] is not None and found[-3].endswith("Rain, 12 °C")
    assert found[-6] is not None and found[-6].endswith("Let me look.")


def test_ends_are_monotone_and_the_tokens_decode_to_the_template(renderer: ChatRenderer) -> None:
    prompt = agent_prompt()
    rendered = renderer.render(prompt, thinking=False)
    ends = [span.end for span in rendered.segments if span.end is not None]
    assert ends == sorted(ends)
    assert ends[-1] < len(rendered.token_ids)
    whole = decode(renderer, rendered.token_ids)
    for prefix in prefixes(renderer, prompt):
        assert prefix is not None and whole.startswith(prefix)


def test_the_tokens_decode_to_what_the_template_alone_renders() -> None:
    prompt = Prompt([text("user", "Hello 👋", "two"), text("user", "é")], TOOLS, SYSTEM)
    given = new_conversation(prompt, None).variables({}, thinking=False)
    for template in (QWEN, TRIMMING, TOOLS_LAST):
        renderer = renderer_for(template)
        expected = ChatTemplate({"default": template}, {"bos_token": "<|endoftext|>"}).render(given)
        rendered = renderer.render(prompt, thinking=False)
        assert decode(renderer, rendered.token_ids) == expected


def test_a_tool_ends_before_what_closes_the_tools() -> None:
    first, second, *_ = prefixes(demo_renderer(), agent_prompt())
    assert first is not None and first.endswith('"properties": {"città": {"type": "string"}}}}}')
    assert second is not None and second.endswith('"parameters": {"type": "object"}}}')


def test_a_call_ends_after_its_arguments() -> None:
    found = prefixes(renderer_for(QWEN), agent_prompt())
    assert found[-5] is not None
    # The tokenizer joins `}` and `}`, so the input's own is not in the prefix.
    assert found[-5].endswith('"arguments": {"città": "Zürich", "days": 3')
    spans = renderer_for(QWEN).render(agent_prompt(), thinking=False).segments
    assert [span.is_exact for span in spans[-6:]] == [True, False, False, True, True, True]


def test_where_the_system_prompt_comes_first_it_ends_with_the_tools() -> None:
    renderer = renderer_for(QWEN)
    assert renderer.prefix_order == "template"
    assert demo_renderer().prefix_order == "tools_first"
    ends = [span.end for span in renderer.render(agent_prompt(), thinking=False).segments]
    assert ends[1] == ends[2] == ends[3] == ends[4]


def test_objects_that_a_template_writes_by_their_fields_end_with_the_last() -> None:
    found = prefixes(renderer_for(TRIMMING), agent_prompt())
    assert found[0] is not None and found[0].endswith("[TOOL get_weather:Weather")
    assert found[1] is not None and found[1].endswith("時間")
    assert found[-5] is not None and found[-5].endswith("città=Zürich days=3")


def test_tools_in_the_last_message_have_no_boundary_and_spare_the_others() -> None:
    renderer = renderer_for(TOOLS_LAST)
    messages = [text("user", "one"), text("assistant", "two"), text("user", "three")]
    found = prefixes(renderer, Prompt(messages, TOOLS, [TextPart("sys")]))
    assert found[:2] == [None, None]
    assert found[2:5] == [
        "system>sys",
        "system>sys<|im_end|>user>one",
        "system>sys<|im_end|>user>one<|im_end|>assistant>two",
    ]


def test_thinking_that_is_not_rendered_takes_no_room() -> None:
    spans = demo_renderer().render(agent_prompt(), thinking=False).segments
    assert spans[7].end == spans[6].end
    assert spans[8].end is not None and spans[7].end is not None
    assert spans[8].end > spans[7].end


def test_an_empty_segment_ends_where_the_one_before_does() -> None:
    prompt = Prompt([text("user", "a", "", " \n", "b")])
    ends = [span.end for span in demo_renderer().render(prompt, thinking=False).segments]
    assert ends[0] == ends[1] == ends[2]
    assert ends[3] is not None and ends[2] is not None and ends[3] > ends[2]


@pytest.mark.parametrize("template", ["demo", QWEN, TRIMMING])
def test_a_longer_conversation_keeps_the_ends_of_the_shorter(template: str) -> None:
    renderer = demo_renderer() if template == "demo" else renderer_for(template)
    whole = agent_prompt()
    # Qwen's template drops earlier turns' thinking: then the rendering itself changes.
    del whole.messages[1].parts[0]
    long = renderer.render(whole, thinking=False)
    for count in (1, 2, 3):
        short = renderer.render(Prompt(whole.messages[:count], TOOLS, SYSTEM), thinking=False)
        spans = short.segments
        # A call that the prompt ends with has tokens of its own: nothing is behind it.
        kept = spans[:-1] if count == 2 else spans
        assert [s.end for s in kept] == [s.end for s in long.segments[: len(kept)]]
        last = kept[-1].end
        assert short.token_ids[:last] == long.token_ids[:last]


def test_private_use_characters_of_the_prompt_survive() -> None:
    renderer = demo_renderer()
    strange = "\U000f0000\U000f0001 \ue000 \U00100000"
    prompt = Prompt([text("user", strange)])
    assert prefixes(renderer, prompt)[0] == "<|im_start|>user\n" + strange


@pytest.mark.parametrize("tokenizer", [sentencepiece_like, metaspace])
def test_pieces_get_no_spaces_from_a_tokenizer_that_puts_one_first(tokenizer: object) -> None:
    assert callable(tokenizer)
    chatml = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    renderer = renderer_for(chatml, tokenizer())
    prompt = Prompt([text("user", "hello", "world"), text("assistant", "the words")])
    rendered = renderer.render(prompt, thinking=False)
    pieces = [renderer.tokenizer.id_to_token(token_id) or "" for token_id in rendered.token_ids]
    written = "".join(pieces).replace("\u2581", " ").replace("<0x0A>", "\n")
    assert "\n\nworld" in written
    assert "hello\n" in written


def test_offsets_inside_a_text_never_pass_their_point() -> None:
    renderer = demo_renderer()
    body = "Zwölf Boxkämpfer 😀 jagen <|im_end|> Viktor quer über den Sylter Deich. " * 3
    prompt = Prompt([text("user", "first"), text("assistant", "ok"), text("user", body)])
    rendered = renderer.render(prompt, thinking=False)
    span = rendered.segments[-1]
    head = decode(renderer, rendered.token_ids[: span.first_token])
    before = "<|im_start|>user\n"
    for characters in range(len(body)):
        offset = span.offset(characters)
        assert offset is not None
        known = decode(renderer, rendered.token_ids[:offset])
        assert (head + before + body[:characters]).startswith(known.rstrip("\ufffd"))
        following = decode(renderer, rendered.token_ids[: offset + 1])
        if offset < (span.end or 0):
            assert len(following) > len(head + before) + characters or "\ufffd" in following


def test_a_refusal_of_the_template_is_told() -> None:
    renderer = renderer_for(
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}x"
    )
    with pytest.raises(InvalidRequest, match="one message only"):
        renderer.render(Prompt([text("user", "a"), text("assistant", "b")]), thinking=False)


def num_renders(monkeypatch: pytest.MonkeyPatch, renderer: ChatRenderer, prompt: Prompt) -> int:
    """How often one request renders the template."""
    calls: list[None] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, given: TemplateInput) -> str:
        calls.append(None)
        return render(self, given)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    renderer.render(prompt, thinking=False)
    monkeypatch.undo()
    return len(calls)


def thinking_turns(count: int) -> list[Message]:
    messages = [text("user", "first")]
    for index in range(count):
        call = ToolUsePart(f"toolu_{index}", "get_time", {"zone": index, "strict": True})
        said: list[Part] = [ThinkingPart(f"thought {index}"), TextPart("I look."), call]
        messages += [
            Message("assistant", said),
            Message("user", [ToolResultPart(call.id, f"{index} o'clock")]),
            text("assistant", f"It is {index}."),
            text("user", "And now?"),
        ]
    return messages


@pytest.mark.parametrize("template", [QWEN, TRIMMING])
def test_dropped_thinking_costs_no_renders(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    renderer = renderer_for(template)
    prompt = Prompt(thinking_turns(50), TOOLS, SYSTEM)
    assert num_renders(monkeypatch, renderer, prompt) == 2
    assert None not in prefixes(renderer, prompt)


# Compares messages as Mistral Small does, so marks that make equal questions differ change it.
COMPARING = """\
{%- set questions = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
{%- if message == questions[-1] %}[LAST]{% endif %}
{{- message.role }}>{{ message.content }}<|im_end|>
{%- endfor %}
"""
# Refuses to be marked in some places: a text in a user's message must begin with a letter.
PICKY = """\
{%- for message in messages %}
{%- if message.role == 'user' and message.content[0] not in 'abcdefghijklmnopqrstuvwxyz' %}
{{- raise_exception('a letter first') }}{% endif %}
{{- message.role }}>{{ message.content }}<|im_end|>
{%- endfor %}
"""


def test_equal_questions_have_their_boundaries_where_a_template_compares_messages() -> None:
    messages = [text("user", "again and again?"), text("assistant", "yes")] * 20
    renderer = renderer_for(COMPARING)
    found = prefixes(renderer, Prompt([*messages, text("user", "again and again?")]))
    assert all(prefix is not None for prefix in found)
    assert found[-1] is not None and found[-1].count("again") == 2 * 21


def test_texts_that_cannot_be_marked_are_found_by_their_words() -> None:
    messages = [text("user", "a long question of words"), text("assistant", "yes")] * 20
    renderer = renderer_for(PICKY)
    found = prefixes(renderer, Prompt([*messages, text("user", "the last long question")]))
    assert all(prefix is not None for prefix in found)
    assert found[2] is not None and found[2].count("a long question of words") == 2


def test_indented_tools_keep_their_text_and_have_boundaries() -> None:
    template = "{{ tools | tojson(indent=4) }}{% for m in messages %}{{ m.content }}{% endfor %}"
    many = [Tool(f"tool_{index}", {"type": "object"}, "Does it.") for index in range(9)]
    many.append(Tool("empty", {}, ""))
    conversation = new_conversation(Prompt([text("user", "go")], many), None)
    source = ChatTemplate({"default": template}, {})
    placed = place_segments(source, conversation, thinking=False)
    assert placed.text == source.render(conversation.variables({}, thinking=False))
    for tool, place in zip(many, placed.places, strict=False):
        assert placed.text[: place.end].endswith("}")
        assert placed.text[place.begin : place.end].count("function") == 2
        assert f'"{tool.name}"' in placed.text[place.begin : place.end]


def test_tool_schemas_keep_their_order_and_letters() -> None:
    schema = {"type": "object", "properties": {"z": {"enum": ["<a>", "é"]}, "a": {}}}
    prompt = Prompt([text("user", "x")], [Tool("t", schema)])
    first = prefixes(demo_renderer(), prompt)[0]
    assert first is not None
    written = json.loads(first.removeprefix("<|im_start|>tools\n"))
    assert json.dumps(written["function"]["parameters"]) == json.dumps(schema)
