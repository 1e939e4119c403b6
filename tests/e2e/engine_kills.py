"""`kill -9` of one of several engines under load, over and over: does any client have to know?

Some rounds stop the engine's process instead (SIGSTOP), so that its connections stay open and
nothing comes: it is killed later, or goes on as if nothing had been.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.fleet import Fleet, Gateway, running_fleet
from tests.e2e.kills import (
    BOUND_SECONDS,
    CLASSES,
    PROMPT_CLASSES,
    backlog,
    idle_stats,
    until,
)
from tests.e2e.sdk_clients import SdkClients, Told
from tests.gateway.records import ledger_rows

ENGINE_SETTINGS = {
    "ENGINE_MIN_CACHE_TOKENS": "64",
    "ENGINE_SYNTHETIC_PREFILL_US": "50",
    "ENGINE_SYNTHETIC_DECODE_MS": "40",
    "ENGINE_LOG_LEVEL": "error",
}
GATEWAY_SETTINGS = {"HOLDFAST_LOG_LEVEL": "error"}
NUM_ENGINES = 4
# Longer than the silence after which the gateway gives an engine up.
HANG_SECONDS = 20.0


@dataclass
class Report:
    """What the clients were told against what the ledger and the engines say.

    `books` are, of each engine's last epoch, class by class, the engine's count and the ledger's.
    An epoch in `retired` was hung and lived on: it also computed what was then asked elsewhere.
    """

    kills: int
    hangs: int = 0
    asked: int = 0
    begun: int = 0
    completed: int = 0
    broken: int = 0
    early: Counter[str] = field(default_factory=Counter)
    silent: Counter[str] = field(default_factory=Counter)
    interrupted: list[int] = field(default_factory=list)
    rows: int = 0
    duplicates: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    retries: dict[str, int] = field(default_factory=dict)
    reconciled: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left_open: int = 0
    leaked: int = 0
    unacknowledged: int = 0
    books: dict[str, tuple[dict[str, int], dict[str, int]]] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)

    @property
    def unbalanced(self) -> list[str]:
        """Epochs whose ledger says more than the engine, or other than one that never hung."""
        return [
            epoch
            for epoch, (engine, ledger) in self.books.items()
            if any(ledger[name] > engine[name] for name in CLASSES)
            or (engine != ledger and epoch not in self.retired)
        ]

    @property
    def problems(self) -> dict[str, object]:
        """What must be empty or 0 and is not."""
        found: dict[str, object] = {
            "failed before the first byte": dict(self.early),
            "broken without an error event": dict(self.silent),
            "turns without a row, or more rows than turns": abs(self.asked - self.rows),
            "lost": self.lost,
            "wrong": self.wrong,
            "duplicates": self.duplicates,
            "left open": self.left_open,
            "requests and blocks left in engines": self.leaked,
            "counts left unacknowledged": self.unacknowledged,
            "unbalanced": self.unbalanced,
        }
        return {name: value for name, value in found.items() if value}


def run_engine_kills(
    data: Path, *, kills: int, clients: int, hangs: int = 0, max_tokens: int = 60, seed: int = 1
) -> Report:
    """Run it all. `hangs` of the rounds are hangs, at random places."""
    with running_fleet(data, NUM_ENGINES, 1, ENGINE_SETTINGS, GATEWAY_SETTINGS) as fleet:
        more = {"hangs": hangs, "max_tokens": max_tokens, "seed": seed}
        ledger = data / "gateway-0" / "ledger.db"
        return kill_in(fleet, ledger, kills=kills, clients=clients, **more)


def kill_in(
    fleet: Fleet,
    ledger: Path,
    *,
    kills: int,
    clients: int,
    hangs: int = 0,
    max_tokens: int = 60,
    seed: int = 1,
) -> Report:
    """As `run_engine_kills`, in a running fleet that is idle. `ledger` is its gateway's."""
    rng = random.Random(seed)
    report = Report(kills, hangs)
    gateway = fleet.gateways[0]
    asyncio.run(until(lambda: backlog(gateway.url) == 0))
    before = {row["id"] for row in ledger_rows(f"sqlite:///{ledger}")}
    asking = SdkClients(gateway.url, gateway.model, max_tokens, rng)
    asyncio.run(_kill_over_and_over(fleet, asking, report, clients, rng))
    report.retries = _counted(gateway, "holdfast_gateway_retries_total")
    report.reconciled = _counted(gateway, "holdfast_gateway_reconciled_turns_total")
    rows = ledger_rows(f"sqlite:///{ledger}")
    _read_books(fleet, report, rows)
    _compare(report, asking, [row for row in rows if row["id"] not in before])
    return report


