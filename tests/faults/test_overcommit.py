"""F12: ten times what the pool holds, at once. Refused in words, leases kept, nothing stuck."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.bench.load import body_of, marked
from scripts.stack import API_HEADERS
from tests.e2e.fleet import Fleet, running_fleet
from tests.e2e.kills import idle_stats
from tests.faults.sizes import number, told

BLOCKS = 512
BLOCK_TOKENS = 16
PROMPT_TOKENS = 1024
OVERCOMMIT = 10
CLIENTS = OVERCOMMIT * BLOCKS * BLOCK_TOKENS // PROMPT_TOKENS
ENGINE = {
    "ENGINE_NUM_BLOCKS": str(BLOCKS),
    "ENGINE_MIN_CACHE_TOKENS": "64",
    "ENGINE_MAX_RUNNING": "64",
    "ENGINE_MAX_WAITING": "16",
    "ENGINE_SYNTHETIC_DECODE_MS": "5",
}
GATEWAY = {"HOLDFAST_QUEUE_SECONDS": "2"}
# An eighth of the pool, and so within the lease budget whatever else comes.
HELD = 4
READ_SECONDS = 1.0


@dataclass
class Seen:
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    reads: int = 0
    answered_at: list[float] = field(default_factory=list)


def prompt(name: str, tokens: int, *, is_marked: bool = False) -> dict[str, Any]:
    """Of about so many tokens, four bytes each on the synthetic engine."""
    system = marked((f"{name} " * tokens)[: tokens * 4])
    if not is_marked:
        del system[0]["cache_control"]
    return body_of("synthetic", system, "And?", max_tokens=16)


async def flood(
    http: httpx.AsyncClient, url: str, tally: Seen, names: Iterator[int], until: float
) -> None:
    while time.monotonic() < until:
        body = prompt(f"flood {next(names)}", PROMPT_TOKENS)
        reply = await http.post(f"{url}/v1/messages", json=body, headers=API_HEADERS)
        tally.statuses[reply.status_code] += 1
        if reply.status_code == 200:
            tally.answered_at.append(time.monotonic())
        elif (
            reply.status_code != 529
            or reply.json()["error"]["type"] != "overloaded_error"
            or int(reply.headers.get("retry-after", 0)) < 1
        ):
            tally.wrong.append(f"{reply.status_code} {reply.headers} {reply.text}")
        else:
            await asyncio.sleep(0.2)


async def read_over_and_over(
    http: httpx.AsyncClient, url: str, tally: Seen, name: str, until: float
) -> None:
    """The leased prefix is there every time, in full, whatever the flood takes."""
    body = prompt(name, 256, is_marked=True)
    is_written = False
    while time.monotonic() < until or not is_written:
        reply = await http.post(f"{url}/v1/messages", json=body, headers=API_HEADERS)
        if reply.status_code == 200:
            usage = reply.json()["usage"]
            if is_written and usage["cache_read_input_tokens"] != 256:
                tally.wrong.append(f"{name} was lost: {reply.text}")
            tally.reads += is_written
            is_written = True
        await asyncio.sleep(READ_SECONDS)


async def overcommit(fleet: Fleet, seconds: float) -> Seen:
    tally = Seen()
    names = itertools.count()
    url = fleet.gateways[0].url
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as http:
        until = time.monotonic() + seconds
        readers = [
            asyncio.create_task(read_over_and_over(http, url, tally, f"held {i}", until))
            for i in range(HELD)
        ]
        await asyncio.sleep(2 * READ_SECONDS)
        await asyncio.gather(*(flood(http, url, tally, names, until) for _ in range(CLIENTS)))
        await asyncio.gather(*readers)
    return tally


@pytest.mark.timeout(1200)
def test_ten_times_the_pool_is_refused_in_words_and_takes_no_lease(tmp_path: Path) -> None:
    seconds = number(10, 300)
    with running_fleet(tmp_path, 1, 1, ENGINE, GATEWAY) as fleet:
        assert fleet.stats(0)["blocks"]["total"] == BLOCKS
        tally = asyncio.run(overcommit(fleet, seconds))
        stats = idle_stats(fleet.engines[0])
    counters = stats["counters"]
    pauses = [b - a for a, b in itertools.pairwise(tally.answered_at)]
    told(
        "F12",
        overcommit=f"{OVERCOMMIT} times for {seconds} s",
        statuses=dict(tally.statuses),
        full_reads_of_leased_prefixes=tally.reads,
        leases_sacrificed=counters["leases_sacrificed"],
        longest_pause_between_answers=f"{max(pauses):.1f} s",
    )
    assert not tally.wrong, tally.wrong[:3]
    assert tally.statuses[200] and tally.statuses[529], "there was more than it could take"
    assert tally.reads >= HELD
    assert counters["leases_sacrificed"] == counters["leases_yielded"] == 0
    assert stats["running"] + stats["waiting"] + stats["blocks"]["active"] == 0
    assert max(pauses) < 60
