"""A prompt that goes on from one that was rendered before has the tokens of the whole in one call,
and the boundaries that a renderer without a memory finds."""

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from engine.errors import InvalidRequest
from engine.protocol import Message, Prompt, TextPart, ToolUsePart
from engine.text.conversations import ConversationRenderer
from engine.text.rendered import RenderedPrompt
from engine.text.renderer import ChatRenderer
from tests.engine.text.conversations import WORDS, Conversations, template_paths
from tests.engine.text.template_runs import files_for, long_conversation

# Its system prompt stands in the newest question, so older turns have none of the boundaries that
# the turn before had.
MOVES_SYSTEM = "mistral-7b-v0.3"
MARKUP = ("<|im_start|>", "<|im_end|>", "[INST]", "</think>", "<tool_call>", "<", "im")
PATHS = template_paths()
BY_NAME = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


def fresh(renderer: ChatRenderer) -> ConversationRenderer:
    """The same template and tokenizer without a memory of prompts."""
    return ConversationRenderer(renderer._template, renderer._pieces, renderer.traits)


def outcome(
    renderer: ChatRenderer | ConversationRenderer, prompt: Prompt, *, thinking: bool
) -> RenderedPrompt | str:
    try:
        return renderer.render(prompt, thinking=thinking)
    except InvalidRequest as error:
        return str(error)


def turns(whole: Prompt, random: Random) -> Iterator[Prompt]:
    """Prompts that grow message by message, go back and go on in another way."""
    for count in range(1, len(whole.messages) + 1):
        yield Prompt(whole.messages[:count], whole.tools, whole.system)
        if random.random() < 0.2:
            messages = [*whole.messages[: random.randint(1, count)]]
            if messages[-1].role == "user":
                messages[-1] = Message("user", [TextPart(f"Edited {count}")])
            yield Prompt(messages, whole.tools, whole.system)


@BY_NAME
def test_what_was_rendered_before_changes_neither_tokens_nor_boundaries(path: Path) -> None:
    renderer = ChatRenderer(files_for(path.read_text("utf-8")))
    for seed in range(4):
        drawn = Conversations(seed, (*WORDS, *MARKUP) if seed % 2 else WORDS)
        tools = drawn.tools() if seed % 2 and renderer.tool_format is not None else []
        whole = drawn.prompt(num_turns=9, tools=tools, has_system=seed != 2)
        for prompt in turns(whole, Random(seed)):
            thinking = bool(seed % 3)
            expected = outcome(fresh(renderer), prompt, thinking=thinking)
            found = outcome(renderer, prompt, thinking=thinking)
            if isinstance(found, str) or isinstance(expected, str):
                assert found == expected
                continue
            assert found.token_ids == expected.token_ids
            if path.stem == MOVES_SYSTEM:
                continue
            assert [span.end for span in found.segments] == [s.end for s in expected.segments]
            ends = [list(span.character_ends) for span in expected.segments]
            assert [list(span.character_ends) for span in found.segments] == ends


@BY_NAME
def test_a_turn_more_costs_little_of_what_the_conversation_costs(path: Path) -> None:
    renderer = ChatRenderer(files_for(path.read_text("utf-8")))
    *_, before, prompt = long_conversation(renderer, 120)
    seen: list[float] = []
    cold: list[float] = []
    # The best of two rounds, or of five where that is too much: other programs only add.
    for number in range(5):
        one = fresh(renderer)
        one.render(before, thinking=True)
        seen.append(_seconds(one, prompt))
        cold.append(_seconds(fresh(renderer), prompt))
        if number and min(seen) < 0.7 * min(cold):
            break
    assert min(seen) < 0.7 * min(cold)


def _seconds(renderer: ChatRenderer, prompt: Prompt) -> float:
    """CPU time of one render."""
    begin = time.process_time()
    renderer.render(prompt, thinking=True)
    return time.process_time() - begin


def test_values_that_python_takes_for_equal_are_told_apart() -> None:
    path = next(path for path in PATHS if path.stem == "qwen3")
    renderer = ChatRenderer(files_for(path.read_text("utf-8")))

    def called(value: object) -> Prompt:
        call = ToolUsePart("toolu_1", "f", {"x": value})
        question = Message("user", [TextPart("go")])
        return Prompt([question, Message("assistant", [call]), question])

    for value in (1, True, 1.0, "1", None):
        expected = fresh(renderer).render(called(value), thinking=False).token_ids
        assert renderer.render(called(value), thinking=False).token_ids == expected


def test_tenants_share_no_memory() -> None:
    path = next(path for path in PATHS if path.stem == "qwen3")
    renderer = ChatRenderer(files_for(path.read_text("utf-8")))
    prompt = Prompt([Message("user", [TextPart("go")])])
    renderer.render(prompt, thinking=False, scope="one")
    seen = renderer._conversations._seen
    assert {head[0] for head in seen._alike} == {"one"}
    renderer.render(prompt, thinking=False, scope="two")
    assert {head[0] for head in seen._alike} == {"one", "two"}


def test_the_memory_has_a_bound() -> None:
    path = next(path for path in PATHS if path.stem == "qwen3")
    renderer = ChatRenderer(files_for(path.read_text("utf-8")))
    seen = renderer._conversations._seen
    seen.max_bytes = 20_000
    for index in range(30):
        renderer.render(Prompt([Message("user", [TextPart(f"{index} go")])]), thinking=False)
        assert seen._num_bytes <= seen.max_bytes
        assert seen._num_bytes == sum(s.num_bytes for many in seen._alike.values() for s in many)
    assert 0 < len(seen._alike) < 30
