"""What becomes of the calls that models write, on every template: the tables of the README."""

from functools import cache
from pathlib import Path

import pytest

from engine.text.renderer import ChatRenderer
from tests.engine.text import written_calls as table
from tests.engine.text.conversations import REAL, call_template_paths, template_paths
from tests.engine.text.format_cases import OF_REAL

PATHS = [*template_paths(), *call_template_paths()]
OWN = [path for path in PATHS if path.parent != REAL]
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
}


@cache
def model_of(path: Path) -> ChatRenderer:
    return table.model_of(path.read_text("utf-8"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_turn_of_calls_is_parsed_and_every_call_can_be_forced(path: Path) -> None:
    model = model_of(path)
    *parsed, everywhere, forced, late = table.row(model)
    assert late in ("native", "folded")
    if model.tool_format is None:
        assert set(parsed) == {"no tools"}
        return
    assert set(parsed) <= {table.YES, table.NONE} and parsed[0] == everywhere == table.YES
    assert forced.startswith(table.YES)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_replayed_call_has_the_tokens_that_were_sampled(path: Path) -> None:
    model = model_of(path)
    if model.tool_format is None:
        pytest.skip("its model calls no tools")
    one, *others = table.replay_row(model)
    if path in OWN or path.stem in OF_REAL:
        assert (one == table.YES) == (path.stem not in OTHER_TOKENS)
    assert "same text, other tokens" not in (one, *others)


def test_a_list_is_read_where_the_tags_of_its_values_are_control_tokens() -> None:
    model = model_of(next(path for path in OWN if path.stem == "minimax-m3"))
    assert model.tokenizer.encode("<item>", add_special_tokens=False).tokens == ["<item>"]
    turn = table.Turn("", [*table.calls({"city": "Bern", "list": ["a", "b,c"]})])
    tokens = model.tokenizer.encode(table.text_of(model, turn), add_special_tokens=False).ids
    assert table.Turn("", table.read(model, table.request(), tokens)).content == turn.content
