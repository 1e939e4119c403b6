"""Damaged bodies on real sockets, with valid requests in between that are answered right.

The gateway is a process of its own here, so that its memory can be told from the test's. It keeps
its connections: a damaged body must not cost the next request on the same one. DAMAGED_PATH=PATH
takes bodies of one path only. `scripts/long_tests faults` sends 10,000 from each of five seeds.
"""

import http.client
import json
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from scripts.stack import serving_gateway
from tests.faults.sizes import number
from tests.gateway.bodies import conversation
from tests.gateway.damage import mutant
from tests.gateway.responses_bodies import EVERYTHING
from tests.gateway.scripted_engine import ScriptedEngine, say
from tests.gateway.serving import API_KEY, eventually, serve

NUM_MUTANTS = number(2_500, 10_000)
NUM_WARM_UP = 500
VALID_EVERY = 25
MAX_GROWTH_BYTES = 50 * 2**20
EPHEMERAL = {"type": "ephemeral"}
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    "cache_control": EPHEMERAL,
}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": [1]}'}}


GEMINI: dict[str, Any] = {
    "systemInstruction": {"parts": [{"text": "Rules. " * 30}]},
    "contents": [
        {"role": "user", "parts": [{"text": "a"}]},
        {
            "role": "model",
            "parts": [
                {"text": "hm", "thought": True},
                {"functionCall": {"id": "c1", "name": "look", "args": {"a": [1]}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"id": "c1", "name": "look", "response": {"output": "x"}}},
                {"inlineData": {"mimeType": "text/plain", "data": "aGVsbG8="}},
                {"inline_data": {"mime_type": "image/png", "data": "iVBORw0KGgo="}},
            ],
        },
    ],
    "tools": [
        {"googleSearch": {}},
        {
            "functionDeclarations": [
                {
                    "name": "look",
                    "parameters": {
                        "type": "OBJECT",
                        "properties": {"a": {"type": "ARRAY", "items": {"type": "INTEGER"}}},
                        "propertyOrdering": ["a"],
                        "nullable": True,
                    },
                }
            ]
        },
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {
        "maxOutputTokens": 5,
        "temperature": 0.5,
        "stopSequences": ["x"],
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}},
        "thinkingConfig": {"thinkingBudget": -1},
    },
    "safetySettings": [{"category": "C", "threshold": "T"}],
}


INTERACTION: dict[str, Any] = {
    "model": "holdfast-demo",
    "system_instruction": "Rules. " * 30,
    "input": [
        {"type": "user_input", "content": [{"type": "text", "text": "a"}]},
        {"type": "thought", "summary": [{"type": "text", "text": "hm"}], "signature": "aGk="},
        {"type": "model_output", "content": [{"type": "text", "text": "b"}]},
        {"type": "function_call", "id": "c1", "name": "look", "arguments": {"a": [1]}},
        {"type": "function_call", "id": "c2", "name": "look", "arguments": {}},
        {"type": "function_result", "call_id": "c1", "result": {"seen": [1]}},
        {
            "type": "function_result",
            "call_id": "c2",
            "name": "look",
            "is_error": True,
            "result": [{"type": "image", "mime_type": "image/png", "data": "iVBORw0KGgo="}],
        },
        {"type": "document", "mime_type": "text/csv", "data": "aGVsbG8="},
    ],
    "tools": [
        {"type": "function", "name": "look", "parameters": {"type": "OBJECT", "properties": {}}},
        {"type": "google_search"},
    ],
    "generation_config": {
        "max_output_tokens": 5,
        "stop_sequences": ["x"],
        "thinking_level": "low",
        "thinking_summaries": "auto",
        "tool_choice": {"allowed_tools": {"mode": "auto", "tools": ["look"]}},
    },
    "response_format": [{"type": "text", "mime_type": "application/json", "schema": {}}],
    "labels": {"name": "n"},
    "store": False,
}
CACHED: dict[str, Any] = {
    "model": "models/holdfast-demo",
    "systemInstruction": {"parts": [{"text": "Rules. " * 100}]},
    "contents": [{"role": "user", "parts": [{"text": "a"}]}],
    "displayName": "rules",
    "ttl": "300.5s",
}
BATCH: dict[str, Any] = {
    "requests": [
        {"custom_id": "first", "params": conversation()},
        {
            "custom_id": "second",
            "params": {
                "model": "holdfast-demo",
                "max_tokens": 5,
                "messages": [{"role": "user", "content": "a"}],
            },
        },
    ]
}


