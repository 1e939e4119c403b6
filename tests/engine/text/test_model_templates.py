"""Chat templates with the behaviour of known models': what they need, and their boundaries."""

import asyncio
import os
from functools import cache
from pathlib import Path

import pytest

from engine.errors import InvalidRequest
from engine.protocol import (
    Delta,
    GenerateRequest,
    Message,
    Prompt,
    Sampling,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from engine.schedule.output import OutputParser
from engine.text.errors import TemplateRefused
from engine.text.formats.proof import FormatChoice
from engine.text.renderer import ChatRenderer
from engine.text.template.chat_template import ChatTemplate
from tests.engine.text import template_runs as runs
from tests.engine.text.conversations import OWN, REAL, WHY_NOT, template_paths
from tests.engine.text.vocabularies import KINDS

PATHS = template_paths()
NAMES = sorted(path.stem for path in OWN.glob("*.jinja"))
ROOT = Path(__file__).resolve().parents[3]
# Each template on two kinds of tokenizers, in turn; `scripts/long_tests templates` takes all five.
NUM_KINDS = int(os.environ.get("TEMPLATE_KINDS", "2"))
PAIRS = [
    (path, KINDS[(number + 2 * place) % len(KINDS)])
    for number, path in enumerate(PATHS)
    for place in range(NUM_KINDS)
]


@cache
def source(name: str) -> str:
    return (OWN / f"{name}.jinja").read_text("utf-8")


@cache
def renderer(name: str) -> ChatRenderer:
    return ChatRenderer(runs.files_for(source(name)))


def text_of(name: str, prompt: Prompt, *, thinking: bool = False) -> str:
    tokens = renderer(name).render(prompt, thinking=thinking).token_ids
    return renderer(name).tokenizer.decode(tokens, skip_special_tokens=False)


def needs(name: str) -> set[str]:
    traits = renderer(name).traits
    return {field for field in traits.__slots__ if getattr(traits, field) is True}


def user(*texts: str) -> Message:
    return Message("user", [TextPart(text) for text in texts])


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_tokens_are_those_of_one_call_and_reads_all_that_is_there(path: Path) -> None:
    row = runs.measure(path)
    assert row.one_shot[0] == row.one_shot[1] > 0
    assert row.reads[0] == row.reads[1] > 0


@pytest.mark.skipif(not list(REAL.glob("*.jinja")), reason=WHY_NOT)
def test_the_real_templates_are_there() -> None:
    assert len(PATHS) > len(NAMES)


@pytest.mark.parametrize(
    ("path", "kind"), [pytest.param(path, kind, id=f"{path.stem}-{kind}") for path, kind in PAIRS]
)
def test_random_prompts_have_the_tokens_of_one_call(path: Path, kind: str) -> None:
    """On kinds of tokenizers, with tools and without, and whatever came before them."""
    source = path.read_text("utf-8")
    files = runs.files_for(source, kind)
    of = ChatRenderer(files, formats=FormatChoice(tools="none"))
    row = runs.one_shot(of, ChatTemplate({"default": source}, files.special_tokens), path.stem)
    assert row.one_shot[0] == row.one_shot[1] > 0


@pytest.mark.parametrize("name", NAMES)
def test_ends_are_in_order_and_every_question_has_one(name: str) -> None:
    for prompt in runs.turns_of(renderer(name)):
        spans = renderer(name).render(prompt, thinking=True).segments
        ends = [span.end for span in spans if span.end is not None]
        assert ends == sorted(ends)
        assert spans[-1].end is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_reads_no_more_than_what_still_renders_the_same(name: str) -> None:
    """What the engine reads is a prefix of both prompts, and a repeated prompt is read whole."""
    prompts = runs.turns_of(renderer(name))
    renders = [renderer(name).render(prompt, thinking=True) for prompt in prompts]
    usages = asyncio.run(runs.usages(renderer(name), [*prompts, prompts[-1]]))
    for before, after, usage in zip(renders, renders[1:], usages[1:], strict=False):
        assert usage is not None
        read = usage.cache_read_tokens
        assert before.token_ids[:read] == after.token_ids[:read]
    again = usages[-1]
    assert again is not None
    assert again.cache_read_tokens == renders[-1].segments[-1].end


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-r1", set()),
        ("gemma-2", {"folds_system", "folds_late_system"}),
        ("gemma-3", set()),
        ("hermes-3", set()),
        ("llama-3.1", {"splits_calls"}),
        ("magistral", {"thinks_in_content", "folds_late_system"}),
        (
            "mistral-7b-v0.3",
            {"shortens_ids", "joins_results", "moves_tools", "folds_late_system"},
        ),
        ("mistral-small-3.1", {"joins_results", "moves_tools", "folds_late_system"}),
        ("phi-4", set()),
        ("qwen2.5", set()),
        ("qwen3", set()),
    ],
)
def test_what_a_template_cannot_take_is_found_out(name: str, expected: set[str]) -> None:
    assert needs(name) == expected


