"""The synthetic engine with plain OpenAI routes, which other routers are measured on."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from engine.protocol import Message, Prompt, TextPart
from engine.protocol.reports import Stats
from tests.conformance.conftest import checked
from tests.conformance.engines import PROFILES, SECRET, Engine, running_engine

BLOCK = 16
LONG = "a rule that everybody reads, word by word, " * 30


@pytest.fixture(scope="module")
def started() -> Iterator[Engine]:
    with running_engine("synthetic", PROFILES["fast"], "scripts.bench.openai_engine") as engine:
        yield engine


@pytest.fixture
def synthetic(started: Engine) -> Iterator[Engine]:
    yield from checked(started)


@pytest.fixture
def client(synthetic: Engine) -> Iterator[OpenAI]:
    url = f"{str(synthetic.client.base_url).rstrip('/')}/v1"
    with OpenAI(base_url=url, api_key=SECRET, max_retries=0, timeout=120) as client:
        yield client


def test_tokens_are_those_of_our_own_protocol_and_are_reused_by_whole_blocks(
    synthetic: Engine, client: OpenAI
) -> None:
    system, question = f"system {id(client)} {LONG}", "what is the rule?"
    messages: Any = [
        {"role": "system", "content": system},
        {"role": "user", "content": question},
    ]
    ours = Prompt([Message("user", [TextPart(question)])], system=[TextPart(system)])
    counted = synthetic.count(ours)
    before = synthetic.get("stats", Stats).counters
    first = client.chat.completions.create(model="synthetic", messages=messages, max_tokens=1)
    again = client.chat.completions.create(model="synthetic", messages=messages, max_tokens=1)
    after = synthetic.get("stats", Stats).counters
    body = {"model": "synthetic", "messages": messages}
    rendered = synthetic.client.post("/v1/chat/completions/render", json=body)
    assert len(rendered.json()["token_ids"]) == counted.input_tokens
    assert first.choices[0].message.content == "synthetic"
    assert first.usage is not None and again.usage is not None
    assert first.usage.prompt_tokens == again.usage.prompt_tokens == counted.input_tokens
    cached = [usage.prompt_tokens_details for usage in (first.usage, again.usage)]
    whole_blocks = (counted.input_tokens - 1) // BLOCK * BLOCK
    assert [d and d.cached_tokens for d in cached] == [0, whole_blocks]
    assert after.automatic_tokens - before.automatic_tokens == whole_blocks
    computed = after.computed_tokens - before.computed_tokens
    assert computed == 2 * counted.input_tokens - whole_blocks


def test_the_products_engines_do_not_speak_it(engine: Engine) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
        assert engine.client.post(path, json=body).status_code == 404
    assert engine.client.get("/v1/models").status_code == 404
    assert engine.client.get("/health").status_code == 404
