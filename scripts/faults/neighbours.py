"""A victim's time to its first token, alone and beside each attack at the bound of what is allowed.

    python -m scripts.faults.neighbours [--engines 1|3] [--seconds 15] [--only NAME ...]

Starts a gateway before native engines that serve the demo model. A victim asks short questions
behind a cached prefix, one after another. Beside it another workspace sends one kind of request of
`attacks.py` all the time, from a process of its own. The table has p50 and p95 alone (before and
after all attacks together) and beside each attack, their ratio, the turns of the victim that
failed, and the statuses that the attacker got. Ends with 1 where a turn of the victim failed or a
p95 was more than `--most` times that alone.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from gateway.base.bounds import RequestBounds
from scripts.faults.attacks import KINDS, Neighbour, text
from scripts.faults.houses import CONTEXT, House, running_house

PAUSE_SECONDS = 0.05


@dataclass(slots=True)
class Seen:
    """What the victim saw: seconds to each first token, and why turns failed."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        ranked = sorted(self.seconds) or [float("nan")]
        return ranked[min(int(share * len(ranked)), len(ranked) - 1)]


class Victim:
    def __init__(self, house: House, key: str) -> None:
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
        self._client = httpx.AsyncClient(base_url=house.gateway.url, headers=headers, timeout=120)
        self._model = house.model
        self._system = text(random.Random(7), 1100)

    async def watch(self, seconds: float) -> Seen:
        """Ask one question after another for so long; at least three."""
        seen, until = Seen(), time.monotonic() + seconds
        while time.monotonic() < until or len(seen.seconds) + len(seen.failures) < 3:
            await self._ask(seen)
            await asyncio.sleep(PAUSE_SECONDS)
        return seen

    async def _ask(self, seen: Seen) -> None:
        marked = {"type": "text", "text": self._system, "cache_control": {"type": "ephemeral"}}
        body = {
            "model": self._model,
            "max_tokens": 8,
            "stream": True,
            "system": [marked],
            "messages": [{"role": "user", "content": f"Question {random.random()}?"}],
        }
        begun, first, error = time.perf_counter(), 0.0, ""
        try:
            async with self._client.stream("POST", "/v1/messages", json=body) as reply:
                if reply.status_code != 200:
                    error = f"{reply.status_code} {(await reply.aread())[:200]!r}"
                async for line in reply.aiter_lines():
                    if line.startswith("event: error"):
                        error = "an error event"
                    if not first and line.startswith("event: content_block_delta"):
                        first = time.perf_counter() - begun
        except httpx.TransportError as failed:
            error = type(failed).__name__
        if error or not first:
            seen.failures.append(error or "no token")
        else:
            seen.seconds.append(first)


@contextmanager
def attacking(name: str, house: House, key: str) -> Iterator["subprocess.Popen[str]"]:
    """The attack from a process of its own, which ends with the block."""
    command = [sys.executable, "-m", "scripts.faults.neighbours", "--attack", name]
    job = json.dumps({"gateway": house.gateway.url, "model": house.model, "key": key})
    process = subprocess.Popen([*command, "--job", job], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def attack(name: str, job: dict[str, str]) -> int:
    """The attacker's process: send until told to stop, then print the statuses."""
    wanted = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    statuses: Counter[int] = Counter()
    try:
        asyncio.run(_attack(name, job, statuses))
    finally:
        print(json.dumps(statuses), flush=True)
    return 0


async def _attack(name: str, job: dict[str, str], statuses: Counter[int]) -> None:
    kind = KINDS[name]
    headers = {"x-api-key": job["key"], "anthropic-version": "2023-06-01"}
    limits = httpx.Limits(max_connections=None)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with httpx.AsyncClient(
        base_url=job["gateway"], headers=headers, timeout=300, limits=limits
    ) as client:
        who = Neighbour(client=client, model=job["model"], bounds=RequestBounds(), context=CONTEXT)

        async def repeat(number: int) -> None:
            rng = random.Random(f"{name} {number} {os.getpid()}")
            while True:
                statuses[await kind.attack(who, rng)] += 1
                await asyncio.sleep(0)

        try:
            await asyncio.gather(*(repeat(number) for number in range(kind.at_once)))
        except asyncio.CancelledError:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15, help="beside each attack")
    parser.add_argument("--most", type=float, default=2.0, help="p95 beside an attack / p95 alone")
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        return attack(options.attack, options.job)
    with tempfile.TemporaryDirectory() as data, running_house(Path(data), options.engines) as house:
        rows = asyncio.run(measure(house, options.only, options.seconds))
    return report(rows, options.most)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    seen: Seen
    statuses: str


async def measure(house: House, names: list[str], seconds: float) -> list[Row]:
    victim = Victim(house, house.new_key("victim"))
    attacker = house.new_key("attacker")
    await victim.watch(3)
    alone = await victim.watch(seconds)
    rows = []
    for name in names:
        with attacking(name, house, attacker) as process:
            await asyncio.sleep(2)
            seen = await victim.watch(seconds)
        assert process.stdout is not None
        rows.append(Row(name, seen, process.stdout.read().strip()))
        p95 = 1e3 * seen.percentile(0.95)
        print(f"  {name}: {len(seen.seconds)} turns, p95 {p95:.0f} ms", flush=True)
        await victim.watch(2)
    again = await victim.watch(seconds)
    both = Seen(alone.seconds + again.seconds, alone.failures + again.failures)
    return [Row("alone", both, ""), *rows]


def report(rows: list[Row], most: float) -> int:
    alone, wrong = rows[0].seen.percentile(0.95), []
    print("\n| beside | turns | failed | p50 ms | p95 ms | p95 / alone | the attacker's statuses |")
    print("|---|--:|--:|--:|--:|--:|---|")
    for row in rows:
        seen, ratio = row.seen, row.seen.percentile(0.95) / alone
        print(
            f"| {row.name} | {len(seen.seconds)} | {len(seen.failures)} |"
            f" {1e3 * seen.percentile(0.5):.0f} | {1e3 * seen.percentile(0.95):.0f} |"
            f" {ratio:.2f} | {row.statuses} |"
        )
        wrong += [f"{row.name}: {why}" for why in seen.failures[:3]]
        if ratio > most:
            wrong.append(f"{row.name}: p95 is {ratio:.2f} times that alone")
    print("\n".join(["", *(wrong or ["no turn of the victim failed, none was slowed too much"])]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
