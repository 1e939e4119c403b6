"""One workspace floods, another asks now and then: the flood waits behind itself."""

import asyncio
from pathlib import Path
from typing import Any

import anthropic

from scripts.bench.load import marked
from scripts.stack import API_KEY
from tests.e2e.fleet import Gateway, running_fleet
from tests.gateway.serving import eventually, metric

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
}
GATEWAY_SETTINGS = {"HOLDFAST_QUEUE_SECONDS": "600"}
WAITING = "holdfast_gateway_waiting_turns "
LONG = "A lease holds blocks until it ends. " * 400


def test_a_flood_of_one_workspace_does_not_hold_up_anothers_single_turns(tmp_path: Path) -> None:
    """Counted in turns, not in seconds: how many of the flood were answered while one waited."""
    with running_fleet(tmp_path, NUM_ENGINES, 1, SETTINGS, GATEWAY_SETTINGS) as fleet:
        gateway = fleet.gateway
        gateway.workspace("single")
        key = gateway.make_key("single")[1]
        # The second time they read a long prefix from the cache. It was charged as if computed.
        for system in (None, LONG):
            waited = asyncio.run(_flood_and_ask(gateway, key, system))
            # In the order of arrival each would have waited for all before it, 100 at least.
            assert sorted(waited)[len(waited) // 2] <= 2 * NUM_AT_ENGINES, waited
            assert max(waited) <= 4 * NUM_AT_ENGINES, waited
        stats = [fleet.stats(number) for number in range(NUM_ENGINES)]
        num_asked = 2 * (NUM_FLOOD + NUM_SINGLE) + 1
        assert sum(engine["counters"]["requests"] for engine in stats) == num_asked
        assert metric(gateway.url, WAITING) == 0


async def _flood_and_ask(gateway: Gateway, key: str, system: str | None) -> list[int]:
    """How many answers the flood got while each of the single turns waited for its own. They stand
    behind the system prompt, which is in the cache by then."""
    prefix = {"system": marked(system)} if system else {}
    async with _client(gateway, API_KEY) as many, _client(gateway, key) as few:
        answered = [0]

        async def ask(client: anthropic.AsyncAnthropic, text: str, **more: Any) -> None:
            await client.messages.create(
                model="synthetic",
                max_tokens=40,
                messages=[{"role": "user", "content": text}],
                **more,
            )
            answered[0] += 1

        if system:
            await ask(few, "It is written.", **prefix)
        flood = [asyncio.create_task(ask(many, f"flood {n}")) for n in range(NUM_FLOOD)]
        await asyncio.to_thread(eventually, lambda: metric(gateway.url, WAITING) >= 120)
        waited = []
        for number in range(NUM_SINGLE):
            before = answered[0]
            await ask(few, f"single {number}", **prefix)
            waited.append(answered[0] - before - 1)
        await asyncio.gather(*flood)
    return waited


def _client(gateway: Gateway, key: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=600)
