"""Streamed and unstreamed answers say the same of the same prompt, over random conversations.

The engine is synthetic: a real pool with real entries and leases, at once. Each conversation has a
twin of equal length and other words, so that one can be asked streamed and the other not, both cold
and then both again with what the first round left in memory.
"""

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from scripts.stack import API_KEY, Stack, running_stack

# USAGE_PAIRS raises it (scripts/long_tests pairs).
NUM_PAIRS = int(os.environ.get("USAGE_PAIRS", "15"))
MODEL = "synthetic"
WORDS = ("lease", "block", "entry", "prefix", "é", "🦉", "token\n", "scope")


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"ENGINE_SYNTHETIC_PREFILL_US": "0.1", "ENGINE_SYNTHETIC_DECODE_MS": "0.1"}
    data = tmp_path_factory.mktemp("pairs")
    with running_stack(data, backend="synthetic", engine_settings=settings) as running:
        yield running


class Conversation:
    """`tag` stands at the beginning of every text and is what twins differ in."""

    def __init__(self, seed: random.Random) -> None:
        self.max_tokens = seed.randint(1, 6)
        self.is_long = seed.random() < 0.5
        self.automatic = seed.random() < 0.3
        num_texts = seed.choice([1, 3, 5])
        sizes = [seed.choice([3, 30, 900]) for _ in range(num_texts + 1)]
        self._texts = [" ".join(seed.choices(WORDS, k=size)) for size in sizes]
        marked = seed.sample(range(len(sizes)), k=min(len(sizes), seed.randint(0, 3)))
        self._marked = set(marked)

    def parts(self, tag: str) -> list[list[dict[str, Any]]]:
        """The system prompt's text, then each message's, with the markers."""
        ttl = "1h" if self.is_long else "5m"
        marker = {"cache_control": {"type": "ephemeral", "ttl": ttl}}
        return [
            [
                {
                    "type": "text",
                    "text": f"{tag} {text}",
                    **(marker if index in self._marked else {}),
                }
            ]
            for index, text in enumerate(self._texts)
        ]


def messages(parts: list[list[dict[str, Any]]]) -> list[Any]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(parts)]


def anthropic_usage(
    client: Anthropic, conversation: Conversation, tag: str, *, stream: bool
) -> dict[str, Any]:
    system, *rest = conversation.parts(tag)
    asked: Any = {
        "model": MODEL,
        "max_tokens": conversation.max_tokens,
        "system": system,
        "messages": messages(rest),
    }
    if conversation.automatic and conversation.is_long:
        asked["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    if stream:
        with client.messages.stream(**asked) as events:
            message: Any = events.get_final_message()
    else:
        message = client.messages.create(**asked)
    usage = message.usage
    parts = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    del asked["max_tokens"]
    assert usage.input_tokens + parts == client.messages.count_tokens(**asked).input_tokens
    return {"usage": usage.model_dump(), "holdfast": comparable(message.holdfast)}


def openai_usage(
    client: OpenAI, conversation: Conversation, tag: str, *, stream: bool
) -> dict[str, Any]:
    system, *rest = conversation.parts(tag)
    asked: Any = {
        "model": MODEL,
        "max_tokens": conversation.max_tokens,
        "messages": [{"role": "system", "content": system}, *messages(rest)],
    }
    if stream:
        chunks = list(
            client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        )
        usage, extension = chunks[-1].usage, chunks[0].model_extra["holdfast"]
    else:
        whole = client.chat.completions.create(**asked)
        usage, extension = whole.usage, whole.model_extra["holdfast"]
    return {"usage": usage.model_dump(), "holdfast": comparable(extension)}


def comparable(extension: dict[str, Any]) -> dict[str, Any]:
    """Without the time that is left, which passes."""
    points = [{**p, "expires_in_seconds": None} for p in extension["breakpoints"]]
    return {**extension, "breakpoints": points}


def test_streamed_usage_equals_unstreamed_usage(fast: Stack) -> None:
    seed = random.Random(26)
    reads = writes = 0
    with (
        Anthropic(base_url=fast.gateway, api_key=API_KEY, timeout=120, max_retries=0) as ours,
        OpenAI(
            base_url=f"{fast.gateway}/v1", api_key=API_KEY, timeout=120, max_retries=0
        ) as theirs,
    ):
        for number in range(NUM_PAIRS // 2):
            conversation = Conversation(seed)
            for _ in ("cold", "again"):
                pair = []
                for side, stream in (("a", False), ("b", True)):
                    tag = f"{number:06}{side}"
                    if number % 2:
                        pair.append(anthropic_usage(ours, conversation, tag, stream=stream))
                    else:
                        pair.append(openai_usage(theirs, conversation, tag, stream=stream))
                assert pair[0] == pair[1]
                usage = pair[0]["usage"]
                if number % 2:
                    reads += usage["cache_read_input_tokens"] > 0
                    writes += usage["cache_creation_input_tokens"] > 0
    assert reads > NUM_PAIRS // 20 and writes > NUM_PAIRS // 20
