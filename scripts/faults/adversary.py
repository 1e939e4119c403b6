"""An adversary that mixes all request kinds at their bounds, while engines are killed.

    python -m scripts.faults.adversary [--seeds 20] [--minutes 5] [--engines 3]

Two workspaces send what `attacks.py` and `mixes.py` have, drawn at random. A third is the victim:
it asks short questions behind a cached prefix. About every `--kill-seconds` one engine is killed
with `kill -9` and started again. A seed is good if all of this holds:

- the victim saw no 5xx but 529 with `retry-after`, and no connection of its own broke;
- each of its streams that broke was open while an engine was killed;
- the memory of gateway and engines stayed within `--most-mib` above that at the start;
- the ledger has every answered turn of the victim with just the tokens that the answer said;
- at the end no turn is open or waits for the ledger, no engine runs or holds anything, and
  `ledger check` finds nothing.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scripts.bench.load import Answer, rss_bytes
from scripts.faults.attacks import idle_socket, neighbour_of
from scripts.faults.houses import House, Victim, running_house
from scripts.faults.mixes import ALL_KINDS
from scripts.setup.options import parse
from scripts.stack import ADMIN_KEY, ENGINE_SECRET, ROOT, family, python

MIB = 1 << 20
LEDGER_SECONDS = 180
PATIENCE_SECONDS = 60
TELL_SECONDS = 30
CLASSES = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


@dataclass(slots=True)
class Told:
    """What the victim was told: by the id of each turn that it saw the end of, its usage."""

    usage: dict[str, dict[str, int]] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    broken: list[tuple[float, float]] = field(default_factory=list)
    """Of each stream that broke: from when to when it ran (`time.perf_counter`)."""


@dataclass(slots=True)
class SeedResult:
    seed: int
    told: Told
    attacks: Counter[tuple[str, int]]
    kills: list[float]
    mib: dict[str, tuple[float, float]]
    problems: list[str]


def note(told: Told, answer: Answer) -> None:
    """What came of one turn of the victim."""
    told.statuses[answer.error if answer.is_broken else str(answer.status)] += 1
    if answer.status != 200:
        if answer.status != 529 or "retry-after" not in answer.headers:
            told.wrong.append(f"{answer.status} {answer.error}")
    elif answer.is_whole:
        names = (*CLASSES, "output_tokens")
        told.usage[answer.id] = {name: answer.usage[name] or 0 for name in names}
    else:
        told.statuses["error event"] += "error" in answer.events
        told.broken.append((answer.begun, answer.begun + answer.seconds))


async def be_the_victim(house: House, key: str, told: Told, until: float) -> None:
    victim = Victim(house, key, num_words=700)
    while time.monotonic() < until:
        note(told, await victim.ask())
        await asyncio.sleep(0.05)


async def be_an_adversary(
    house: House, key: str, rng: random.Random, statuses: Counter[tuple[str, int]], until: float
) -> None:
    """One kind after the other; what takes longer than the adversary's patience is given up."""
    async with neighbour_of(house.gateway.url, key, house.model) as who:
        while time.monotonic() < until:
            name, kind = rng.choice(list(ALL_KINDS.items()))
            at_once = 20 if kind.attack is idle_socket else min(kind.at_once, 4)
            sent: list[asyncio.Future[int]] = [
                asyncio.ensure_future(kind.attack(who, random.Random(rng.random())))
                for _ in range(at_once)
            ]
            done, late = await asyncio.wait(sent, timeout=PATIENCE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            for task in done:
                statuses[name, 0 if task.exception() else task.result()] += 1
            statuses[name, 0] += len(late)


async def kill_engines(
    house: House, rng: random.Random, seconds: float, until: float
) -> list[float]:
    """Kill one engine after another, and start it again; when (`time.perf_counter`)."""
    kills = []
    while time.monotonic() + seconds < until:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * seconds)
        number = rng.randrange(len(house.engines))
        kills.append(time.perf_counter())
        house.kill(number)
        await asyncio.to_thread(house.restart, number)
    return kills


async def watch_memory(house: House, most: dict[str, float], until: float) -> None:
    """Also prints what is held, twice a minute: a curve that levels off is a bound."""
    told = time.monotonic()
    while time.monotonic() < until:
        now = memory(house)
        for name, mib in now.items():
            most[name] = max(most.get(name, 0.0), mib)
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            print("   ", ", ".join(f"{name} {mib:.0f}" for name, mib in now.items()), flush=True)
        await asyncio.sleep(0.5)


def memory(house: House) -> dict[str, float]:
    """Resident MiB of the gateway and of the largest engine, and of the children of each."""
    own, workers = _family_mib(house.gateway.pid)
    engines = [_family_mib(process.pid) for process in house.processes]
    largest, most_workers = map(max, zip(*engines, strict=True))
    names = ("gateway", "gateway's workers", "engine", "engine's workers")
    return dict(zip(names, (own, workers, largest, most_workers), strict=True))