@dataclass(frozen=True)
class Endpoint:
    path: str
    body: dict[str, Any]
    is_openai: bool = False
    is_google: bool = False

    def check_error(self, status: int, headers: dict[str, str], raw: bytes) -> None:
        assert 400 <= status < 500, (self.path, status, raw)
        envelope = json.loads(raw)
        if self.is_google:
            assert set(envelope) == {"error"}
            assert envelope["error"]["code"] == status
            assert headers["x-request-id"].startswith("req_")
        elif self.is_openai:
            assert set(envelope) == {"error"}
            assert set(envelope["error"]) == {"message", "type", "param", "code", "request_id"}
            assert envelope["error"]["request_id"] == headers["x-request-id"]
        else:
            assert (envelope["type"], envelope["request_id"]) == ("error", headers["request-id"])
        assert 0 < len(envelope["error"]["message"]) < 2000

    def check_answer(self, raw: bytes) -> None:
        """Of the body as it was: what the engine said, and counts that add up."""
        answer = json.loads(raw)
        match self.path.removeprefix("/v1/").removeprefix("/v1beta/"):
            case "messages/count_tokens":
                assert answer["input_tokens"] > 100
            case "messages":
                assert answer["content"][0]["text"] == "Hello there"
                assert answer["usage"]["output_tokens"] == 2
            case "models/holdfast-demo:generateContent":
                [candidate] = answer["candidates"]
                assert candidate["content"]["parts"][0]["text"] == "Hello there"
                usage = answer["usageMetadata"]
                assert usage["totalTokenCount"] == usage["promptTokenCount"] + 2
            case "interactions":
                assert answer["steps"][0]["content"][0]["text"] == "Hello there"
                usage = answer["usage"]
                assert usage["total_tokens"] == usage["total_input_tokens"] + 2
            case "cachedContents":
                assert answer["name"].startswith("cachedContents/")
                assert answer["usageMetadata"]["totalTokenCount"] > 100
            case "messages/batches":
                assert answer["request_counts"]["processing"] == len(BATCH["requests"])
            case "responses":
                [item] = answer["output"]
                assert item["content"][0]["text"] == "Hello there"
                usage = answer["usage"]
                assert usage["total_tokens"] == usage["input_tokens"] + 2
            case name:
                [choice] = answer["choices"]
                text = choice["text"] if name == "completions" else choice["message"]["content"]
                assert text == "Hello there"
                usage = answer["usage"]
                assert usage["total_tokens"] == usage["prompt_tokens"] + 2


def endpoints() -> list[Endpoint]:
    counted = conversation()
    del counted["max_tokens"]
    chat = {
        "model": "holdfast-demo",
        "max_tokens": 5,
        "messages": [
            {"role": "system", "content": "Rules. " * 30, "cache_control": EPHEMERAL},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}],
                "cache_control": EPHEMERAL,
            },
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
            {"role": "user", "content": "Go on."},
        ],
        "tools": [LOOK],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "stop": ["x"],
        "seed": 7,
        "top_p": 0.5,
    }
    text = {"model": "holdfast-demo", "prompt": "Once upon a time", "max_tokens": 5, "stop": "x"}
    return [
        Endpoint("/v1/messages", conversation()),
        Endpoint("/v1/messages/count_tokens", counted),
        Endpoint("/v1/chat/completions", chat, is_openai=True),
        Endpoint("/v1/completions", text, is_openai=True),
        Endpoint("/v1/responses", EVERYTHING, is_openai=True),
        Endpoint("/v1/models/holdfast-demo:generateContent", GEMINI, is_google=True),
        Endpoint("/v1beta/interactions", INTERACTION, is_google=True),
        Endpoint("/v1beta/cachedContents", CACHED, is_google=True),
        Endpoint("/v1/messages/batches", BATCH),
    ]


