"""Chat templates with the behaviour of known models': what they need, their tokens and boundaries.

Random conversations, with and without tools, go through the real renderer, and twelve turns of one
through the real cache and scheduler; only the model is left out.
"""

import asyncio
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from engine.errors import InvalidRequest
from engine.protocol import (
    Breakpoint,
    Message,
    Prompt,
    Started,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from engine.text.formats.proof import FormatChoice
from engine.text.rendered import TemplateRefused
from engine.text.renderer import ChatRenderer
from engine.text.template.chat_template import ChatTemplate
from engine.text.template.messages import new_conversation
from engine.text.tokens.pieces import ControlTexts
from tests.engine.backends.local import request, serving
from tests.engine.text.conversations import (
    TOOLS,
    Conversations,
    long_conversation,
    marked_segments,
    user,
)
from tests.engine.text.format_cases import CHATS, REAL_PATHS
from tests.engine.text.vocabularies import KINDS, files_for
from tests.engine.text.written_turns import follow

OWN_PATHS = sorted(CHATS.glob("*.jinja"))
PATHS = [*OWN_PATHS, *REAL_PATHS]
NAMES = [path.stem for path in OWN_PATHS]
# Each template on two kinds of tokenizers, in turn; `scripts/long_tests templates` takes all five.
NUM_KINDS = int(os.environ.get("TEMPLATE_KINDS", "2"))
PAIRS = [
    pytest.param(path, KINDS[(number + 2 * place) % len(KINDS)], id=f"{path.stem}-{place}")
    for number, path in enumerate(PATHS)
    for place in range(NUM_KINDS)
]
NUM_PROMPTS = 24
NUM_TURNS = 12


@cache
def source(name: str) -> str:
    return (CHATS / f"{name}.jinja").read_text("utf-8")


@cache
def renderer(name: str) -> ChatRenderer:
    return ChatRenderer(files_for(source(name)))


def text_of(name: str, prompt: Prompt, *, thinking: bool = False) -> str:
    tokens = renderer(name).render(prompt, thinking=thinking).token_ids
    return renderer(name).tokenizer.decode(tokens, skip_special_tokens=False)


def check_random_prompts(of: ChatRenderer, template: ChatTemplate) -> None:
    """They have the tokens that the template and the tokenizer alone make of them in one call."""
    drawn = Conversations(1)
    num_rendered = 0
    for index in range(NUM_PROMPTS):
        tools = drawn.tools() if index % 2 and of.tool_format is not None else []
        prompt = drawn.prompt(num_turns=index % 6 + 1, tools=tools, has_system=index % 3 > 0)
        thinking = bool(index % 2)
        try:
            rendered = of.render(prompt, thinking=thinking)
        except InvalidRequest:
            continue
        plain = new_conversation(prompt, ControlTexts({}), of.traits)
        text = template.render(plain.variables({}, thinking=thinking))
        assert rendered.token_ids == of.tokenizer.encode(text, add_special_tokens=False).ids
        ends = [span.end for span in rendered.segments if span.end is not None]
        assert ends == sorted(ends)
        num_rendered += 1
    assert num_rendered


async def answers(of: ChatRenderer, prompts: Sequence[Prompt]) -> list[Started]:
    """What one engine says of each turn first."""
    starts: list[Started] = []
    async with serving(of) as backend:
        for number, prompt in enumerate(prompts):
            points = [Breakpoint(segment) for segment in marked_segments(prompt)]
            turn_request = request(
                prompt, breakpoints=points, thinking=True, request_id=str(number)
            )
            frames = [frame async for frame in await backend.open(turn_request)]
            starts += [frame for frame in frames if isinstance(frame, Started)]
    return starts


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_tokens_are_those_of_one_call_and_reads_all_that_is_there(path: Path) -> None:
    """Each turn reads up to the last marked end before which the turn before has the same tokens,
    and a repeated prompt is read whole."""
    files = files_for(path.read_text("utf-8"))
    of = ChatRenderer(files)
    check_random_prompts(of, ChatTemplate(files.templates, files.special_tokens))
    prompts = long_conversation(NUM_TURNS, TOOLS if of.tool_format is not None else [])
    rendered = [of.render(prompt, thinking=True) for prompt in prompts]
    first, *middle, again = asyncio.run(answers(of, [*prompts, prompts[-1]]))
    assert first.usage.cache_read_tokens == 0
    for prompt, before, after, started in zip(
        prompts[:-1], rendered[:-1], rendered[1:], middle, strict=True
    ):
        pairs = zip(before.token_ids, after.token_ids, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(before.token_ids))
        ends = [before.segments[segment].end or 0 for segment in marked_segments(prompt)]
        least = max((end for end in ends if end <= common), default=0)
        assert least <= started.usage.cache_read_tokens <= common
    assert again.usage.cache_read_tokens == rendered[-1].segments[-1].end


@pytest.mark.parametrize(("path", "kind"), PAIRS)
def test_random_prompts_have_the_tokens_of_one_call(path: Path, kind: str) -> None:
    """On kinds of tokenizers, whatever came before."""
    files = files_for(path.read_text("utf-8"), kind)
    of = ChatRenderer(files, formats=FormatChoice(tools="none"))
    check_random_prompts(of, ChatTemplate(files.templates, files.special_tokens))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-r1", set()),
        ("gemma-2", {"folds_system", "folds_late_system"}),
        ("gemma-3", set()),
        ("hermes-3", {"writes_text"}),
        ("llama-3.1", {"splits_calls", "writes_text"}),
        ("magistral", {"thinks_in_content", "folds_late_system", "writes_text"}),
        (
            "mistral-7b-v0.3",
            {"shortens_ids", "joins_results", "moves_tools", "folds_late_system"},
        ),
        ("mistral-small-3.1", {"joins_results", "moves_tools", "folds_late_system"}),
        ("phi-4", set()),
        ("qwen2.5", {"writes_text"}),
        ("qwen3", {"writes_text"}),
    ],
)
def test_what_a_template_cannot_take_is_found_out(name: str, expected: set[str]) -> None:
    traits = renderer(name).traits
    assert {field for field in traits.__slots__ if getattr(traits, field) is True} == expected


