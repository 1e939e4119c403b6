"""`kill -9` of a gateway under streams, over and over: is anything lost, doubled or leaked?"""

import asyncio
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gateway.journal.store import OPEN, rows_in
from scripts.stack import (
    API_KEY,
    ENGINE_SECRET,
    free_port,
    migrate,
    python,
    serving_engine,
    start,
    wait_until_ready,
)
from tests.e2e.sdk_clients import SdkClients
from tests.gateway.records import ledger_rows

PROMPT_CLASSES = (
    "input_tokens",
    "cache_read_tokens",
    "cache_write_5m_tokens",
    "cache_write_1h_tokens",
)
CLASSES = (*PROMPT_CLASSES, "automatic_tokens", "computed_tokens", "output_tokens")
ENGINE_SETTINGS = {
    "ENGINE_MIN_CACHE_TOKENS": "64",
    "ENGINE_MAX_RUNNING": "64",
    "ENGINE_SYNTHETIC_DECODE_MS": "40",
    "ENGINE_LOG_LEVEL": "error",
}
BOUND_SECONDS = 120
SLOW_DISK = Path(__file__).parent / "slow_disk"


@dataclass
class Report:
    """What the clients were told against what the ledger and the engine say."""

    kills: int
    rows: int = 0
    seen_final: int = 0
    seen_begun: int = 0
    killed_rows: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    duplicates: int = 0
    left_open: int = 0
    ledger: dict[str, int] = field(default_factory=dict)
    engine: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    interrupted: list[int] = field(default_factory=list)
    close_seconds: list[float] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        return (
            not (self.lost or self.wrong or self.duplicates or self.left_open)
            and self.ledger == self.engine
            and self.leaked == 0
            and self.stats["unacknowledged"] == 0
        )

    @property
    def leaked(self) -> int:
        stats = self.stats
        return int(stats["running"] + stats["waiting"] + stats["blocks"]["active"])


class Killed:
    """A gateway on one port that is killed and started again, its journal and its ledger."""

    def __init__(self, data: Path, settings: Mapping[str, str], url: str) -> None:
        self._settings = {**settings, "HOLDFAST_DATA": str(data), "HOLDFAST_LOG_LEVEL": "error"}
        self._journal = data / "journal"
        self.url = url
        self.process = start([*python("gateway"), "serve"], self._settings)
        wait_until_ready(url, self.process)

    def kill(self) -> set[str]:
        """Kill it and return the turns that it left open."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return self.open_turns()

    def start(self) -> None:
        self.process = start([*python("gateway"), "serve"], self._settings)
        wait_until_ready(self.url, self.process)

    def open_turns(self) -> set[str]:
        return {row.id for row in rows_in(self._journal) if row.state == OPEN}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(BOUND_SECONDS)


def run_kills(
    data: Path,
    *,
    kills: int,
    streams: int,
    backend: str = "synthetic",
    database_url: str = "",
    max_tokens: int = 60,
    seed: int = 1,
    gateway_settings: Mapping[str, str] | None = None,
    disk_seconds: float = 0.0,
    kind: type[Killed] = Killed,
) -> Report:
    """Run it all; the engine lives throughout and its counters are the independent count.

    Each write of the journal waits up to `disk_seconds`, so that kills come while records are being
    written. `kind` says how the gateway is ended.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving_engine(backend, ENGINE_SETTINGS) as engine:
        engine.wait()
        settings = {
            "HOLDFAST_PORT": str(port),
            "HOLDFAST_ENGINES": f"engine-0={engine.url}",
            "HOLDFAST_API_KEY": API_KEY,
            "HOLDFAST_ENGINE_SECRET": ENGINE_SECRET,
            "HOLDFAST_MASTER_SECRET": "master-secret-for-tests-0000000000",
            "HOLDFAST_DATABASE_URL": database_url,
            **(gateway_settings or {}),
        }
        home = data / "killed"
        migrate({**settings, "HOLDFAST_DATA": str(home)})
        if disk_seconds:
            settings |= {"PYTHONPATH": str(SLOW_DISK), "SLOW_DISK_SECONDS": str(disk_seconds)}
        gateway = kind(home, settings, url)
        rng = random.Random(seed)
        model = "synthetic" if backend == "synthetic" else "holdfast-demo"
        clients = SdkClients(url, model, max_tokens, rng)
        report = Report(kills)
        try:
            asyncio.run(_kill_over_and_over(gateway, clients, report, streams, rng))
            report.stats = idle_stats(engine.url)
        finally:
            gateway.stop()
        report.left_open = len(gateway.open_turns())
        _compare(report, clients, database_url or f"sqlite:///{home / 'ledger.db'}")
    return report


async def _kill_over_and_over(
    gateway: Killed, clients: SdkClients, report: Report, streams: int, rng: random.Random
) -> None:
    running = asyncio.create_task(clients.run(streams))
    for _ in range(report.kills):
        begun = len(clients.told)
        # The kill must hit streams, so new ones must have begun.
        await until(lambda begun=begun: len(clients.told) >= begun + streams // 2)
        await asyncio.sleep(rng.uniform(0, 1))
        left = await asyncio.to_thread(gateway.kill)
        report.interrupted.append(len(left))
        await asyncio.to_thread(gateway.start)
        started = time.monotonic()
        await until(lambda left=left: not left & gateway.open_turns())
        report.close_seconds.append(time.monotonic() - started)
    clients.stopping.set()
    await running
    await until(lambda: backlog(gateway.url) == 0)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"did not happen within {BOUND_SECONDS} s")
        await asyncio.sleep(0.05)


def backlog(gateway: str) -> int:
    """The turns in the journal of the gateway at this URL."""
    reply = httpx.get(f"{gateway}/readyz", timeout=120, trust_env=False).json()
    return int(reply["journal_backlog"])


def idle_stats(engine: str) -> dict[str, Any]:
    """The engine's stats once it is idle and everything is acknowledged, or after the bound."""
    headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
    deadline = time.monotonic() + BOUND_SECONDS
    while True:
        reply = httpx.get(f"{engine}/v1/stats", headers=headers, timeout=120, trust_env=False)
        stats: dict[str, Any] = reply.json()
        is_idle = stats["running"] + stats["waiting"] + stats["unacknowledged"] == 0
        if is_idle or time.monotonic() > deadline:
            return stats
        time.sleep(0.2)


def _compare(report: Report, clients: SdkClients, url: str) -> None:
    rows = ledger_rows(url)
    by_id = {row["id"]: row for row in rows}
    report.rows, report.duplicates = len(rows), len(rows) - len(by_id)
    report.killed_rows = sum(row["outcome"] == "gateway_killed" for row in rows)
    report.seen_begun = len(clients.told)
    report.seen_final = sum(told.is_final for told in clients.told.values())
    for told in clients.told.values():
        row = by_id.get(told.turn_id)
        if row is None:
            report.lost.append(told.turn_id)
        elif any(row[name] != value for name, value in told.usage.items()) or (
            told.is_final and row["outcome"] in ("gateway_killed", "open", "client_disconnect")
        ):
            report.wrong.append(told.turn_id)
    counters = report.stats["counters"]
    report.ledger = {name: sum(row[name] for row in rows) for name in CLASSES}
    report.engine = {name: counters.get(name, 0) for name in CLASSES}
