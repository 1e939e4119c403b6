"""POST /v1/completions through the official SDK, over a scripted engine."""

from typing import Any

import pytest

from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import MODEL


def test_a_completion_is_a_raw_prompt(stack: Stack) -> None:
    client = stack.openai()
    answer = client.completions.create(model=MODEL, prompt=["Once upon"], stop=None)
    assert (answer.object, answer.choices[0].text) == ("text_completion", "Hello there")
    assert answer.usage and answer.usage.completion_tokens == 2
    request = stack.engine.requests[-1]
    assert (request.prompt.text, request.prompt.messages) == ("Once upon", [])
    assert request.sampling.max_tokens == 16
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="Once upon", stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "Hello there"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage


@pytest.mark.parametrize("field", ["echo", "logprobs", "suffix", "best_of", "prompt"])
def test_what_a_completion_cannot_do_is_named(stack: Stack, field: str) -> None:
    values: dict[str, Any] = {"echo": True, "logprobs": 1, "suffix": "x", "best_of": 2}
    body = {"model": MODEL, "prompt": "x", field: values.get(field, [[1, 2]])}
    with stack.http() as http:
        reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