def _family_mib(pid: int) -> tuple[float, float]:
    """Of the process, and of its children together."""
    _, *children = family(pid)
    return rss_bytes([pid]) / MIB, rss_bytes(children) / MIB


async def run_seed(house: House, seed: int, options: argparse.Namespace) -> SeedResult:
    rng, told, statuses = random.Random(seed), Told(), Counter[tuple[str, int]]()
    names = ("victim", "one", "two")
    keys = [await asyncio.to_thread(house.new_key, f"{name}-{seed}") for name in names]
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
    kills = await killing
    if house.gateway.process.poll() is not None:
        told.wrong.append(f"the gateway ended with status {house.gateway.process.returncode}")
        return SeedResult(seed, told, statuses, kills, {}, told.wrong)
    problems = [*told.wrong, *unexplained(told, kills), *await end_of(house)]
    problems += await compare_with_ledger(house, f"victim-{seed}", told)
    problems += await asyncio.to_thread(check_ledger, house)
    mib = {name: (before[name], most[name]) for name in before}
    problems += [
        f"{name}: {high:.0f} MiB, {low:.0f} at the start"
        for name, (low, high) in mib.items()
        if high - low > options.most_mib
    ]
    return SeedResult(seed, told, statuses, kills, mib, problems)


def unexplained(told: Told, kills: list[float]) -> list[str]:
    """Streams that broke although no engine was killed meanwhile."""
    return [
        f"a stream of {end - begun:.1f} s broke without a kill"
        for begun, end in told.broken
        if not any(begun - 1 <= kill <= end + 1 for kill in kills)
    ]


async def end_of(house: House) -> list[str]:
    """Wait until nothing runs and all is in the ledger; what is left over where that fails."""
    deadline = time.monotonic() + LEDGER_SECONDS
    left = ["not looked"]
    headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
    async with httpx.AsyncClient(timeout=60) as client:
        while left and time.monotonic() < deadline:
            await asyncio.sleep(1)
            left = []
            journal = (await client.get(f"{house.gateway.url}/readyz")).json()["journal"]
            left += [f"{journal[n]} turns {n}" for n in ("backlog", "set_aside") if journal[n]]
            for url in house.engines:
                stats = (await client.get(f"{url}/v1/stats", headers=headers)).json()
                held = {name: stats[name] for name in ("running", "waiting") if stats[name]}
                held |= {"active": stats["blocks"]["active"]} if stats["blocks"]["active"] else {}
                left += [f"an engine still has {held}"] if held else []
    return left


def check_ledger(house: House) -> list[str]:
    environment = {**os.environ, "HOLDFAST_DATA": str(house.data)}
    command = [*python("gateway"), "ledger", "check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    return [] if done.returncode == 0 else [f"ledger check: {done.stdout} {done.stderr}"]


async def compare_with_ledger(house: House, workspace: str, told: Told) -> list[str]:
    """What the ledger says otherwise than the victim's answers did, once all turns are in it."""
    headers = {"x-api-key": ADMIN_KEY}
    async with httpx.AsyncClient(base_url=house.gateway.url, headers=headers, timeout=60) as client:
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


def report(outcome: SeedResult) -> str:
    """Of the attacks, requests of each kind by status; 0: the client left, or was cut off."""
    told = outcome.told
    mib = ", ".join(f"{k} {low:.0f} → {high:.0f} MiB" for k, (low, high) in outcome.mib.items())
    by_kind: dict[str, list[str]] = {}
    for (name, status), number in sorted(outcome.attacks.items()):
        by_kind.setdefault(name, []).append(f"{status}: {number}")
    head = (
        f"seed {outcome.seed}: {len(told.usage)} whole turns of the victim, {len(told.broken)} not"
        f" whole, {dict(told.statuses)}; {len(outcome.kills)} kills; {mib};"
        f" {len(outcome.problems)} problems"
    )
    lines = (f"    {name}: {', '.join(found)}" for name, found in by_kind.items())
    return "\n".join([head, *lines])


def main() -> int:
    options = parse(
        __doc__,
        seeds=20,
        first=(1, "the first seed"),
        minutes=(5.0, "for each seed"),
        engines=3,
        kill_seconds=45.0,
        most_mib=(1024.0, "that a process may grow by"),
        backend="native",
    )
    good = True
    for seed in range(options.first, options.first + options.seeds):
        with (
            tempfile.TemporaryDirectory() as data,
            running_house(Path(data), options.engines, options.backend) as house,
        ):
            outcome = asyncio.run(run_seed(house, seed, options))
            log = house.gateway.log.read_text("utf-8", "replace") if house.gateway.log else ""
        print(report(outcome), flush=True)
        print("\n".join(f"  {problem}" for problem in outcome.problems[:20]), flush=True)
        print("\n".join(f"  log: {line[:1000]}" for line in log.splitlines()[-5:]), flush=True)
        good &= not outcome.problems
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
