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

from scripts.bench.load import Answer
from scripts.faults.attacks import KINDS, idle_socket, neighbour_of
from scripts.faults.houses import House, Victim, running_house
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


def note(told: Told, answer: Answer) -> None:
    """What came of one turn of the victim."""
    told.statuses[answer.error if answer.is_broken else str(answer.status)] += 1
    if answer.status not in (0, 200):
        if answer.status != 529 or "retry-after" not in answer.headers:
            told.wrong.append(f"{answer.status} {answer.error}")
    elif answer.is_whole:
        names = (*CLASSES, "output_tokens")
        told.usage[answer.id] = {name: answer.usage[name] or 0 for name in names}
    else:
        told.statuses["error event"] += "error" in answer.events
        told.num_broken += 1


async def be_the_victim(house: House, key: str, told: Told, until: float) -> None:
    victim = Victim(house, key, num_words=700)
    while time.monotonic() < until:
        note(told, await victim.ask())
        await asyncio.sleep(0.05)


async def be_an_adversary(
    house: House, key: str, rng: random.Random, statuses: Counter[int], until: float
) -> None:
    kinds = list(KINDS.values())
    async with neighbour_of(house.gateway.url, key, house.model) as who:
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