def test_a_system_prompt_that_is_refused_goes_before_the_first_question() -> None:
    prompt = Prompt([user("Hi"), Message("assistant", [TextPart("Yes?")]), user("Go")],
                    system=[TextPart("Be kind."), TextPart("Be brief.")])  # fmt: skip
    assert "<start_of_turn>user\nBe kind.\n\nBe brief.\n\nHi<end_of_turn>" in text_of(
        "gemma-2", prompt
    )


def parallel_calls(second_id: str = "call<|im_end|>-2") -> Prompt:
    ids = ["toolu_01A09q90qw90lq917835lq9A", second_id]
    calls = [
        ToolUsePart(ids[0], "get_weather", {"city": "A"}),
        ToolUsePart(ids[1], "get_weather", {"city": "B"}),
    ]
    results = [ToolResultPart(i, f"result {i[:4]}") for i in ids]
    told = Message("user", [*results, TextPart("So?")])
    return Prompt([user("Both?"), Message("assistant", [*calls]), told], runs.TOOLS)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in ("deepseek-r1", "phi-4") and "gemma" not in n]
)
def test_parallel_calls_with_any_ids_and_text_behind_results_can_be_replayed(name: str) -> None:
    written = text_of(name, parallel_calls())
    assert written.count("get_weather") >= 3
    assert written.index('"A"') < written.index('"B"') < written.index("result call")
    assert written.index("result call") < written.index("So?")
    # A control token in an id is text, as anywhere else: only the template writes real ones.
    of = renderer(name)
    end = of.tokenizer.token_to_id("<|im_end|>")
    counts = [
        of.render(prompt, thinking=False).token_ids.count(end)
        for prompt in (parallel_calls(), parallel_calls("call_of_no_harm-2"))
    ]
    assert counts[0] == counts[1]


def request(prompt: Prompt, **changes: object) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", scope="0" * 32, prompt=prompt, sampling=Sampling(max_tokens=9), **changes
    )  # type: ignore[arg-type]


def said(name: str, asked: GenerateRequest, written: str) -> tuple[list[str], int]:
    """The kinds of delta that a model's text becomes, in order, and the thinking tokens."""
    parser = renderer(name).parser(asked)
    kinds: list[str] = []
    deltas = []
    for token in renderer(name).tokenizer.encode(written, add_special_tokens=False).ids:
        deltas += parser.feed(token)
    for delta in [*deltas, *parser.close()]:
        kind = type(delta).__name__
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    return kinds, parser.thinking_tokens


