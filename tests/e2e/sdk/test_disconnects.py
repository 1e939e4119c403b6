"""Clients that go away, and bodies that are broken, beside requests that are served."""

import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from anthropic import Anthropic

from scripts.stack import API_KEY, Stack
from tests.e2e.prompts import MODEL, handbook, marked

TRIES = 5
DEADLINE_SECONDS = 120
HEADERS = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}

# A client of its own process, so that killing it closes the socket as the kernel does.
CLIENT = """
import sys, httpx
url, body, key = sys.argv[1:]
headers = {"x-api-key": key, "anthropic-version": "2023-06-01", "content-type": "application/json"}
with httpx.stream("POST", url, content=body, headers=headers, timeout=120) as response:
    for line in response.iter_lines():
        print(line, flush=True)
"""


def start_client(stack: Stack, body: dict[str, Any]) -> "subprocess.Popen[bytes]":
    arguments = [f"{stack.gateway}/v1/messages", json.dumps(body), API_KEY]
    return subprocess.Popen([sys.executable, "-c", CLIENT, *arguments], stdout=subprocess.PIPE)


def active_blocks(engine: httpx.Client) -> tuple[int, int]:
    stats = engine.get("/v1/stats").json()
    return stats["running"] + stats["waiting"], stats["blocks"]["active"]


def num_generated(engine: httpx.Client) -> int:
    count: int = engine.get("/v1/stats").json()["counters"]["output_tokens"]
    return count


def seconds_until_idle(engine: httpx.Client) -> float:
    started = time.monotonic()
    while active_blocks(engine) != (0, 0):
        assert time.monotonic() - started < DEADLINE_SECONDS, "the engine never became idle"
        time.sleep(0.005)
    return time.monotonic() - started


def kill_in_its_midst(stack: Stack, engine: httpx.Client) -> float:
    """A client of a stream that would last 80 s; how long its blocks were held afterwards."""
    body = {
        "model": "synthetic",
        "max_tokens": 4000,
        "stream": True,
        "messages": [{"role": "user", "content": "What is a lease?"}],
    }
    with start_client(stack, body) as client:
        assert client.stdout is not None
        while b"content_block_delta" not in client.stdout.readline():
            pass
        client.kill()
        return seconds_until_idle(engine)


def test_a_killed_client_frees_its_blocks(synthetic: Stack) -> None:
    with synthetic.engine_client() as engine:
        seconds_until_idle(engine)
        before = num_generated(engine)
        kill_in_its_midst(synthetic, engine)
        assert num_generated(engine) - before < 4000, "it was stopped, and did not end by itself"


def test_a_client_killed_during_prefill_frees_its_blocks_and_writes_nothing(stack: Stack) -> None:
    """On a slow machine it may be killed too late, when the prefill is over; hardly always."""
    with stack.engine_client() as engine:
        seconds_until_idle(engine)
        for _ in range(TRIES):
            body: dict[str, Any] = {
                "model": MODEL,
                "max_tokens": 10,
                "system": marked(handbook(300)),
                "messages": [{"role": "user", "content": "What is a lease?"}],
            }
            with start_client(stack, body) as client:
                while client.poll() is None and active_blocks(engine)[1] == 0:
                    time.sleep(0.002)
                client.kill()
                seconds_until_idle(engine)
            url = f"{stack.gateway}/v1/messages"
            answer = httpx.post(url, json=body, headers=HEADERS, timeout=120).json()
            if answer["usage"]["cache_read_input_tokens"] == 0:
                break
    assert answer["usage"]["cache_read_input_tokens"] == 0
    assert answer["usage"]["cache_creation_input_tokens"] > 1000


BAD_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "not_json": b"{",
    "not_utf8": b'{"model": "\xff\xfe"}',
    "a_list": b"[]",
    "deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "wrong_types": json.dumps({"model": 1, "max_tokens": "x", "messages": {}}).encode(),
    "no_messages": json.dumps({"model": MODEL, "max_tokens": 1, "messages": []}).encode(),
    "unknown_key": json.dumps(
        {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "n": 1}
    ).encode(),
    "lone_surrogate": b'{"model": "\\ud800", "max_tokens": 1, "messages": []}',
    "nan": b'{"model": "m", "max_tokens": NaN, "messages": []}',
    "too_long": json.dumps(
        {
            "model": MODEL,
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "word " * 40_000}],
        }
    ).encode(),
}


def test_bad_bodies_get_the_envelope_while_good_ones_are_served(
    stack: Stack, client: Anthropic
) -> None:
    url = f"{stack.gateway}/v1/messages"
    headers = HEADERS | {"content-type": "application/json"}
    bodies = list(BAD_BODIES.items()) * 3
    random.Random(7).shuffle(bodies)
    with ThreadPoolExecutor(4) as pool, httpx.Client(timeout=120) as http:
        good = [
            pool.submit(
                client.messages.create,
                model=MODEL,
                max_tokens=30,
                messages=[{"role": "user", "content": "What is a lease?"}],
            )
            for _ in range(6)
        ]
        for name, body in bodies:
            response = http.post(url, content=body, headers=headers)
            assert 400 <= response.status_code < 500, name
            error = response.json()
            assert error["type"] == "error", name
            assert error["error"]["type"] == "invalid_request_error", name
            assert error["error"]["message"], name
            assert error["request_id"].startswith("req_"), name
        answers = [future.result() for future in good]
    assert {answer.stop_reason for answer in answers} == {"end_turn"}
    assert len({str(answer.content) for answer in answers}) == 1
