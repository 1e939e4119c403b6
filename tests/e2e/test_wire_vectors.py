"""What may differ on the wire without losing the cache, and what may not, through a real engine.

The numbers are those of the spec's test vectors; the others are in `tests/vectors`. The engine is
synthetic: a real pool with real entries and leases.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from scripts.stack import API_KEY, Stack, running_stack
from tests.e2e.prompts import handbook

MARK = {"type": "ephemeral"}
QUESTION = {"role": "user", "content": "What is a lease?"}


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("wire"), backend="synthetic") as running:
        yield running


def post(stack: Stack, version: str = "2023-06-01", **changes: Any) -> httpx.Response:
    body = {"model": "synthetic", "max_tokens": 1, "messages": [QUESTION], **changes}
    headers = {"x-api-key": API_KEY, "anthropic-version": version}
    return httpx.post(f"{stack.gateway}/v1/messages", json=body, headers=headers, timeout=120)


def counts(stack: Stack, **changes: Any) -> tuple[int, int]:
    """What was read, and what was written."""
    reply = post(stack, **changes)
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    return usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]


def test_the_newer_version_refuses_sampling_parameters_v128(synthetic: Stack) -> None:
    assert post(synthetic, temperature=1).status_code == 200
    refused = post(synthetic, "2026-10-21", temperature=1)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("temperature: ")
    assert post(synthetic, "2026-10-21").status_code == 200


def test_an_answer_goes_back_verbatim_and_reads_what_was_asked_v129(synthetic: Stack) -> None:
    messages: list[Any] = [{"role": "user", "content": handbook(100)}]
    first = post(synthetic, messages=messages, cache_control=MARK, max_tokens=8).json()
    messages += [{"role": "assistant", "content": first["content"]}, QUESTION]
    read, _ = counts(synthetic, messages=messages, cache_control=MARK)
    assert read == first["usage"]["cache_creation_input_tokens"] > 1000


def test_thinking_is_taken_and_told_as_ignored_by_an_engine_that_cannot(synthetic: Stack) -> None:
    enabled = {"type": "enabled", "budget_tokens": 1024}
    stop = {"stop_sequences": ["synthetic"]}  # its first word: 2,000 of them take 40 s
    for thinking in ({"type": "adaptive"}, enabled):
        reply = post(synthetic, thinking=thinking, max_tokens=2000, **stop)
        assert reply.status_code == 200, reply.text
        ignored = reply.json()["holdfast"]["ignored"]
        assert ignored[-1]["path"] == "thinking"


def test_text_documents_are_read_and_images_have_placeholders(synthetic: Stack) -> None:
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": handbook(100)},
        "cache_control": MARK,
    }
    said = [{"role": "user", "content": [document, {"type": "text", "text": "So?"}]}]
    _, written = counts(synthetic, messages=said)
    assert counts(synthetic, messages=said) == (written, 0)
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    answer = post(synthetic, messages=[{"role": "user", "content": [image]}])
    assert answer.status_code == 200
    ignored = answer.json()["holdfast"]["ignored"]
    assert [one["path"] for one in ignored] == ["messages.0.content.0"]
