"""A victim's time to its first token, alone and beside each attack at the bound of what is allowed.

    python -m tests.faults.neighbours [--engines 1|3] [--seconds 15] [--only NAME ... | --door]
        [--attackers 1] [--apart] [--rest 0] [--most 2] [--descriptors 1024]

Starts a gateway before native engines that serve the demo model. A victim asks short questions
behind a cached prefix, one after another. Beside it another workspace, or so many `--attackers`,
sends one kind of request of `attacks.py` or `door_attacks.py` all the time, each from a process of
its own. With `--door` the attacks are those of `door_attacks.py`, and the victim comes on a new
connection each time. With `--apart` the attacker's process takes only the processor time that the
others leave, as if it ran on a machine of its own.

The first table has the milliseconds to the first token, p50 and p95, alone (just before and just
after the attack) and beside each attack, the turns of the victim and those that failed. The second
has the milliseconds of whole turns, the gateway's resident MiB before the attack, at its end and
`--rest` seconds later, the statuses that the attacker got, and those of a stranger who asks without
a key meanwhile (0: no status came). Both have the ratio of the p95. The machine's load is printed
before and after: a busy machine slows both. Ends with 1 where a turn of the victim failed or a p95
was more than `--most` times that alone.

The gateway has few `--descriptors`, so that few connections fill its places. As many as this shell
may have (`ulimit -n`) show what it does with all of them.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from scripts.bench.report import percentile
from tests.faults.attacks import FLOODS, KINDS, neighbour_of
from tests.faults.door_attacks import DOORS, ENGINE_DOORS, ask_without_key
from tests.faults.houses import DESCRIPTORS, MODEL, House, Victim, running_house

PAUSE_SECONDS = 0.05
STRANGER_SECONDS = 0.5
ALL_KINDS = {**KINDS, **FLOODS, **DOORS}


@dataclass(slots=True)
class Seen:
    """What the victim saw: seconds to each first token and of each whole turn, and why turns
    failed."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __add__(self, other: "Seen") -> "Seen":
        failures = self.failures + other.failures
        return Seen(self.first + other.first, self.whole + other.whole, failures)


async def watch(victim: Victim, seconds: float) -> Seen:
    """Ask one question after another for so long; at least three."""
    answers = Seen()
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(answers.whole) + len(answers.failures) < 3:
        answer = await victim.ask()
        if answer.error or answer.first_seconds is None:
            answers.failures.append(f"{answer.status} {answer.error or 'no token'}")
        else:
            answers.first.append(answer.first_seconds)
            answers.whole.append(answer.seconds)
        await asyncio.sleep(PAUSE_SECONDS)
    return answers


async def watch_stranger(url: str, statuses: Counter[int]) -> None:
    """Ask without a key again and again, each time on a new connection."""
    while True:
        statuses[await ask_without_key(url)] += 1
        await asyncio.sleep(STRANGER_SECONDS)


@contextmanager
def attacking(
    name: str, house: House, key: str, niceness: int
) -> Iterator["subprocess.Popen[str]"]:
    """The attack from a process of its own, which ends with the block."""
    command = [sys.executable, "-m", "tests.faults.neighbours", "--attack", name]
    server = house.engines[0] if name in ENGINE_DOORS else house.gateway
    job = json.dumps({"server": server.url, "model": MODEL, "key": key})
    process = subprocess.Popen([*command, "--job", job], stdout=subprocess.PIPE, text=True)
    os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
    try:
        yield process
    finally:
        process.terminate()
        # Thousands of connections take a while to close on a busy machine.
        process.wait(300)


def attack(name: str, job: dict[str, str]) -> int:
    """The attacker's process: send until told to stop, then print the statuses."""
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    statuses: Counter[int] = Counter()
    try:
        asyncio.run(_attack(name, job, statuses))
    finally:
        print(json.dumps(statuses), flush=True)
    return 0


async def _attack(name: str, job: dict[str, str], statuses: Counter[int]) -> None:
    attack, at_once = ALL_KINDS[name]
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with neighbour_of(job["server"], job["key"], job["model"]) as who:

        async def repeat(number: int) -> None:
            rng = random.Random(f"{name} {number} {os.getpid()}")
            while True:
                statuses[await attack(who, rng)] += 1
                await asyncio.sleep(0)

        try:
            await asyncio.gather(*(repeat(number) for number in range(at_once)))
        except asyncio.CancelledError:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15, help="beside each attack")
    parser.add_argument("--most", type=float, default=2.0, help="p95 beside an attack / p95 alone")
    parser.add_argument("--rest", type=float, default=0, help="seconds behind each attack")
    parser.add_argument("--only", nargs="*", choices=list(ALL_KINDS), metavar="NAME")
    parser.add_argument("--door", action="store_true", help="the attacks of door_attacks.py")
    parser.add_argument("--attackers", type=int, default=1, help="workspaces that attack")
    parser.add_argument("--descriptors", type=int, default=DESCRIPTORS, help="of the gateway")
    parser.add_argument("--apart", action="store_true", help="the attacker has what others leave")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        return attack(options.attack, options.job)
    names = options.only or list(DOORS if options.door else {**KINDS, **FLOODS})
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        house = stack.enter_context(running_house(data, options.engines, options.descriptors))
        niceness = 19 if options.apart else 0
        keys = [house.new_key(f"attacker-{number}") for number in range(options.attackers)]
        times = Times(options.seconds, options.rest)
        print(f"load before: {load()}", flush=True)
        rows = asyncio.run(measure(house, names, times, niceness, keys))
    return report(rows, options.most)


