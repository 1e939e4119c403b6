"""Conversations of which each turn comes through another API: what one wrote another reads.

Rows of batches are among them. The engine is synthetic: a real pool with real entries and leases.
The Messages API marks by its own automatic caching, the others mark nothing and get the key's
policy.
"""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from scripts.stack import API_HEADERS, Stack, running_stack
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

# MIXED_TURNS raises it.
NUM_TURNS = int(os.environ.get("MIXED_TURNS", "60"))
MODEL = "synthetic"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"where": {"type": "string"}}}
LOOK = {"name": "look", "description": "Looks."}
Talk = list[tuple[str, str]]


class Told(NamedTuple):
    """One answer.

    `cached` and `written` are as the API tells them. `read` are the tokens that it read from an
    entry, `entry` those of the longest entry that it left. `tells_reads`: `cached` are reads alone.
    """

    turn_id: str
    text: str
    prompt: int
    cached: int
    written: int | None
    output: int
    read: int
    entry: int
    tells_reads: bool


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"ENGINE_SYNTHETIC_PREFILL_US": "0.1", "ENGINE_SYNTHETIC_DECODE_MS": "0.1"}
    data: Path = tmp_path_factory.mktemp("mixed")
    with running_stack(data, backend="synthetic", engine_settings=settings) as running:
        yield running


def message_of(system: str, talk: Talk) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 5,
        "system": system,
        "tools": [{**LOOK, "input_schema": SCHEMA}],
        "messages": said(talk),
        "cache_control": {"type": "ephemeral"},
    }


def said(talk: Talk) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in talk]


def by_messages(http: httpx.Client, system: str, talk: Talk) -> Told:
    return told_of_message(posted(http, "/v1/messages", **message_of(system, talk)))


def told_of_message(answer: dict[str, Any]) -> Told:
    usage = answer["usage"]
    read_tokens = usage["cache_read_input_tokens"]
    written_tokens = usage["cache_creation_input_tokens"]
    prompt = usage["input_tokens"] + read_tokens + written_tokens
    text = answer["content"][0]["text"]
    output = usage["output_tokens"]
    return Told(
        answer["id"],
        text,
        prompt,
        read_tokens,
        written_tokens,
        output,
        read_tokens,
        entry_of(answer),
        True,
    )


def by_chat(http: httpx.Client, system: str, talk: Talk) -> Told:
    tools = [{"type": "function", "function": {**LOOK, "parameters": SCHEMA}}]
    messages = said([("system", system), *talk])
    path = "/v1/chat/completions"
    answer = posted(http, path, max_tokens=5, tools=tools, messages=messages)
    text = answer["choices"][0]["message"]["content"]
    return told_of_openai(answer, "chatcmpl-", text, ("prompt", "completion"))


def by_responses(http: httpx.Client, system: str, talk: Talk) -> Told:
    tools = [{"type": "function", **LOOK, "parameters": SCHEMA}]
    body = {"max_output_tokens": 5, "instructions": system, "tools": tools, "input": said(talk)}
    answer = posted(http, "/v1/responses", **body)
    text = answer["output"][0]["content"][0]["text"]
    return told_of_openai(answer, "resp_", text, ("input", "output"))


def told_of_openai(answer: dict[str, Any], prefix: str, text: str, names: tuple[str, str]) -> Told:
    """`names`: what the API calls its two kinds of tokens."""
    usage = answer["usage"]
    prompt, output = (usage[f"{name}_tokens"] for name in names)
    details = usage[f"{names[0]}_tokens_details"]
    cached = details["cached_tokens"]
    written_tokens = details["cache_write_tokens"]
    read_tokens = cached - answer["holdfast"]["automatic_tokens"]
    turn_id = f"msg_{answer['id'].removeprefix(prefix)}"
    return Told(
        turn_id, text, prompt, cached, written_tokens, output, read_tokens, entry_of(answer), False
    )


def by_generate_content(http: httpx.Client, system: str, talk: Talk) -> Told:
    """Google's usage tells what was read from entries, and nothing of writes."""
    function = {**LOOK, "parametersJsonSchema": SCHEMA}
    roles = {"user": "user", "assistant": "model"}
    answer = posted(
        http,
        f"/v1beta/models/{MODEL}:generateContent",
        model=None,
        systemInstruction={"parts": [{"text": system}]},
        tools=[{"functionDeclarations": [function]}],
        contents=[{"role": roles[role], "parts": [{"text": text}]} for role, text in talk],
        generationConfig={"maxOutputTokens": 5},
    )
    usage = answer["usageMetadata"]
    read_tokens = usage.get("cachedContentTokenCount", 0)
    text = answer["candidates"][0]["content"]["parts"][0]["text"]
    prompt = usage["promptTokenCount"]
    output = usage["candidatesTokenCount"]
    turn_id = answer["responseId"]
    return Told(
        turn_id, text, prompt, read_tokens, None, output, read_tokens, entry_of(answer), True
    )


def by_batch(http: httpx.Client, system: str, talk: Talk) -> Told:
    """A batch of one row. The row is a request of the Messages API."""
    rows = [{"custom_id": "row", "params": message_of(system, talk)}]
    reply = http.post("/v1/messages/batches", json={"requests": rows})
    assert reply.status_code == 200, reply.text
    path = f"/v1/messages/batches/{reply.json()['id']}"
    eventually(lambda: http.get(path).json()["processing_status"] == "ended", 300)
    result = http.get(f"{path}/results").json()["result"]
    assert result["type"] == "succeeded", result
    return told_of_message(result["message"])


def entry_of(answer: dict[str, Any]) -> int:
    points = answer["holdfast"]["breakpoints"]
    return max((point["tokens"] for point in points if point["state"] != "none"), default=0)


def posted(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    reply = http.post(path, json={"model": MODEL, **body})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


APIS: tuple[Callable[[httpx.Client, str, Talk], Told], ...] = (
    by_messages,
    by_chat,
    by_responses,
    by_generate_content,
    by_batch,
)


def test_what_one_api_wrote_another_reads_and_the_ledger_has_it_to_the_token(fast: Stack) -> None:
    seed = random.Random(17)
    answers: list[Told] = []
    with httpx.Client(base_url=fast.gateway, headers=API_HEADERS, timeout=300) as http:
        while len(answers) < NUM_TURNS:
            system = f"{seed.random()} " + "Rules of the house. " * seed.choice([30, 300, 500])
            talk: Talk = []
            before: Told | None = None
            for _ in range(seed.randint(2, 6)):
                talk.append(("user", "word " * seed.choice([1, 40, 300])))
                answer = seed.choice(APIS)(http, system, talk)
                if before is not None:
                    assert answer.read == before.entry, (before, answer)
                talk.append(("assistant", answer.text))
                answers.append(answer)
                before = answer
    assert sum(answer.read > 0 for answer in answers) > NUM_TURNS // 4
    for answer in answers:
        row = Admin(fast.gateway).recorded(answer.turn_id)
        written_tokens = row["cache_write_5m_tokens"] + row["cache_write_1h_tokens"]
        read_tokens = row["cache_read_tokens"]
        assert row["input_tokens"] + read_tokens + written_tokens == answer.prompt
        assert row["output_tokens"] == answer.output
        if answer.tells_reads:
            assert read_tokens == answer.cached
            assert written_tokens == (written_tokens if answer.written is None else answer.written)
        else:
            assert read_tokens + row["automatic_tokens"] == answer.cached
            assert max(0, written_tokens - row["automatic_tokens"]) == answer.written
