"""TemplateSegment ends, whatever the template does with the segments."""

import json

import pytest

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
from engine.text.tokens.pieces import ControlTexts
from tests.engine.text.templates import (
    decode,
    demo_renderer,
    renderer_for,
    renderer_of,
)
from tests.engine.text.vocabularies import tokenizer_for

TOOLS = [
    Tool("get_weather", {"type": "object", "properties": {"città": {"type": "string"}}}, "Weather"),
    Tool("get_time", {"type": "object"}, "The time, 時間"),
]
SYSTEM = [TextPart("You are kind."), TextPart("  Be brief. 😀\n"), TextPart("Answer in verse.")]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


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


def whole(renderer: ChatRenderer, prompt: Prompt) -> list[str]:
    """The same where all segments have an end."""
    texts = prefixes(renderer, prompt)
    assert None not in texts
    return [prefix for prefix in texts if prefix is not None]


@pytest.mark.parametrize("template", ["demo", "qwen3", "trimming"])
def test_every_prefix_ends_with_its_segment(template: str) -> None:
    renderer = demo_renderer() if template == "demo" else renderer_of(template)
    prompt = agent_prompt()
    rendered = renderer.render(prompt, thinking=False)
    texts = whole(renderer, prompt)
    expected = {
        5: "Hello 👋",
        6: "What is the weather?",
        -6: "Let me look.",
        -3: "Rain, 12 °C",
        -2: "Error: no clock",
        -1: "And tomorrow?",
    }
    if renderer.prefix_order == "tools_first":
        expected |= {2: "You are kind.", 3: "Be brief. 😀", 4: "Answer in verse."}
    for index, ending in expected.items():
        assert texts[index].endswith(ending)
    ends = [span.end or 0 for span in rendered.segments]
    assert ends == sorted(ends)
    assert ends[-1] < len(rendered.token_ids)
    assert all(decode(renderer, rendered.token_ids).startswith(prefix) for prefix in texts)


def test_a_tool_ends_before_what_closes_the_tools_and_a_call_after_its_arguments() -> None:
    first, second, *_ = whole(demo_renderer(), agent_prompt())
    assert first.endswith('"properties": {"città": {"type": "string"}}}}}')
    assert second.endswith('"parameters": {"type": "object"}}}')
    renderer = renderer_of("qwen3")
    # The tokenizer joins `}` and `}`, so the input's own is not in the prefix.
    texts = whole(renderer, agent_prompt())
    assert texts[-5].endswith('"arguments": {"città": "Zürich", "days": 3')
    spans = renderer.render(agent_prompt(), thinking=False).segments
    assert [span.is_exact for span in spans[-6:]] == [True, False, False, True, True, True]
    # Where the system prompt comes first it ends with the tools.
    assert (demo_renderer().prefix_order, renderer.prefix_order) == ("tools_first", "template")
    assert len({span.end for span in spans[1:5]}) == 1


def test_objects_that_a_template_writes_by_their_fields_end_with_the_last() -> None:
    texts = whole(renderer_of("trimming"), agent_prompt())
    assert texts[0].endswith("[TOOL get_weather:Weather")
    assert texts[1].endswith("時間")
    assert texts[-5].endswith("città=Zürich days=3")


def test_tools_in_the_last_message_have_no_boundary_and_spare_the_others() -> None:
    messages = [text("user", "one"), text("assistant", "two"), text("user", "three")]
    texts = prefixes(renderer_of("tools-last"), Prompt(messages, TOOLS, [TextPart("sys")]))
    assert texts[:2] == [None, None]
    assert texts[2:5] == [
        "system>sys",
        "system>sys<|im_end|>user>one",
        "system>sys<|im_end|>user>one<|im_end|>assistant>two",
    ]


def test_what_is_not_rendered_takes_no_room() -> None:
    spans = demo_renderer().render(agent_prompt(), thinking=False).segments
    assert spans[8].end is not None and spans[7].end is not None
    assert spans[6].end == spans[7].end < spans[8].end
    prompt = Prompt([text("user", "a", "", " \n", "b")])
    ends = [span.end or 0 for span in demo_renderer().render(prompt, thinking=False).segments]
    assert ends[0] == ends[1] == ends[2] < ends[3]


