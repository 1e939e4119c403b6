"""What becomes of the calls that models write, on every template.

A turn is written as the template writes it, with the tokens that the tokenizer makes of that text:
this is what the model is taken to sample. gpt-oss writes its calls in another way than its template
does, and is taken to write them in its own. The turn goes through the engine's parser, is sent back
as history with its results, and is rendered again.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import (
    GenerateRequest,
    Message,
    Part,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolChoice,
    ToolResultPart,
    ToolUsePart,
)
from engine.text.formats.calls import calls_of
from engine.text.renderer import ChatRenderer
from tests.engine.text.format_cases import (
    OF_REAL,
    REAL_PATHS,
    control_tokens,
    own_template_paths,
)
from tests.engine.text.vocabularies import files_for
from tests.engine.text.written_turns import (
    FORCED,
    QUESTION,
    TOOLS,
    calls,
    follow,
    from_call,
    parts_of,
    request,
    thinking_end,
    tokens_of,
    written,
)

PATHS = [*own_template_paths(), *REAL_PATHS]
# Replayed calls that can't have the tokens that were sampled. Mistral writes the id behind the
# input, and a call is told with its id before. gpt-oss writes the channel before the recipient, its
# template behind. Apriel's prompts open a thinking, and the others' close one, but the history has
# none.
OTHER_TOKENS = {
    "apriel",
    "mistral-7b-v0.3",
    "mistral-small-3.1",
    "openai-gpt-oss-120b",
    "qwen3",
    "Qwen-Qwen3-0.6B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "gemma-4",
    "hunyuan",
}
INPUT = {"city": 'Bern "x" < y', "count": 3, "flag": True}
PLAIN_INPUT = {"city": "Bern", "count": 3}
Turn = list[Part]


@cache
def model_of(path: Path) -> ChatRenderer:
    """A tokenizer whose merges cross punctuation, with all control tokens of the template."""
    files = files_for(path.read_text("utf-8"))
    files.tokenizer.add_special_tokens(control_tokens(files.templates["default"]))
    return ChatRenderer(files)


def thinks(turn: Turn) -> bool:
    return any(isinstance(part, ThinkingPart) for part in turn)


def content(turn: Turn) -> list[Any]:
    """What a reader has to find: thinking, text, calls."""
    return [(p.name, p.input) if isinstance(p, ToolUsePart) else text_in(p) for p in turn]


def text_in(part: Part) -> str:
    assert isinstance(part, TextPart | ThinkingPart)
    return part.text


def turns_of(model: ChatRenderer) -> Iterator[Turn]:
    """One call, several, text and a call, thinking and a call, as far as the model writes such."""
    proven = model.formats.calls
    assert proven is not None
    # A template that writes strings without escapes has proven its format with plain ones.
    arguments = INPUT if '"' in str(proven.probe.get("text")) else PLAIN_INPUT
    first_call, second_call = calls(arguments, {"city": "Uri"})
    thought = ThinkingPart("I need the tool.")
    # A model whose prompts always end inside its thinking has some in every turn.
    always: list[Part] = [thought] if model.begins_thinking(request()) else []
    yield [*always, first_call]
    if model.tool_format != "openai":
        yield [*always, first_call, second_call]
    # Muse's template drops the text beside calls.
    if model.tool_format != "muse" and not any(of.begins_turn for of in proven.format.ways[:1]):
        yield [*always, TextPart("I look."), first_call]
    if model.reasoning_format is not None:
        yield [thought, first_call]


def text_of(model: ChatRenderer, turn: Turn) -> str:
    """What the model writes, from the prompt's end on."""
    if model.tool_format == "openai":
        return "".join(map(_harmony, turn)).removesuffix("<|end|><|start|>assistant")
    markup = written(model, turn, thinking=thinks(turn))
    needles = [p.name if isinstance(p, ToolUsePart) else text_in(p) for p in turn]
    tool_uses = [part for part in turn if isinstance(part, ToolUsePart)]
    if all(needle in markup for needle in needles) and not (
        model.traits.splits_calls and len(tool_uses) > 1
    ):
        return markup
    return _composed(model, turn, tool_uses)


def _composed(model: ChatRenderer, turn: Turn, tool_uses: list[ToolUsePart]) -> str:
    """Where the template drops a part, or takes one call a message, as the format writes it."""
    opened = model.begins_thinking(request(thinking=thinks(turn)))
    tags = model.formats.tags
    of = model.formats.call_format
    text = ""
    for part in turn:
        if isinstance(part, ThinkingPart):
            assert tags is not None
            text += f"{'' if opened else tags.open}\n{part.text}\n{tags.close}\n\n"
        elif isinstance(part, TextPart):
            text += part.text
    assert of is not None
    separator = of.call_texts[0].separator if model.traits.splits_calls else ""
    if separator:
        markups = [from_call(model, written(model, [call])).strip() for call in tool_uses]
        return text + separator.join(markups)
    return text + from_call(model, written(model, tool_uses))


