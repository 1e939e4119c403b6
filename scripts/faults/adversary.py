"""An adversary that mixes all request kinds at their bounds, while engines are killed.

    python -m scripts.faults.adversary [--seeds 20] [--minutes 5] [--engines 3]

Two workspaces send what `attacks.py` has, drawn at random, a third is the victim: it asks short
questions behind a cached prefix. About every `--kill-seconds` one engine is killed with `kill -9`
and started again. A seed is good where the victim saw no 5xx but 529 with `retry-after`, no broken
stream but those of an engine that was killed, the memory of gateway and engines stayed within
`--most-mib` above that at the start, and the ledger has every answered turn of the victim with just
the tokens that the answer said, and no turn is left open.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

from gateway.base.bounds import RequestBounds
from scripts.faults.attacks import KINDS, Neighbour, idle_socket, text
from scripts.faults.houses import CONTEXT, House, running_house
from scripts.stack import ADMIN_KEY

MIB = 1 << 20
LEDGER_SECONDS = 180
CLASSES = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


@dataclass(slots=True)
class Told:
    """What the victim was told: by the id of each turn that it saw the end of, its usage."""

    usage: dict[str, dict[str, int]] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_broken: int = 0


@dataclass(slots=True)
class Outcome:
    seed: int
    told: Told
    attacks: Counter[int]
    num_kills: int
    mib: dict[str, tuple[float, float]]
    problems: list[str]


async def ask(client: httpx.AsyncClient, house: House, system: str, told: Told) -> None:
    """One turn of the victim, and what came of it."""
    body = {
        "model": house.model,
        "max_tokens": 8,
        "stream": True,
        "system": [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": f"Question {random.random()}?"}],
    }
    turn, usage, is_whole = "", dict[str, int](), False
    try:
        async with client.stream("POST", "/v1/messages", json=body) as reply:
            told.statuses[str(reply.status_code)] += 1
            if reply.status_code != 200:
                said = (await reply.aread())[:300]
                if reply.status_code != 529 or "retry-after" not in reply.headers:
                    told.wrong.append(f"{reply.status_code} {said!r}")
                return
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event: dict[str, Any] = json.loads(line[6:])
                if event["type"] == "message_start":
                    turn, usage = event["message"]["id"], dict(event["message"]["usage"])
                elif event["type"] == "message_delta":
                    usage |= event["usage"]
                elif event["type"] == "message_stop":
                    is_whole = True
                elif event["type"] == "error":
                    told.statuses["error event"] += 1
    except httpx.TransportError as error:
        told.statuses[type(error).__name__] += 1
    if is_whole:
        told.usage[turn] = {name: usage[name] or 0 for name in (*CLASSES, "output_tokens")}
    else:
        told.num_broken += 1


async def be_the_victim(house: House, key: str, told: Told, until: float) -> None:
    system = text(random.Random(7), 700)
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    async with httpx.AsyncClient(
        base_url=house.gateway.url, headers=headers, timeout=180
    ) as client:
        while time.monotonic() < until:
            await ask(client, house, system, told)
            await asyncio.sleep(0.05)


async def be_an_adversary(
    house: House, key: str, rng: random.Random, statuses: Counter[int], until: float
) -> None:
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    kinds = list(KINDS.values())
    async with httpx.AsyncClient(
        base_url=house.gateway.url,
        headers=headers,
        timeout=300,
        limits=httpx.Limits(max_connections=None),
    ) as client:
        who = Neighbour(client=client, model=house.model, bounds=RequestBounds(), context=CONTEXT)
        while time.monotonic() < until:
            kind = rng.choice(kinds)
            at_once = 20 if kind.attack is idle_socket else min(kind.at_once, 4)
            sent = [kind.attack(who, random.Random(rng.random())) for _ in range(at_once)]
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + 60):
                for status in await asyncio.gather(*sent, return_exceptions=True):
                    statuses[status if isinstance(status, int) else 0] += 1


async def kill_engines(house: House, rng: random.Random, seconds: float, until: float) -> int:
    """Kill one engine after another, and start it again; how many."""
    num_kills = 0
    while time.monotonic() + seconds < until:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * seconds)
        number = rng.randrange(len(house.engines))
        house.kill(number)
        await asyncio.to_thread(house.restart, number)
        num_kills += 1
    return num_kills


async def watch_memory(house: House, most: dict[str, float], until: float) -> None:
    while time.monotonic() < until:
        for name, mib in memory(house).items():
            most[name] = max(most.get(name, 0.0), mib)
        await asyncio.sleep(0.5)


def memory(house: House) -> dict[str, float]:
    """Resident MiB of the gateway and of the largest engine, each with its children."""
    return {
        "gateway": _family_mib(house.gateway.pid),
        "engine": max(_family_mib(process.pid) for process in house.processes),
    }


def _family_mib(pid: int) -> float:
    try:
        process = psutil.Process(pid)
        members = [process, *process.children(True)]
        return float(sum(one.memory_info().rss for one in members)) / MIB
    except psutil.NoSuchProcess:
        return 0.0


async def run_seed(house: House, seed: int, options: argparse.Namespace) -> Outcome:
    rng, told, statuses = random.Random(seed), Told(), Counter[int]()
    keys = [house.new_key(f"{name}-{seed}") for name in ("victim", "one", "two")]
    before, most = memory(house), dict[str, float]()
    until = time.monotonic() + 60 * options.minutes
    killing = asyncio.create_task(kill_engines(house, rng, options.kill_seconds, until))
    await asyncio.gather(
        be_the_victim(house, keys[0], told, until),
        *(
            be_an_adversary(house, key, random.Random(f"{seed} {i} {key}"), statuses, until)
            for i, key in enumerate((keys[1], keys[2]) * 2)
        ),
        watch_memory(house, most, until),
    )
    num_kills = await killing
    problems = [*told.wrong, *await compare_with_ledger(house, f"victim-{seed}", told)]
    mib = {name: (before[name], most[name]) for name in before}
    problems += [
        f"{name}: {high:.0f} MiB, {low:.0f} at the start"
        for name, (low, high) in mib.items()
        if high - low > options.most_mib
    ]
    return Outcome(seed, told, statuses, num_kills, mib, problems)


async def compare_with_ledger(house: House, workspace: str, told: Told) -> list[str]:
    """What the ledger says otherwise than the victim's answers did, once nothing is open."""
    headers = {"x-api-key": ADMIN_KEY}
    deadline = time.monotonic() + LEDGER_SECONDS
    async with httpx.AsyncClient(base_url=house.gateway.url, headers=headers, timeout=60) as client:
        rows = await _turns(client, workspace)
        while set(told.usage) - set(rows) and time.monotonic() < deadline:
            await asyncio.sleep(1)
            rows = await _turns(client, workspace)
    problems = [f"{turn} is not in the ledger" for turn in set(told.usage) - set(rows)]
    for turn in set(told.usage) & set(rows):
        row, usage = rows[turn], told.usage[turn]
        written = row["cache_write_5m_tokens"] + row["cache_write_1h_tokens"]
        found = (row["input_tokens"], row["cache_read_tokens"], written, row["output_tokens"])
        if found != tuple(usage.values()):
            problems.append(f"{turn}: the ledger has {found}, the answer {usage}")
    return problems


