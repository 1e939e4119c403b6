"""The synthetic engine with plain OpenAI routes, which other routers are measured on."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from engine.protocol import Message, Prompt, Stats, TextPart
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


def test_streamed_and_not_are_the_same_answer(client: OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "a question"}]
    whole = client.chat.completions.create(model="synthetic", messages=messages, max_tokens=4)
    chunks = list(
        client.chat.completions.create(
            model="synthetic",
            messages=messages,
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content == "synthetic 0 1 2"
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 4
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_tokens_are_those_of_our_own_protocol_and_are_reused_by_whole_blocks(
    synthetic: Engine, client: OpenAI
) -> None:
    system, question = f"system {id(client)} {LONG}", "what is the rule?"
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": system},
        {"role": "user", "content": question},
    ]
    ours = Prompt([Message("user", [TextPart(question)])], system=[TextPart(system)])
    counted = synthetic.count(ours)
    before = synthetic.get("stats", Stats).counters
    first = client.chat.completions.create(model="synthetic", messages=messages, max_tokens=1)
    again = client.chat.completions.create(model="synthetic", messages=messages, max_tokens=1)
    after = synthetic.get("stats", Stats).counters
    assert first.usage is not None and again.usage is not None
    assert first.usage.prompt_tokens == again.usage.prompt_tokens == counted.input_tokens
    cached = [usage.prompt_tokens_details for usage in (first.usage, again.usage)]
    whole_blocks = (counted.input_tokens - 1) // BLOCK * BLOCK
    assert [d and d.cached_tokens for d in cached] == [0, whole_blocks]
    assert after.automatic_tokens - before.automatic_tokens == whole_blocks
    computed = after.computed_tokens - before.computed_tokens
    assert computed == 2 * counted.input_tokens - whole_blocks


def test_parts_are_text_and_markers_are_ignored(synthetic: Engine, client: OpenAI) -> None:
    marked: Any = {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}
    leases = synthetic.get("stats", Stats).num_leases
    messages: Any = [{"role": "user", "content": [marked]}]
    reply = client.chat.completions.create(model="synthetic", messages=messages, max_tokens=1)
    plain: Any = [{"role": "user", "content": LONG}]
    same = client.chat.completions.create(model="synthetic", messages=plain, max_tokens=1)
    assert reply.usage is not None and same.usage is not None
    assert reply.usage.prompt_tokens == same.usage.prompt_tokens
    assert synthetic.get("stats", Stats).num_leases == leases


def test_rendering_gives_the_prompts_tokens(client: OpenAI, synthetic: Engine) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], "model": "synthetic"}
    rendered = synthetic.client.post("/v1/chat/completions/render", json=body).json()
    reply = client.chat.completions.create(**body, max_tokens=1)  # type: ignore[call-overload]
    assert len(rendered["token_ids"]) == reply.usage.prompt_tokens


def test_models_and_health(client: OpenAI, synthetic: Engine) -> None:
    assert [model.id for model in client.models.list()] == ["synthetic"]
    assert (
        httpx.get(f"{str(synthetic.client.base_url).rstrip('/')}/health", timeout=120).status_code
        == 200
    )


def test_the_products_engines_do_not_speak_it(engine: Engine) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
        assert engine.client.post(path, json=body).status_code == 404
    assert engine.client.get("/v1/models").status_code == 404
    assert engine.client.get("/health").status_code == 404