def test_private_use_characters_of_the_prompt_survive() -> None:
    strange = "\U000f0000\U000f0001 \ue000 \U00100000"
    texts = prefixes(demo_renderer(), Prompt([text("user", strange)]))
    assert texts[0] == "<|im_start|>user\n" + strange


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
def test_pieces_get_no_spaces_from_a_tokenizer_that_puts_one_first(kind: str) -> None:
    renderer = renderer_for(CHATML, tokenizer_for(CHATML, kind))
    prompt = Prompt([text("user", "hello", "world"), text("assistant", "the words")])
    rendered = renderer.render(prompt, thinking=False)
    pieces = [renderer.tokenizer.id_to_token(token_id) or "" for token_id in rendered.token_ids]
    prompt_text = "".join(pieces).replace("\u2581", " ").replace("<0x0A>", "\n")
    assert "\n\nworld" in prompt_text
    assert "hello\n" in prompt_text


def test_offsets_inside_a_text_never_pass_their_point() -> None:
    renderer = demo_renderer()
    body = "Zwölf Boxkämpfer 😀 jagen <|im_end|> Viktor quer über den Sylter Deich. " * 3
    prompt = Prompt([text("user", "first"), text("assistant", "ok"), text("user", body)])
    rendered = renderer.render(prompt, thinking=False)
    span = rendered.segments[-1]
    head = decode(renderer, rendered.token_ids[: span.first_token])
    for characters in range(len(body)):
        offset = span.offset(characters)
        assert offset is not None
        known = decode(renderer, rendered.token_ids[:offset])
        before = f"{head}<|im_start|>user\n{body[:characters]}"
        assert before.startswith(known.rstrip("\ufffd"))
        following = decode(renderer, rendered.token_ids[: offset + 1])
        if offset < (span.end or 0):
            assert len(following) > len(before) or "\ufffd" in following


@pytest.mark.parametrize("template", ["qwen3", "trimming"])
def test_dropped_thinking_costs_no_renders(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    messages = [text("user", "first")]
    for index in range(50):
        call = ToolUsePart(f"toolu_{index}", "get_time", {"zone": index, "strict": True})
        parts: list[Part] = [ThinkingPart(f"thought {index}"), TextPart("I look."), call]
        messages += [
            Message("assistant", parts),
            Message("user", [ToolResultPart(call.id, f"{index} o'clock")]),
            text("assistant", f"It is {index}."),
            text("user", "And now?"),
        ]
    calls: list[None] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, template_input: TemplateInput) -> str:
        calls.append(None)
        return render(self, template_input)

    renderer = renderer_of(template)
    monkeypatch.setattr(ChatTemplate, "render", counted)
    assert None not in prefixes(renderer, Prompt(messages, TOOLS, SYSTEM))
    assert len(calls) == 2


@pytest.mark.parametrize("template", ["comparing", "picky"])
def test_texts_that_cannot_be_marked_are_found_by_their_words(template: str) -> None:
    messages = [text("user", "again and again?"), text("assistant", "yes")] * 20
    prompt = Prompt([*messages, text("user", "again and again?")])
    texts = whole(renderer_of(template), prompt)
    assert [prefix.count("again") for prefix in texts[::2]] == [2 * n for n in range(1, 22)]


def test_indented_tools_keep_their_text_and_have_boundaries() -> None:
    template = "{{ tools | tojson(indent=4) }}{% for m in messages %}{{ m.content }}{% endfor %}"
    many = [Tool(f"tool_{index}", {"type": "object"}, "Does it.") for index in range(9)]
    many.append(Tool("empty", {}, ""))
    conversation = new_conversation(Prompt([text("user", "go")], many), ControlTexts({}))
    source = ChatTemplate({"default": template}, {})
    placed = place_segments(source, conversation, thinking=False)
    assert placed.text == source.render(conversation.variables({}, thinking=False))
    for tool, place in zip(many, placed.places, strict=False):
        segment_text = placed.text[place.begin : place.end]
        assert segment_text.endswith("}") and segment_text.count("function") == 2
        assert f'"{tool.name}"' in segment_text


def test_tool_schemas_keep_their_order_and_letters() -> None:
    schema = {"type": "object", "properties": {"z": {"enum": ["<a>", "é"]}, "a": {}}}
    first = whole(demo_renderer(), Prompt([text("user", "x")], [Tool("t", schema)]))[0]
    tool = json.loads(first.removeprefix("<|im_start|>tools\n"))
    assert json.dumps(tool["function"]["parameters"]) == json.dumps(schema)
