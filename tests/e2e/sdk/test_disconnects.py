"""Clients that go away, and bodies that are broken, beside requests that are served."""

import json
import subprocess
import sys
import time
from typing import Any

import httpx

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


def seconds_until_idle(engine: httpx.Client) -> float:
    started = time.monotonic()
    while active_blocks(engine) != (0, 0):
        assert time.monotonic() - started < DEADLINE_SECONDS, "the engine never became idle"
        time.sleep(0.005)
    return time.monotonic() - started


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