class Caller:
    """One connection that is kept; a new one where the server closed it, which is counted."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        self.num_closed = 0

    def close(self) -> None:
        self._connection.close()

    def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        return self._ask("GET", path, b"")

    def post(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {
            "x-api-key": API_KEY,
            "anthropic-version": "2023-06-01",
            "content-type": "application/json",
        }
        self._connection.request(method, path, body, headers)
        reply = self._connection.getresponse()
        self.num_closed += reply.will_close
        by_name = {name.lower(): value for name, value in reply.getheaders()}
        return reply.status, by_name, reply.read()


def check_rows(caller: Caller) -> None:
    """Rows of damaged batches that were taken all the same: none of them is an error of ours."""

    def ended() -> list[str]:
        batch_ids: list[str] = []
        query = "limit=1000"
        while True:
            page = json.loads(caller.get(f"/v1/messages/batches?{query}")[2])
            batch_ids += [b["id"] for b in page["data"] if b["processing_status"] == "ended"]
            if not page["has_more"]:
                return batch_ids
            query = f"limit=1000&after_id={page['last_id']}"

    eventually(lambda: len(ended()) > 20, 120)
    for batch_id in ended():
        _, _, raw = caller.get(f"/v1/messages/batches/{batch_id}/results")
        for line in raw.splitlines():
            result = json.loads(line)["result"]
            kind = result["error"]["error"]["type"] if result["type"] == "errored" else "none"
            assert kind not in ("api_error", "overloaded_error"), line


@contextmanager
def serving(data: Path) -> Iterator[tuple[str, psutil.Process, Path]]:
    log = data / "gateway.log"
    engine = ScriptedEngine(script=say("Hello", " there"))
    # Thousands of calls a minute: their rate is not what is tested.
    many = dict.fromkeys(("count_requests_per_minute", "batches", "cached_contents"), 1_000_000)
    tuning = json.dumps({**many, "count_bytes_per_minute": 1 << 40})
    rates = {"HOLDFAST_TUNING": tuning, "HOLDFAST_BATCH_CONCURRENCY": "64"}
    with (
        serve(engine) as engine_url,
        serving_gateway(data, [engine_url], rates, log) as gateway,
    ):
        yield gateway.wait().url, psutil.Process(gateway.pid), log


@pytest.mark.parametrize("number_of_seed", range(2, 2 + number(1, 5)))
def test_damaged_bodies_are_never_5xx_and_valid_requests_between_them_are_answered(
    tmp_path: Path, number_of_seed: int
) -> None:
    seed = random.Random(number_of_seed)
    chosen = [e for e in endpoints() if os.environ.get("DAMAGED_PATH", e.path) == e.path]
    num_refused = num_served = 0
    with ExitStack() as stack:
        url, process, log = stack.enter_context(serving(tmp_path))
        caller = stack.enter_context(closing(Caller(url)))
        baseline = 0
        for place in range(NUM_MUTANTS):
            endpoint = chosen[place % len(chosen)]
            valid = json.dumps(endpoint.body).encode()
            status, headers, raw = caller.post(endpoint.path, mutant(seed, valid))
            if status == 200:
                num_served += 1
            else:
                endpoint.check_error(status, headers, raw)
                num_refused += 1
            if place % VALID_EVERY == 0:
                neighbour = chosen[place // VALID_EVERY % len(chosen)]
                status, _, raw = caller.post(neighbour.path, json.dumps(neighbour.body).encode())
                assert status == 200, raw
                neighbour.check_answer(raw)
            if place == NUM_WARM_UP:
                baseline = process.memory_info().rss
        growth = process.memory_info().rss - baseline
        assert growth < MAX_GROWTH_BYTES
        if any(endpoint.path == "/v1/messages/batches" for endpoint in chosen):
            check_rows(caller)
        assert caller.num_closed == 0, "a refused body ended its connection"
        assert "unhandled" not in log.read_text()
    assert num_refused > NUM_MUTANTS // 2
    assert num_served > NUM_MUTANTS // 100
    print(f"{num_refused} refused, {num_served} served; memory grew by {growth / 2**20:.1f} MiB")
