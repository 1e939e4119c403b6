"""`kill -9` of one of several engines under load, over and over: does any client have to know?

Some rounds stop the engine's process instead (SIGSTOP), so that its connections stay open and
nothing comes: it is killed later, or goes on as if nothing had been.
"""

import asyncio
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.e2e.fleet import Fleet, Gateway, running_fleet
from tests.e2e.kills import CLASSES, Report, counted, idle_stats, sums, until
from tests.e2e.sdk_clients import SdkClients

ENGINE_SETTINGS = {
    "ENGINE_MIN_CACHE_TOKENS": "64",
    "ENGINE_SYNTHETIC_PREFILL_US": "50",
    "ENGINE_SYNTHETIC_DECODE_MS": "40",
}
NUM_ENGINES = 4
# Longer than the silence after which the gateway gives an engine up.
HANG_SECONDS = 20.0


@dataclass
class EngineReport(Report):
    """`books` are, of each engine's last epoch, class by class, the engine's count and the
    ledger's. An epoch in `retired` was hung and lived on: it also computed what was then asked
    elsewhere."""

    hangs: int = 0
    asked: int = 0
    broken: int = 0
    early: Counter[str] = field(default_factory=Counter)
    silent: Counter[str] = field(default_factory=Counter)
    retries: dict[str, int] = field(default_factory=dict)
    reconciled: dict[str, int] = field(default_factory=dict)
    leaked: int = 0
    unacknowledged: int = 0
    books: dict[str, tuple[dict[str, int], dict[str, int]]] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)

    @property
    def problems(self) -> dict[str, object]:
        """What must be empty or 0 and is not."""
        numbers: dict[str, object] = {
            "failed before the first byte": dict(self.early),
            "broken without an error event": dict(self.silent),
            "turns without a row, or more rows than turns": abs(self.asked - self.rows),
            "lost": self.lost,
            "wrong": self.wrong,
            "duplicates": self.duplicates,
            "left open": self.outcomes["open"],
            "requests and blocks left in engines": self.leaked,
            "counts left unacknowledged": self.unacknowledged,
            # Whose ledger says more than the engine, or other than one that never hung. A machine
            # so busy that the gateway gave turns up for silence makes engines compute more too.
            "unbalanced": [
                epoch
                for epoch, (engine, ledger) in self.books.items()
                if any(ledger[name] > engine[name] for name in CLASSES)
                or (
                    engine != ledger
                    and epoch not in self.retired
                    and not self.retries.get("timeout")
                )
            ],
        }
        return {name: value for name, value in numbers.items() if value}


def run_engine_kills(data: Path, *, kills: int, clients: int, hangs: int = 0) -> EngineReport:
    """Run it all. `hangs` of the rounds are hangs, at random places."""
    with running_fleet(data, NUM_ENGINES, 1, ENGINE_SETTINGS) as fleet:
        return kill_in(fleet, kills=kills, clients=clients, hangs=hangs)


def kill_in(
    fleet: Fleet, *, kills: int, clients: int, hangs: int = 0, max_tokens: int = 60
) -> EngineReport:
    """As `run_engine_kills`, in a running fleet that is idle."""
    rng = random.Random(1)
    report = EngineReport(kills, hangs=hangs)
    gateway = fleet.gateway
    before = {row["id"] for row in gateway.rows()}
    asking = SdkClients(gateway.url, gateway.model, max_tokens, rng)
    asyncio.run(_kill_over_and_over(fleet, asking, report, clients, rng))
    report.retries = _counted(gateway, "holdfast_gateway_retries_total")
    report.reconciled = _counted(gateway, "holdfast_gateway_reconciled_turns_total")
    rows = gateway.rows()
    for url in fleet.engines:
        stats = idle_stats(url)
        report.leaked += stats["running"] + stats["waiting"] + stats["blocks"]["active"]
        report.unacknowledged += stats["unacknowledged"]
        mine = [row for row in rows if row["epoch"] == stats["epoch"]]
        report.books[stats["epoch"]] = counted(stats), sums(mine)
    report.broken = len(asking.broken)
    report.early = asking.early
    report.silent = asking.silent
    report.compare(
        asking,
        [row for row in rows if row["id"] not in before],
        lambda answer, row: (row["outcome"] in ("stop", "length")) == answer.is_final,
    )
    return report


async def _kill_over_and_over(
    fleet: Fleet, asking: SdkClients, report: EngineReport, clients: int, rng: random.Random
) -> None:
    gateway = fleet.gateway
    hanging = set(rng.sample(range(report.kills), report.hangs))
    running = asyncio.create_task(asking.run(clients))
    for number in range(report.kills):
        # The kill must hit answers, so new ones must have begun.
        await asking.begun(clients)
        await asyncio.sleep(rng.uniform(0, 1))
        running_at = {
            number: (await asyncio.to_thread(gateway.engine, number))["routing"]["running"]
            for number in range(len(fleet.engines))
        }
        engine = rng.choice([number for number, count in running_at.items() if count] or [0])
        report.interrupted.append(running_at[engine])
        lives_on = number in hanging and rng.random() < 0.5
        if number in hanging:
            fleet.processes[engine].send_signal(signal.SIGSTOP)
            await asyncio.sleep(HANG_SECONDS)
        before = await asyncio.to_thread(_epoch, gateway, engine)
        if lives_on:
            report.retired.add(before)
            fleet.processes[engine].send_signal(signal.SIGCONT)
        else:
            await asyncio.to_thread(fleet.kill, engine)
            await asyncio.sleep(rng.uniform(0, 1.5))
            await asyncio.to_thread(fleet.restart, engine)
            await until(lambda e=engine, b=before: _epoch(gateway, e) != b)  # type: ignore[misc]
        await until(lambda e=engine: gateway.engine(e)["status"] == "ready")  # type: ignore[misc]
    asking.stopping.set()
    await running
    report.asked = asking.num_asked


def _epoch(gateway: Gateway, engine: int) -> str:
    epoch: str = gateway.engine(engine)["description"]["epoch"]
    return epoch


def _counted(gateway: Gateway, name: str) -> dict[str, int]:
    """A counter with one label, by its value."""
    text = httpx.get(f"{gateway.url}/metrics", timeout=120, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in lines}
