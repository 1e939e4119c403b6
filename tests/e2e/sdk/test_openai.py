"""The OpenAI dialect over real sockets: official SDK, real gateway, real engine, the demo model."""

from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from openai.types import CompletionUsage

from scripts.bench.load import marked
from scripts.stack import API_KEY, Stack
from tests.e2e.prompts import MODEL, handbook

QUESTION: Any = {"role": "user", "content": "What is a lease?"}


def chat(client: OpenAI, *messages: Any, **body: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 40, "temperature": 0, **body}
    return client.chat.completions.create(messages=[*messages, QUESTION], **body)


def cached(usage: CompletionUsage) -> tuple[int, int]:
    details = usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None and details.cache_write_tokens is not None
    assert details.cached_tokens + details.cache_write_tokens <= usage.prompt_tokens
    return details.cached_tokens, details.cache_write_tokens


def test_marked_parts_are_written_once_and_then_read(openai: OpenAI, client: Anthropic) -> None:
    """To the token what the other dialect says of the same prompt."""
    text = handbook(150)
    first = chat(openai, {"role": "system", "content": marked(text)})
    second = chat(openai, {"role": "system", "content": marked(text)})
    message = client.messages.create(
        model=MODEL, max_tokens=40, system=marked(text), messages=[QUESTION]
    )
    read_tokens = message.usage.cache_read_input_tokens
    assert read_tokens is not None and read_tokens > 3000
    assert cached(first.usage) == (0, read_tokens)
    automatic = second.model_extra["holdfast"]["automatic_tokens"]
    assert automatic < 100, "only the question, which nobody marked"
    assert cached(second.usage) == (read_tokens + automatic, 0)
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.usage.prompt_tokens == message.usage.input_tokens + read_tokens
    assert second.choices[0].message.content == first.choices[0].message.content
    assert "lease" in second.choices[0].message.content
    [report] = second.model_extra["holdfast"]["breakpoints"]
    assert report["state"] == "leased"


def test_marking_what_is_in_memory_writes_without_computing(openai: OpenAI) -> None:
    text = handbook(60)
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    chat(openai, {"role": "system", "content": text}, extra_body=explicit)
    answer = chat(openai, {"role": "system", "content": marked(text)})
    reused, written_tokens = cached(answer.usage)
    extension = answer.model_extra["holdfast"]
    assert reused == extension["automatic_tokens"] > 0
    assert written_tokens == extension["written_tokens"] - min(reused, extension["written_tokens"])


def test_a_stream_says_what_the_whole_answer_says(openai: OpenAI) -> None:
    system = {"role": "system", "content": handbook(60), "cache_control": {"type": "ephemeral"}}
    chat(openai, system)
    whole = chat(openai, system)
    chunks = list(chat(openai, system, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    assert cached(whole.usage)[0] > 1000
    assert all(chunk.usage is None for chunk in chunks[:-1])
    texts = [c.choices[0].delta.content or "" for c in chunks[:-1]]
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_a_completion_continues_the_text_itself(openai: OpenAI) -> None:
    """The template's own text as a raw prompt is the same prompt: same count, same answer."""
    raw = "<|im_start|>user\nWhat is a lease?<|im_end|>\n<|im_start|>assistant\n"
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "temperature": 0}
    answer = openai.completions.create(prompt=raw, **body)
    assert "lease" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"
    long = handbook(60)
    first, second = (openai.completions.create(prompt=long, n=2, **body) for _ in range(2))
    assert first.usage is not None and second.usage is not None
    assert cached(first.usage) == (0, 0)
    assert cached(second.usage)[0] > 1000
    assert [choice.index for choice in second.choices] == [0, 1]


# What the benchmark clients of vLLM, SGLang, GuideLLM and GenAI-Perf send.
ONCE = "Once upon a time"
HELLO = [{"role": "user", "content": "Hello"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
OLD = {"max_tokens": 30}
NEW = {"max_completion_tokens": 30}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}, "ignore_eos": True}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
BENCHMARKS: dict[str, dict[str, Any]] = {
    "vllm-completions": {"prompt": ONCE, "repetition_penalty": 1.0, "logprobs": None, **OLD},
    "vllm-chat": {"messages": PARTS, **NEW},
    "sglang-completions": {"prompt": ONCE, "temperature": 0.0, "best_of": 1, **OLD},
    "guidellm-chat": {"messages": HELLO, "stop": None, "stream_options": CONTINUOUS, **OLD, **NEW},
    "genai-perf-chat": {"messages": HELLO, "min_tokens": 30, "n": 1, **NEW},
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_clients_get_the_length_they_ask_for(stack: Stack, name: str) -> None:
    """The bodies as these clients send them, but for the prompt."""
    body = {"model": MODEL, "stream": True, **USAGE, **BENCHMARKS[name]}
    path = "completions" if "prompt" in body else "chat/completions"
    headers = {"authorization": f"Bearer {API_KEY}"}
    reply = httpx.post(f"{stack.gateway}/v1/{path}", json=body, headers=headers, timeout=120)
    lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert '"completion_tokens":30' in lines[-2]
