"""What may differ on the wire without losing the cache, and what may not, through a real engine.

The numbers are those of the spec's test vectors. The engine is synthetic: a real pool with real
entries and leases.
"""

from typing import Any

import httpx
import pytest

from tests.e2e.prompts import handbook, marked
from tests.e2e.stack import API_KEY, Stack

MARK = {"type": "ephemeral"}
QUESTION = {"role": "user", "content": "What is a lease?"}


def post(stack: Stack, version: str = "2023-06-01", **changes: Any) -> httpx.Response:
    body = {"model": "synthetic", "max_tokens": 1, "messages": [QUESTION], **changes}
    headers = {"x-api-key": API_KEY, "anthropic-version": version}
    return httpx.post(f"{stack.gateway}/v1/messages", json=body, headers=headers, timeout=60)


def counts(stack: Stack, **changes: Any) -> tuple[int, int]:
    """What was read, and what was written."""
    reply = post(stack, **changes)
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    return usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]


def test_the_order_of_the_bodys_keys_does_not_matter_v16(synthetic: Stack) -> None:
    body = {
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "system": marked(handbook(100)),
        "messages": [QUESTION],
    }
    _, written = counts(synthetic, **body)
    assert written > 1000
    assert counts(synthetic, **dict(reversed(body.items()))) == (written, 0)


def test_null_is_no_marker_v17(synthetic: Stack) -> None:
    blocks = [{"type": "text", "text": handbook(100), "cache_control": None}]
    messages = [{"role": "user", "content": [{**blocks[0], "text": "x"}]}]
    for _ in range(2):
        assert counts(synthetic, system=blocks, messages=messages, cache_control=None) == (0, 0)


def test_five_minutes_is_the_default_v18(synthetic: Stack) -> None:
    text = handbook(100)
    _, written = counts(synthetic, system=[{"type": "text", "text": text, "cache_control": MARK}])
    assert counts(synthetic, system=marked(text, "5m")) == (written, 0)


def test_a_string_is_one_block_v19(synthetic: Stack) -> None:
    text = handbook(100)
    _, written = counts(synthetic, system=text, cache_control=MARK)
    blocks = [{"type": "text", "text": text}]
    assert counts(synthetic, system=blocks, cache_control=MARK) == (written, 0)


def test_the_order_of_keys_in_a_calls_input_matters_v28(synthetic: Stack) -> None:
    def talk(call: dict[str, Any]) -> list[dict[str, Any]]:
        used = {"type": "tool_use", "id": "t1", "name": "look", "input": call}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": handbook_}
        return [
            QUESTION,
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [{**result, "cache_control": MARK}]},
        ]

    handbook_, tools = handbook(100), [{"name": "look", "input_schema": {"type": "object"}}]
    system = marked(handbook(100))
    _, written = counts(synthetic, system=system, tools=tools, messages=talk({"a": 1, "b": 2}))
    read, again = counts(synthetic, system=system, tools=tools, messages=talk({"b": 2, "a": 1}))
    assert 0 < read < written and read + again == written
    assert counts(synthetic, system=system, tools=tools, messages=talk({"a": 1, "b": 2}))[1] == 0


@pytest.mark.parametrize(("place", "status"), [(0, 400), (1, 200)])
def test_a_nested_marker_counts_on_the_last_block_only_v54(
    synthetic: Stack, place: int, status: int
) -> None:
    nested: list[dict[str, Any]] = [
        {"type": "text", "text": handbook(60)},
        {"type": "text", "text": handbook(60)},
    ]
    nested[place]["cache_control"] = MARK
    used = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    reply = post(
        synthetic,
        tools=[{"name": "look", "input_schema": {"type": "object"}}],
        messages=[
            QUESTION,
            {"role": "assistant", "content": [used]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": nested}],
            },
        ],
    )
    assert reply.status_code == status
    if status == 200:
        assert reply.json()["usage"]["cache_creation_input_tokens"] > 1000
        (report,) = reply.json()["holdfast"]["breakpoints"]
        assert report["path"] == "messages.2.content.0"
    else:
        path = "messages.2.content.0.tool_result.content.0.cache_control"
        assert reply.json()["error"]["message"].startswith(path)


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


def test_adaptive_thinking_is_taken_as_if_it_can(synthetic: Stack) -> None:
    """The synthetic engine cannot think, and says so; `enabled` is refused by name."""
    assert post(synthetic, thinking={"type": "adaptive"}).status_code == 200
    enabled = {"type": "enabled", "budget_tokens": 1024}
    refused = post(synthetic, thinking=enabled, max_tokens=2000)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("thinking: ")


def test_text_documents_are_read_and_images_refused_by_name(synthetic: Stack) -> None:
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": handbook(100)},
        "cache_control": MARK,
    }
    said = [{"role": "user", "content": [document, {"type": "text", "text": "So?"}]}]
    _, written = counts(synthetic, messages=said)
    assert counts(synthetic, messages=said) == (written, 0)
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    refused = post(synthetic, messages=[{"role": "user", "content": [image]}])
    assert refused.status_code == 400
    assert "'image'" in refused.json()["error"]["message"]