def load() -> str:
    return " ".join(f"{average:.1f}" for average in os.getloadavg())


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: of each attack, and between it and the next."""

    attack: float
    rest: float


@dataclass(frozen=True, slots=True)
class Row:
    """What the victim saw alone and beside one attack, the gateway's resident MiB before, at the
    end and behind it, and the statuses of the attacker and of a stranger."""

    name: str
    alone: Seen
    beside: Seen
    mebibytes: list[int]
    statuses: str
    strangers: str

    @property
    def ratios(self) -> list[float]:
        """Of the p95: to the first token, and of whole turns."""
        return [
            percentile(self.beside.first, 0.95) / percentile(self.alone.first, 0.95),
            percentile(self.beside.whole, 0.95) / percentile(self.alone.whole, 0.95),
        ]


async def measure(
    house: House, names: list[str], times: Times, niceness: int, attackers: list[str]
) -> list[Row]:
    """`attackers` are the keys of the workspaces that attack."""
    victim_key = await asyncio.to_thread(house.new_key, "victim")
    gateway = psutil.Process(house.gateway.pid)
    rows = []
    for name in names:
        victim = Victim(house, victim_key, num_words=1100, comes_anew=name in DOORS)
        await watch(victim, 3)
        before = await watch(victim, times.attack / 2)
        sizes = [gateway.memory_info().rss]
        with ExitStack() as stack:
            processes = [
                stack.enter_context(attacking(name, house, key, niceness)) for key in attackers
            ]
            await asyncio.sleep(2)
            strangers: Counter[int] = Counter()
            stranger = asyncio.create_task(watch_stranger(house.gateway.url, strangers))
            beside = await watch(victim, times.attack)
            stranger.cancel()
            sizes.append(gateway.memory_info().rss)
        statuses = " ".join(process.communicate()[0].strip() for process in processes)
        await watch(victim, 2)
        alone = before + await watch(victim, times.attack / 2)
        await victim.close()
        await asyncio.sleep(times.rest)
        sizes.append(gateway.memory_info().rss)
        mebibytes = [size >> 20 for size in sizes]
        row = Row(name, alone, beside, mebibytes, statuses, json.dumps(strangers))
        rows.append(row)
        print(f"  {name}: {len(beside.whole)} turns, p95 x {row.ratios[0]:.1f}", flush=True)
    return rows


def report(rows: list[Row], most: float) -> int:
    wrong = []
    print(f"load after: {load()}")
    print(
        "\n| attack | first token alone p50 ms | p95 | n | beside p50 ms | p95 | n | p95 / alone"
        " | failed |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    for row in rows:
        cells = [*spread(row.alone.first), *spread(row.beside.first), f"{row.ratios[0]:.2f}"]
        cells.append(str(len(row.beside.failures)))
        print(f"| {row.name} | {' | '.join(cells)} |")
        wrong += [f"{row.name}: {why}" for why in row.beside.failures[:3]]
        wrong += [f"{row.name}, alone: {why}" for why in row.alone.failures[:3]]
        if max(row.ratios) > most:
            wrong.append(f"{row.name}: p95 is {max(row.ratios):.2f} times that alone")
    print(
        "\n| attack | whole turn alone p50 ms | p95 | n | beside p50 ms | p95 | n | p95 / alone"
        " | gateway MiB | the attacker's statuses | a stranger's |"
        "\n|---|--:|--:|--:|--:|--:|--:|--:|---|---|---|"
    )
    for row in rows:
        cells = [*spread(row.alone.whole), *spread(row.beside.whole), f"{row.ratios[1]:.2f}"]
        cells += [", ".join(map(str, row.mebibytes)), row.statuses, row.strangers]
        print(f"| {row.name} | {' | '.join(cells)} |")
    print("\n".join(["", *(wrong or ["no turn of the victim failed, none was slowed too much"])]))
    return 1 if wrong else 0


def spread(seconds: list[float]) -> list[str]:
    """p50 and p95 in milliseconds, and of how many turns."""
    parts = [f"{1e3 * percentile(seconds, part):.0f}" for part in (0.5, 0.95)]
    return [*parts, str(len(seconds))]


if __name__ == "__main__":
    sys.exit(main())
