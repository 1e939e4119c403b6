"""One workspace floods, another asks now and then: the flood waits behind itself."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import pytest

from scripts.stack import ADMIN_KEY, API_KEY
from tests.e2e.fleet import Fleet, Gateway, running_fleet
from tests.gateway.admin_client import Admin

NUM_FLOOD = 180
NUM_SINGLE = 6
MAX_RUNNING = 4
NUM_ENGINES = 2
# What two engines run, and what they have waiting beside.
NUM_AT_ENGINES = NUM_ENGINES * (MAX_RUNNING + 1)
SETTINGS = {
    "ENGINE_MIN_CACHE_TOKENS": "16",
    "ENGINE_MAX_RUNNING": str(MAX_RUNNING),
    "ENGINE_SYNTHETIC_DECODE_MS": "20",
    "ENGINE_LOG_LEVEL": "error",
}
GATEWAY_SETTINGS = {"HOLDFAST_QUEUE_SECONDS": "600", "HOLDFAST_LOG_LEVEL": "error"}
WAIT_SECONDS = 120


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path, NUM_ENGINES, 1, SETTINGS, GATEWAY_SETTINGS) as running:
        yield running


def test_a_flood_of_one_workspace_does_not_hold_up_anothers_single_turns(fleet: Fleet) -> None:
    """Counted in turns, not in seconds: how many of the flood were answered while one waited."""
    gateway = fleet.gateways[0]
    admin = Admin(gateway.url, ADMIN_KEY)
    admin.workspace("single")
    waited = asyncio.run(_flood_and_ask(gateway, admin.make_key("single")[1]))
    # In the order of arrival each would have waited for all that were before it, 100 at least.
    assert sorted(waited)[len(waited) // 2] <= 2 * NUM_AT_ENGINES, waited
    assert max(waited) <= 4 * NUM_AT_ENGINES, waited
    stats = [fleet.stats(number) for number in range(NUM_ENGINES)]
    assert sum(one["counters"]["requests"] for one in stats) == NUM_FLOOD + NUM_SINGLE
    assert _waiting(gateway) == 0


async def _flood_and_ask(gateway: Gateway, key: str) -> list[int]:
    """How many answers the flood got while each of the single turns waited for its own."""
    async with _client(gateway, API_KEY) as many, _client(gateway, key) as few:
        answered = [0]

        async def ask(client: anthropic.AsyncAnthropic, text: str) -> None:
            await client.messages.create(
                model="synthetic",
                max_tokens=40,
                messages=[{"role": "user", "content": text}],
            )
            answered[0] += 1

        flood = [asyncio.create_task(ask(many, f"flood {n}")) for n in range(NUM_FLOOD)]
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while await asyncio.to_thread(_waiting, gateway) < 120:
            assert asyncio.get_running_loop().time() < deadline, "the flood does not wait"
            await asyncio.sleep(0.05)
        waited = []
        for number in range(NUM_SINGLE):
            before = answered[0]
            await ask(few, f"single {number}")
            waited.append(answered[0] - before - 1)
        await asyncio.gather(*flood)
    return waited


def _client(gateway: Gateway, key: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=600)


def _waiting(gateway: Gateway) -> int:
    text = httpx.get(f"{gateway.url}/metrics", timeout=120, trust_env=False).text
    name = "holdfast_gateway_waiting_turns "
    return int(sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)))