def _harmony(part: Part) -> str:
    if isinstance(part, ToolUsePart):
        to = f"<|channel|>commentary to=functions.{part.name} <|constrain|>json<|message|>"
        return to + json.dumps(part.input, ensure_ascii=False)
    channel = "analysis" if isinstance(part, ThinkingPart) else "commentary"
    return f"<|channel|>{channel}<|message|>{text_in(part)}<|end|><|start|>assistant"


def read(model: ChatRenderer, turn_request: GenerateRequest, tokens: Sequence[int]) -> Turn:
    """The parts of the turn that the engine's parser finds in a model's tokens."""
    parser = model.parser(turn_request)
    ended = [*tokens, *sorted(model.end_token_ids)[:1]]
    deltas = [delta for token in ended for delta in parser.feed(token)]
    return parts_of([*deltas, *parser.close()])


def replayed(model: ChatRenderer, turn: Turn) -> str:
    """Whether the turn, parsed and sent back, has the tokens that were sampled."""
    turn_request = request(thinking=thinks(turn))
    before = model.render(turn_request.prompt, thinking=thinks(turn)).token_ids
    known = [*before, *tokens_of(model, text_of(model, turn))]
    parts = read(model, turn_request, known[len(before) :])
    results: list[Part] = [
        ToolResultPart(part.id, "Rain.") for part in parts if isinstance(part, ToolUsePart)
    ]
    messages = [QUESTION, Message("assistant", parts), Message("user", results)]
    after = model.render(Prompt(messages, TOOLS), thinking=thinks(turn)).token_ids
    if after[: len(known)] == known:
        return "same"
    rendered_text, expected = (
        model.tokenizer.decode(t, skip_special_tokens=False) for t in (after, known)
    )
    return "other tokens" if rendered_text.startswith(expected) else "other text"


def forced_texts(model: ChatRenderer, arguments: dict[str, Any]) -> Iterator[str]:
    """A call as the template writes it, and as the format does."""
    yield from_call(model, written(model, calls(arguments)))
    of = model.formats.call_format
    assert of is not None
    fill = {
        "{name}": "get_weather",
        "{input}": json.dumps(arguments),
        "{digits}": "0",
        "{more}": "",
    }
    for way in of.call_texts:
        text = way.begin + way.call + way.end
        for place, value in fill.items():
            text = text.replace(place, value)
        yield text


def is_forced(model: ChatRenderer, text: str, arguments: dict[str, Any]) -> bool:
    """Whether the grammar allows the call."""
    tool = Tool("get_weather", FORCED, "Weather.")
    for choice in (ToolChoice("any"), ToolChoice("tool", tool.name, parallel=False)):
        turn_request = request(prompt=Prompt([QUESTION], [tool]), tool_choice=choice)
        parser = model.parser(turn_request)
        whole = thinking_end(model, turn_request) + text
        fed, deltas = follow(parser, model, whole)
        if parser.finish is None and fed != whole:
            return False
        if calls_of([*deltas, *parser.close()]) != [(tool.name, arguments)]:
            return False
    return True


def place_of_late_system(model: ChatRenderer) -> str:
    """Where a system message between two turns stands: in its own place, or in the user's turn."""
    texts = ["first-question", "first-answer", "Answer in French.", "last-question"]
    messages = [
        Message(role, [TextPart(text)])
        for role, text in zip(("user", "assistant", "system", "user"), texts, strict=True)
    ]
    rendered = model.render(Prompt(messages, [], [TextPart("Be brief.")]), thinking=False)
    text = model.tokenizer.decode(rendered.token_ids, skip_special_tokens=False)
    at = [text.rfind(part) for part in texts]
    assert -1 not in at
    if rendered.folded:
        return "folded"
    return "native" if at == sorted(at) else "moved"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_turn_of_calls_is_parsed_and_every_call_can_be_forced(path: Path) -> None:
    model = model_of(path)
    assert place_of_late_system(model) in ("native", "folded")
    if model.tool_format is None:
        return
    for turn in turns_of(model):
        tokens = tokens_of(model, text_of(model, turn))
        parts = read(model, request(thinking=thinks(turn)), tokens)
        assert content(parts) == content(turn)
    arguments = {"city": "Bern it is", "count": 12, "flag": True, "unit": "kelvin"}
    assert any(is_forced(model, text, arguments) for text in forced_texts(model, arguments))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_replayed_call_has_the_tokens_that_were_sampled(path: Path) -> None:
    model = model_of(path)
    if model.tool_format is None:
        pytest.skip("its model calls no tools")
    first, *others = (replayed(model, turn) for turn in turns_of(model))
    if path not in REAL_PATHS or path.stem in OF_REAL:
        assert (first == "same") == (path.stem not in OTHER_TOKENS)
    assert "other tokens" not in (first, *others)


def test_a_list_is_read_where_the_tags_of_its_values_are_control_tokens() -> None:
    model = model_of(next(path for path in PATHS if path.stem == "minimax-m3"))
    assert model.tokenizer.encode("<item>", add_special_tokens=False).tokens == ["<item>"]
    turn: Turn = [*calls({"city": "Bern", "list": ["a", "b,c"]})]
    tokens = tokens_of(model, text_of(model, turn))
    assert content(read(model, request(), tokens)) == content(turn)