async def _turns(client: httpx.AsyncClient, workspace: str) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    cursor: dict[str, str] = {}
    while True:
        reply = await client.get(
            "/admin/v1/turns/search", params={"workspace": workspace, "limit": 100, **cursor}
        )
        page = reply.raise_for_status().json()
        rows |= {turn["id"]: turn for turn in page["turns"]}
        if not page.get("next"):
            return rows
        cursor = {"after": page["next"]}


def report(outcome: Outcome) -> str:
    told = outcome.told
    mib = ", ".join(f"{k} {low:.0f} → {high:.0f} MiB" for k, (low, high) in outcome.mib.items())
    return (
        f"seed {outcome.seed}: {len(told.usage)} whole turns of the victim, {told.num_broken} not"
        f" whole, {dict(told.statuses)}; {outcome.num_kills} kills;"
        f" attacks {dict(outcome.attacks)}; {mib}; {len(outcome.problems)} problems"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--minutes", type=float, default=5, help="for each seed")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--kill-seconds", type=float, default=45)
    parser.add_argument("--most-mib", type=float, default=1024, help="that a process may grow by")
    parser.add_argument("--backend", default="native")
    options = parser.parse_args()
    good = True
    for seed in range(options.first, options.first + options.seeds):
        with (
            tempfile.TemporaryDirectory() as data,
            running_house(Path(data), options.engines, options.backend) as house,
        ):
            outcome = asyncio.run(run_seed(house, seed, options))
        print(report(outcome), flush=True)
        print("\n".join(f"  {problem}" for problem in outcome.problems[:10]), flush=True)
        good &= not outcome.problems
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