def test_a_system_prompt_that_is_refused_goes_before_the_first_question() -> None:
    system = [TextPart("Be kind."), TextPart("Be brief.")]
    prompt = Prompt(
        [user("Hi"), Message("assistant", [TextPart("Yes?")]), user("Go")], system=system
    )
    begin = "<start_of_turn>user\nBe kind.\n\nBe brief.\n\nHi<end_of_turn>"
    assert begin in text_of("gemma-2", prompt)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in ("deepseek-r1", "phi-4") and "gemma" not in n]
)
def test_parallel_calls_with_any_ids_and_text_behind_results_can_be_replayed(name: str) -> None:
    ids = {"A": "toolu_01A09q90qw90lq917835lq9A", "B": "call<|im_end|>-2"}
    calls = [ToolUsePart(call_id, "get_weather", {"city": city}) for city, call_id in ids.items()]
    results = [ToolResultPart(call_id, f"result {call_id[:4]}") for call_id in ids.values()]
    reply = Message("user", [*results, TextPart("So?")])
    prompt = Prompt([user("Both?"), Message("assistant", [*calls]), reply], TOOLS)
    prompt_text = text_of(name, prompt)
    assert prompt_text.count("get_weather") >= 3
    places = [prompt_text.index(phrase) for phrase in ('"A"', '"B"', "result call", "So?")]
    assert places == sorted(places)


def kinds_said(name: str, text: str, *, thinking: bool = False) -> tuple[list[str], int]:
    """The kinds of delta that a model's text becomes, in order, and the thinking tokens."""
    parser = renderer(name).parser(request("Hi", thinking=thinking))
    tokens = renderer(name).tokenizer.encode(text, add_special_tokens=False).ids
    deltas = [delta for token in tokens for delta in parser.feed(token)] + [*parser.close()]
    return list(dict.fromkeys(type(delta).__name__ for delta in deltas)), parser.thinking_tokens


def test_thinking_that_the_template_opened_is_thinking() -> None:
    assert text_of("deepseek-r1", Prompt([user("Hi")])).endswith("<think>\n")
    head = renderer("deepseek-r1").tokenizer.encode("Hm, well.</think>").ids
    expected = ["ThinkingDelta", "TextDelta"]
    assert kinds_said("deepseek-r1", "Hm, well.</think>\n\nHello.") == (expected, len(head))
    # Where the turn is the model's own to open, an answer without tags is an answer.
    assert kinds_said("qwen3", "Hello.", thinking=True) == (["TextDelta"], 0)
    kinds, count = kinds_said("magistral", "[THINK]Hm.[/THINK]Hello.")
    assert kinds == expected and count > 2


def test_thinking_is_handed_to_the_template() -> None:
    prompt = Prompt([user("Hi")])
    assert text_of("qwen3", prompt, thinking=True).endswith("assistant\n")
    assert text_of("qwen3", prompt, thinking=False).endswith("<think>\n\n</think>\n\n")


def test_old_thinking_is_rendered_as_the_template_does_and_takes_no_room_elsewhere() -> None:
    prompts = long_conversation(4, TOOLS)
    assert "I need the tool for 1." in text_of("qwen3", prompts[2], thinking=True)
    assert "I need the tool for 1." not in text_of("qwen3", prompts[3], thinking=True)
    spans = renderer("qwen3").render(prompts[3], thinking=True).segments
    parts = [part for message in prompts[3].messages for part in message.parts]
    at = len(TOOLS) + 1 + next(i for i, p in enumerate(parts) if isinstance(p, ThinkingPart))
    assert spans[at].end == spans[at - 1].end


def test_a_model_that_always_thinks_may_think_before_a_forced_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    of = renderer("deepseek-r1")
    parser = of.parser(request("Hi", output_schema=schema))
    fed, _ = follow(parser, of, 'Well {"x": 1}.\n</think>\n\n{"a": 1}')
    assert fed.endswith('{"a": 1}') and parser.finish == "stop"


def test_formats_can_be_named_and_switched_off() -> None:
    files = files_for(source("qwen3"))
    for tools, reasoning in (("none", "none"), ("mistral", "mistral")):
        of = ChatRenderer(files, formats=FormatChoice(tools=tools, reasoning=reasoning))
        expected = None if tools == "none" else tools
        assert (of.tool_format, of.reasoning_format) == (expected, expected)
    with pytest.raises(TemplateRefused, match="tool_format"):
        ChatRenderer(files_for(source("phi-4")), formats=FormatChoice(tools="hermes"))


def test_a_refusal_is_the_templates_own_words() -> None:
    prompt = Prompt([user("a"), user("b")], [Tool("t", {})])
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        renderer("mistral-7b-v0.3").render(prompt, thinking=False)


@pytest.mark.parametrize(("name", "folded"), [("gemma-2", [3]), ("qwen2.5", [])])
def test_a_late_system_message_that_is_told_in_the_users_turn_is_named(
    name: str, folded: list[int]
) -> None:
    late = Message("system", [TextPart("Answer in French.")])
    answer = Message("assistant", [TextPart("Yes.")])
    prompt = Prompt(
        [user("What is it?"), answer, late, user("How is it?")], [], [TextPart("Be brief.")]
    )
    [started] = asyncio.run(answers(renderer(name), [prompt]))
    assert started.folded == folded
