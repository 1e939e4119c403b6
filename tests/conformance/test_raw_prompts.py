"""Prompts that are text as it stands, answers without a length, and turns that never end."""

from typing import Any

import pytest

from engine.protocol import Name, Prompt
from tests.conformance.engines import Engine, Refused, prompt


def raw(text: str) -> Prompt:
    return Prompt([], text=text)


def need_own_template(engine: Engine) -> None:
    if not engine.has("own_template"):
        pytest.skip("declares no own_template: test_access.py shows that it refuses these")


def test_a_raw_prompt_counts_as_it_computes(engine: Engine) -> None:
    need_own_template(engine)
    text = engine.text(100)
    counted = engine.count(raw(text))
    assert counted.segment_tokens == [counted.input_tokens]
    assert counted.input_tokens < engine.count(prompt(text)).input_tokens, "no template around it"
    answer = engine.ask(raw(text), engine.scope(), max_tokens=4)
    assert answer.usage.prompt_tokens == counted.input_tokens
    assert answer.finished[0].output_tokens <= 4


def test_a_raw_prompt_reuses_what_it_shares_and_writes_entries(engine: Engine) -> None:
    need_own_template(engine)
    scope = engine.scope()
    text = engine.text(100)
    engine.ask(raw(text), scope)
    again = engine.ask(raw(text), scope)
    size = engine.description.block_size
    total = again.usage.prompt_tokens
    assert again.usage.automatic_tokens >= (total - 1) // size * size
    marked = engine.ask(raw(text), scope, 0)
    assert marked.usage.cache_write_5m_tokens == engine.floor(total)
    longer = engine.ask(raw(text + engine.text(40)), scope)
    assert longer.usage.automatic_tokens > 0
    foreign = engine.ask(raw(text), engine.scope())
    assert foreign.usage.automatic_tokens == 0


def test_a_raw_prompt_has_names(engine: Engine) -> None:
    need_own_template(engine)
    text = engine.text(100)
    name = Name("a" * 16, 0, len(text) // 2)
    end = Name("b" * 16, 0)
    receipt = engine.ask(raw(text), engine.scope(), names=(name, end)).started.receipt
    total = engine.count(raw(text)).input_tokens
    assert 0 < receipt.name_tokens[0] < receipt.name_tokens[1] == total


@pytest.mark.parametrize("path", ["generate", "count"])
@pytest.mark.parametrize(
    "beside",
    [
        {"messages": [{"role": "user", "parts": [{"type": "text", "text": "x"}]}]},
        {"messages": [], "system": [{"type": "text", "text": "x"}]},
        {"messages": [], "tools": [{"name": "look", "input_schema": {}}]},
    ],
    ids=["messages", "system", "tools"],
)
def test_a_raw_prompt_excludes_a_conversation(engine: Engine, path: str, beside: Any) -> None:
    body = {"scope": engine.scope(), "prompt": {**beside, "text": "raw"}}
    if path == "generate":
        body |= {"request_id": engine.scope(), "sampling": {"max_tokens": 1}}
    response = engine.client.post(f"/v1/{path}", json=body)
    assert (response.status_code, response.json()["code"]) == (400, "invalid_request")


def test_an_empty_raw_prompt_is_refused(engine: Engine) -> None:
    with pytest.raises(Refused) as refused:
        engine.ask(raw(""), engine.scope())
    code = "invalid_request" if engine.has("own_template") else "unsupported"
    assert refused.value.reply["code"] == code


def test_without_a_length_an_answer_goes_on_until_nothing_is_left(tiny_engine: Engine) -> None:
    need_own_template(tiny_engine)
    conversation = raw(tiny_engine.text(150))
    description = tiny_engine.description
    room = min(description.max_context_tokens, description.num_blocks * description.block_size)
    answer = tiny_engine.ask(conversation, tiny_engine.scope(), max_tokens=None, ignore_eos=True)
    [end] = answer.finished
    assert end.reason == "context"
    total = answer.usage.prompt_tokens + end.output_tokens
    assert room - description.block_size < total <= room + 1


def test_nothing_ends_a_turn_that_ignores_its_end(engine: Engine) -> None:
    need_own_template(engine)
    conversation = prompt("What is a lease?")
    answer = engine.ask(conversation, engine.scope(), max_tokens=200, ignore_eos=True)
    assert (answer.finished[0].reason, answer.finished[0].output_tokens) == ("length", 200)
    stop = answer.text()[5:8]
    stopped = engine.ask(
        conversation, engine.scope(), max_tokens=200, ignore_eos=True, stop_sequences=[stop]
    )
    assert stopped.finished[0].reason == "stop_sequence"
