"""Six turns with two tools on the vLLM backend, in six models' own formats.

Everything of the backend is real but vLLM (`scripted_core`). Calls have to be parsed, results
replayed, and what is reused has to be told as read.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from engine.cache.ids import TokenId
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
from tests.e2e.test_formats import NAMES, RESULTS, SCHEMA, STYLES, SYSTEM, TURNS, Style
from tests.engine.backends.vllm.scripted_core import BLOCK, ScriptedCore, loaded, marks, said
from tests.engine.text.format_cases import REAL, renderer, source

TOOLS = [Tool(name, SCHEMA, about) for name, about in NAMES.items()]


def written(style: Style, asked: str, done: Any) -> str:
    body = style.answer.format(done) if isinstance(done, str) else style.call(*done)
    return style.thought.format(asked.split()[0]) + body


def content(found: Sequence[Part]) -> Any:
    """The call or the text of a turn, as the script has it."""
    calls = [(part.name, part.input) for part in found if isinstance(part, ToolUsePart)]
    texts = [part.text for part in found if isinstance(part, TextPart)]
    (only,) = [*calls, *texts]
    return only


@pytest.mark.anyio
@pytest.mark.parametrize("name", list(STYLES))
async def test_calls_are_parsed_results_replayed_and_reads_told(name: str) -> None:
    style = STYLES[name]
    if source(style.template) is None:
        pytest.skip(f"{REAL} is not there: real templates are not part of the project")
    model = renderer(style.template)
    core = ScriptedCore(model)
    messages: list[Message] = []
    held: list[list[TokenId]] = []
    reads = possible = 0
    async with loaded(core, model) as (backend, crashes):
        for number, (asked, done) in enumerate(TURNS):
            if not messages or messages[-1].role == "assistant":
                messages.append(Message("user", [TextPart(asked)]))
            core.text = written(style, asked, done)
            prompt = Prompt(list(messages), TOOLS, [TextPart(SYSTEM)])
            thinking = bool(style.thought)
            rendered = model.render(prompt, thinking=thinking)
            reusable = core.reusable(rendered.token_ids)
            started, found, finished = await said(backend, number, prompt, thinking=thinking)
            assert core.prompts[-1] == rendered.token_ids
            assert content(found) == done
            assert any(isinstance(part, ThinkingPart) for part in found) == thinking
            assert finished.reason == ("stop" if isinstance(done, str) else "tool_use")
            usage = started.usage
            assert usage.cache_read_tokens + usage.automatic_tokens == reusable
            known = [h for h in held if rendered.token_ids[: len(h)] == h]
            most = max((len(h) for h in known), default=0)
            assert usage.cache_read_tokens == most
            reads, possible = reads + usage.cache_read_tokens, possible + most
            for mark in marks(prompt):
                end = (rendered.segments[mark].end or 0) // BLOCK * BLOCK
                held.append(rendered.token_ids[:end])
            messages.append(Message("assistant", found))
            results: list[Part] = [
                ToolResultPart(part.id, RESULTS[part.input["city"]])
                for part in found
                if isinstance(part, ToolUsePart)
            ]
            if results:
                messages.append(Message("user", results))
    assert reads == possible > 1000
    assert not crashes