def test_thinking_that_the_template_opened_is_thinking() -> None:
    asked = request(Prompt([user("Hi")]))
    assert text_of("deepseek-r1", asked.prompt).endswith("<think>\n")
    kinds, count = said("deepseek-r1", asked, "Hm, well.</think>\n\nHello.")
    assert kinds == ["ThinkingDelta", "TextDelta"]
    head = renderer("deepseek-r1").tokenizer.encode("Hm, well.</think>").ids
    assert count == len(head)
    # Where the turn is the model's own to open, an answer without tags is an answer.
    assert said("qwen3", request(asked.prompt, thinking=True), "Hello.") == (["TextDelta"], 0)
    kinds, count = said("magistral", asked, "[THINK]Hm.[/THINK]Hello.")
    assert kinds == ["ThinkingDelta", "TextDelta"] and count > 2


def test_thinking_is_handed_to_the_template() -> None:
    prompt = Prompt([user("Hi")])
    assert text_of("qwen3", prompt, thinking=True).endswith("assistant\n")
    assert text_of("qwen3", prompt, thinking=False).endswith("<think>\n\n</think>\n\n")


def test_old_thinking_is_rendered_as_the_template_does_and_takes_no_room_elsewhere() -> None:
    prompts = runs.turns_of(renderer("qwen3"))
    assert "I need the tool." in text_of("qwen3", prompts[2], thinking=True)
    assert "I need the tool." not in text_of("qwen3", prompts[3], thinking=True)
    spans = renderer("qwen3").render(prompts[3], thinking=True).segments
    parts = [part for message in prompts[3].messages for part in message.parts]
    at = len(runs.TOOLS) + 1 + next(i for i, p in enumerate(parts) if isinstance(p, ThinkingPart))
    assert spans[at].end == spans[at - 1].end


def follow(parser: OutputParser, of: ChatRenderer, written: str) -> list[Delta]:
    """Feed a text's tokens as long as the parser wants any, each of which must be allowed."""
    deltas: list[Delta] = []
    for token in of.tokenizer.encode(written, add_special_tokens=False).ids:
        if parser.finish is not None:
            break
        assert parser.allowed is not None
        assert parser.allowed[token // 8] >> token % 8 & 1, of.tokenizer.id_to_token(token)
        deltas += parser.feed(token)
    return deltas


def test_a_model_that_always_thinks_may_think_before_a_forced_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    asked = request(Prompt([user("Hi")]), output_schema=schema)
    parser = renderer("deepseek-r1").parser(asked)
    follow(parser, renderer("deepseek-r1"), 'Well {"x": 1}.\n</think>\n\n{"a": 1}')
    assert parser.finish == "stop"


def test_formats_can_be_named_and_switched_off() -> None:
    files = runs.files_for(source("qwen3"))
    off = ChatRenderer(files, formats=FormatChoice(tools="none", reasoning="none"))
    assert (off.tool_format, off.reasoning_format) == (None, None)
    other = ChatRenderer(files, formats=FormatChoice(tools="mistral", reasoning="mistral"))
    assert (other.tool_format, other.reasoning_format) == ("mistral", "mistral")
    with pytest.raises(TemplateRefused, match="tool_format"):
        ChatRenderer(runs.files_for(source("phi-4")), formats=FormatChoice(tools="hermes"))


def test_a_refusal_is_the_templates_own_words() -> None:
    prompt = Prompt([user("a"), user("b")], [Tool("t", {})])
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        renderer("mistral-7b-v0.3").render(prompt, thinking=False)


@pytest.mark.parametrize(("name", "folded"), [("gemma-2", [3]), ("qwen2.5", [])])
def test_a_late_system_message_that_is_told_in_the_users_turn_is_named(
    name: str, folded: list[int]
) -> None:
    path = next(path for path in PATHS if path.stem == name)
    renderer = ChatRenderer(runs.files_for(path.read_text("utf-8")))
    late = Message("system", [TextPart("Answer in French.")])
    answer = Message("assistant", [TextPart("Yes.")])
    prompt = Prompt([runs.FIRST, answer, late, runs.SECOND], [], [runs.SYSTEM])
    [frame] = asyncio.run(runs.first_frames(renderer, [prompt]))
    assert frame is not None and frame.folded == folded
