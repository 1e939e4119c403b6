"""The main job over real sockets: official SDK, real gateway, real engine, the demo model."""

from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import Message, Usage

from scripts.stack import Stack
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


@pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])
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
    assert text_of(first) == text_of(second) and "lease" in text_of(first)


def test_prewarming_writes_and_generates_nothing(client: Anthropic) -> None:
    text = handbook(60)
    warm = ask(client, stream=False, system=marked(text), max_tokens=0)
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    assert ask(client, stream=False, system=marked(text)).usage.cache_read_input_tokens
