"""F13: many clients bring the same cold prefix at once. Computed once, and billed honestly."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.bench.load import body_of
from scripts.stack import API_HEADERS
from tests.e2e.fleet import Fleet, running_fleet
from tests.faults.sizes import number, told
from tests.gateway.serving import eventually

PREFIX_TOKENS = 1024
ENGINE = {
    "ENGINE_MIN_CACHE_TOKENS": "64",
    "ENGINE_MAX_RUNNING": "64",
    "ENGINE_MAX_WAITING": "256",
    "ENGINE_SYNTHETIC_PREFILL_US": "20",
    "ENGINE_SYNTHETIC_DECODE_MS": "1",
}
# Nobody is to wait at the gateway: the race is the engine's.
GATEWAY = {"HOLDFAST_TUNING": '{"engine_queue_tokens": 10000000}'}


def body(round_number: int, client: int) -> dict[str, Any]:
    text = (f"prefix {round_number} " * PREFIX_TOKENS)[: PREFIX_TOKENS * 4]
    return body_of("synthetic", text, f"client {client:04}", max_tokens=2)


async def play(fleet: Fleet, rounds: int, clients: int) -> list[list[dict[str, Any]]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits, trust_env=False) as http:

        async def ask(turn: int, client: int) -> dict[str, Any]:
            url = f"{fleet.gateways[0].url}/v1/messages"
            reply = await http.post(url, json=body(turn, client), headers=API_HEADERS)
            assert reply.status_code == 200, reply.text
            answer: dict[str, Any] = reply.json()
            return answer

        return [
            await asyncio.gather(*(ask(turn, client) for client in range(clients)))
            for turn in range(rounds)
        ]


def check_round(answers: list[dict[str, Any]]) -> Counter[str]:
    """One of them computed the prefix; nobody is told that they read what they, or anybody after
    their arrival, computed."""
    reasons = Counter[str]()
    computed = 0
    for answer in answers:
        usage = answer["usage"]
        extension = answer["holdfast"]
        read_tokens = usage["cache_read_input_tokens"]
        written_tokens = usage["cache_creation_input_tokens"]
        assert read_tokens + written_tokens == PREFIX_TOKENS and (
            read_tokens == 0 or written_tokens == 0
        ), answer
        assert (extension["miss_reason"] is None) == (read_tokens > 0), answer
        prompt = read_tokens + written_tokens + usage["input_tokens"]
        reused = read_tokens + extension["automatic_tokens"]
        assert reused + extension["computed_tokens"] == prompt, answer
        computed += extension["computed_tokens"]
        reasons[extension["miss_reason"] or "read"] += 1
    tails = sum(answer["usage"]["input_tokens"] for answer in answers)
    # The prefix once; of each question at most what lies beyond its last whole shared block.
    assert PREFIX_TOKENS <= computed <= PREFIX_TOKENS + tails + 16 * len(answers), computed
    assert reasons["cold"] == 1, reasons
    assert set(reasons) <= {"cold", "in_progress_race", "read"}
    return reasons


@pytest.mark.timeout(3600)
def test_a_cold_prefix_is_computed_once_and_read_once_it_is_there(tmp_path: Path) -> None:
    rounds = number(3, 200)
    clients = number(16, 64)
    with running_fleet(tmp_path, 1, 1, ENGINE, GATEWAY) as fleet:
        answers = asyncio.run(play(fleet, rounds, clients))
        eventually(lambda: fleet.stats(0)["unacknowledged"] == 0)
        counters = fleet.stats(0)["counters"]
    reasons = sum((check_round(replies) for replies in answers), Counter[str]())
    told("F13", rounds=rounds, clients=clients, computed_once=rounds, answers=dict(reasons))
    computed_tokens = sum(a["holdfast"]["computed_tokens"] for replies in answers for a in replies)
    assert counters["computed_tokens"] == computed_tokens
    assert reasons["in_progress_race"] > 0
