"""The main job over real sockets: official SDK, real gateway, real engine, the demo model."""

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import Message, Usage

from scripts.stack import ENGINE_SECRET, Stack
from tests.e2e.prompts import MODEL, handbook, marked

QUESTION = [{"role": "user", "content": "What is a lease?"}]


def ask(client: Anthropic, *, stream: bool, **body: Any) -> Message:
    body = {"model": MODEL, "max_tokens": 40, "messages": QUESTION, **body}
    if not stream:
        return client.messages.create(**body)
    with client.messages.stream(**body) as events:
        return events.get_final_message()


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def total(usage: Usage) -> int:
    created, read = usage.cache_creation_input_tokens, usage.cache_read_input_tokens
    assert created is not None and read is not None
    assert usage.cache_creation is not None
    assert created == (
        usage.cache_creation.ephemeral_5m_input_tokens
        + usage.cache_creation.ephemeral_1h_input_tokens
    )
    return usage.input_tokens + created + read


@pytest.fixture(params=[False, True], ids=["unstreamed", "streamed"])
def stream(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield request.param


def exact_prefix_tokens(stack: Stack, system: str) -> int:
    """The token count of the marked system block, from the engine's own offsets."""
    body = {
        "scope": "0" * 32,
        "prompt": {
            "system": [{"type": "text", "text": system}],
            "messages": [{"role": "user", "parts": [{"type": "text", "text": "What is a lease?"}]}],
        },
    }
    with stack.engine_client() as engine:
        offsets: list[int] = engine.post("/v1/count", json=body).json()["segment_tokens"]
    return offsets[0]


def test_a_marked_system_prompt_is_written_once_and_then_read(
    client: Anthropic, stack: Stack, stream: bool
) -> None:
    text = handbook(150)
    exact = exact_prefix_tokens(stack, text)
    assert exact > 3000

    first = ask(client, stream=stream, system=marked(text))
    second = ask(client, stream=stream, system=marked(text))

    assert first.usage.cache_creation_input_tokens == exact
    assert first.usage.cache_read_input_tokens == 0
    assert second.usage.cache_creation_input_tokens == 0
    assert second.usage.cache_read_input_tokens == exact
    counted = client.messages.count_tokens(model=MODEL, system=marked(text), messages=QUESTION)
    assert total(first.usage) == total(second.usage) == counted.input_tokens


def test_the_answer_behind_a_cached_prefix_is_the_same(client: Anthropic, stream: bool) -> None:
    text = handbook(150)
    answers = [text_of(ask(client, stream=stream, system=marked(text))) for _ in range(2)]
    assert answers[0] == answers[1]
    assert "lease" in answers[0]


def test_streamed_usage_equals_unstreamed_usage(client: Anthropic) -> None:
    text = handbook(60)
    ask(client, stream=False, system=marked(text))
    plain = ask(client, stream=False, system=marked(text))
    streamed = ask(client, stream=True, system=marked(text))
    assert streamed.usage == plain.usage
    assert text_of(streamed) == text_of(plain)
    assert streamed.stop_reason == plain.stop_reason


def test_one_token_less_than_the_whole_prefix_is_no_read(client: Anthropic) -> None:
    text = handbook(60)
    ask(client, stream=False, system=marked(text))
    other = ask(client, stream=False, system=marked(text + " And one more."))
    assert other.usage.cache_read_input_tokens == 0


def test_without_a_marker_nothing_is_written_or_read(client: Anthropic) -> None:
    text = handbook(60)
    ask(client, stream=False, system=marked(text))
    unmarked = ask(client, stream=False, system=text)
    assert unmarked.usage.cache_read_input_tokens == 0
    assert unmarked.usage.cache_creation_input_tokens == 0


def test_prewarming_writes_and_generates_nothing(client: Anthropic) -> None:
    text = handbook(60)
    warm = ask(client, stream=False, system=marked(text), max_tokens=0)
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    assert ask(client, stream=False, system=marked(text)).usage.cache_read_input_tokens


def test_a_growing_conversation_reads_what_it_wrote(client: Anthropic) -> None:
    """read(t) = read(t-1) + creation(t-1), with automatic caching (vector V130)."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": handbook(60)}]
    expected = 0
    for question in ("What is a lease?", "What is an entry?", "What is an epoch?"):
        messages.append({"role": "assistant", "content": "Noted."})
        messages.append({"role": "user", "content": question})
        usage = client.messages.create(
            model=MODEL, max_tokens=20, cache_control={"type": "ephemeral"}, messages=messages
        ).usage
        assert usage.cache_read_input_tokens == expected
        assert usage.cache_creation_input_tokens is not None
        expected += usage.cache_creation_input_tokens


def test_an_hour_is_billed_apart(client: Anthropic) -> None:
    usage = ask(client, stream=True, system=marked(handbook(60), ttl="1h")).usage
    assert usage.cache_creation is not None
    assert usage.cache_creation.ephemeral_1h_input_tokens == usage.cache_creation_input_tokens


def test_the_engine_refuses_calls_without_its_secret(stack: Stack) -> None:
    with stack.engine_client() as engine:
        assert engine.get("/v1/stats").status_code == 200
        wrong = {"authorization": f"Bearer {ENGINE_SECRET}x"}
        assert engine.get("/v1/stats", headers=wrong).status_code == 401