async def _kill_over_and_over(
    fleet: Fleet, asking: SdkClients, report: Report, clients: int, rng: random.Random
) -> None:
    gateway = fleet.gateways[0]
    hanging = set(rng.sample(range(report.kills), report.hangs))
    running = asyncio.create_task(asking.run(clients))
    for number in range(report.kills):
        # The kill must hit answers, so new ones must have begun.
        enough = len(asking.told) + clients
        await until(lambda enough=enough: len(asking.told) >= enough)  # type: ignore[misc]
        await asyncio.sleep(rng.uniform(0, 1))
        running_at = {
            number: (await _engine(gateway, number))["routing"]["running"]
            for number in range(len(fleet.engines))
        }
        engine = rng.choice([number for number, count in running_at.items() if count] or [0])
        report.interrupted.append(running_at[engine])
        lives_on = number in hanging and rng.random() < 0.5
        if number in hanging:
            fleet.processes[engine].send_signal(signal.SIGSTOP)
            await asyncio.sleep(HANG_SECONDS)
        if lives_on:
            report.retired.add((await _engine(gateway, engine))["description"]["epoch"])
            fleet.processes[engine].send_signal(signal.SIGCONT)
        else:
            await _replace(fleet, engine, rng.uniform(0, 1.5))
        await _until_ready(gateway, engine)
    asking.stopping.set()
    await running
    report.asked = asking.num_asked
    await until(lambda: backlog(gateway.url) == 0)


async def _replace(fleet: Fleet, engine: int, pause: float) -> None:
    """Kill it; a new process begins at the same address."""
    gateway = fleet.gateways[0]
    before = (await _engine(gateway, engine))["description"]["epoch"]
    await asyncio.to_thread(fleet.kill, engine)
    await asyncio.sleep(pause)
    await asyncio.to_thread(fleet.restart, engine)
    deadline = time.monotonic() + BOUND_SECONDS
    while (await _engine(gateway, engine))["description"]["epoch"] == before:
        assert time.monotonic() < deadline, "the new epoch was not seen"
        await asyncio.sleep(0.1)


async def _until_ready(gateway: Gateway, engine: int) -> None:
    deadline = time.monotonic() + BOUND_SECONDS
    while (await _engine(gateway, engine))["status"] != "ready":
        assert time.monotonic() < deadline, "the engine did not come back"
        await asyncio.sleep(0.1)


async def _engine(gateway: Gateway, number: int) -> dict[str, Any]:
    return await asyncio.to_thread(gateway.engine, f"engine-{number}")


def _counted(gateway: Gateway, name: str) -> dict[str, int]:
    """A counter with one label, by its value."""
    text = httpx.get(f"{gateway.url}/metrics", timeout=120, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in lines}


def _read_books(fleet: Fleet, report: Report, rows: list[dict[str, Any]]) -> None:
    for url in fleet.engines:
        stats = idle_stats(url)
        report.leaked += stats["running"] + stats["waiting"] + stats["blocks"]["active"]
        report.unacknowledged += stats["unacknowledged"]
        mine = [row for row in rows if row["epoch"] == stats["epoch"]]
        counted = {name: stats["counters"].get(name, 0) for name in CLASSES}
        report.books[stats["epoch"]] = counted, {n: sum(row[n] for row in mine) for n in CLASSES}


def _compare(report: Report, asking: SdkClients, rows: list[dict[str, Any]]) -> None:
    by_id = {row["id"]: row for row in rows}
    report.begun, report.broken = len(asking.told), len(asking.broken)
    report.completed = sum(told.is_final for told in asking.told.values())
    report.early, report.silent = asking.early, asking.silent
    report.rows, report.duplicates = len(rows), len(rows) - len(by_id)
    report.outcomes = Counter(row["outcome"] for row in rows)
    report.left_open = report.outcomes["open"]
    for told in asking.told.values():
        row = by_id.get(told.turn_id)
        if row is None:
            report.lost.append(told.turn_id)
        elif not _agree(told, row):
            report.wrong.append(f"{told} {row}")


def _agree(told: Told, row: dict[str, Any]) -> bool:
    """Whether the row says what the client was told, and how it ended."""
    if any(row[name] != value for name, value in told.usage.items()):
        return False
    prompt = sum(row[name] for name in PROMPT_CLASSES)
    if told.prompt_tokens is not None and prompt != told.prompt_tokens:
        return False
    return bool((row["outcome"] in ("stop", "length")) == told.is_final)
