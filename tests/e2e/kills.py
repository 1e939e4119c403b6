"""`kill -9` of a gateway under streams, over and over: is anything lost, doubled or leaked?"""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gateway.journal.file import rows_in
from gateway.journal.table import OPEN
from scripts.stack import (
    ENGINE_SECRET,
    free_port,
    gateway_environment,
    migrate,
    python,
    serving_engine,
    start,
    url_of,
    wait_until_ready,
)
from tests.e2e.fleet import Gateway
from tests.e2e.prompts import MODEL
from tests.e2e.sdk_clients import SdkClients, Told
from tests.gateway.records import ledger_rows
from tests.gateway.serving import eventually

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
Row = dict[str, Any]


@dataclass
class Report:
    """What the clients were told against what the ledger says. `interrupted`: turns by kill."""

    kills: int
    begun: int = 0
    completed: int = 0
    rows: int = 0
    duplicates: int = 0
    interrupted: list[int] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def compare(
        self, clients: SdkClients, rows: list[Row], agree: Callable[[Told, Row], bool]
    ) -> None:
        """`agree`: whether a row's outcome is that of what the client saw."""
        by_id = {row["id"]: row for row in rows}
        self.rows = len(rows)
        self.duplicates = len(rows) - len(by_id)
        self.outcomes = Counter(row["outcome"] for row in rows)
        self.begun = len(clients.told)
        self.completed = sum(answer.is_final for answer in clients.told.values())
        for answer in clients.told.values():
            row = by_id.get(answer.turn_id)
            if row is None:
                self.lost.append(answer.turn_id)
                continue
            prompt = sum(row[name] for name in PROMPT_CLASSES)
            if (
                any(row[name] != value for name, value in answer.usage.items())
                or answer.prompt_tokens not in (None, prompt)
                or not agree(answer, row)
            ):
                self.wrong.append(f"{answer} {row}")


@dataclass
class GatewayReport(Report):
    """`ledger` and `engine` are the tokens by class; `stats` are the engine's."""

    left_open: int = 0
    ledger: dict[str, int] = field(default_factory=dict)
    engine: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
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
        self._settings = {**settings, "HOLDFAST_LOG_LEVEL": "error"}
        self._journal = data / "journal"
        self.url = url
        self.start()

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
    gateway_settings: Mapping[str, str] | None = None,
    disk_seconds: float = 0.0,
    kind: type[Killed] = Killed,
) -> GatewayReport:
    """Run it all; the engine lives throughout and its counters are the independent count.

    Each write of the journal waits up to `disk_seconds`, so that kills come while records are being
    written. `kind` says how the gateway is ended.
    """
    port = free_port()
    home = data / "killed"
    report = GatewayReport(kills)
    with serving_engine(backend, ENGINE_SETTINGS) as engine:
        engine.wait()
        changes = {"HOLDFAST_DATABASE_URL": database_url, **(gateway_settings or {})}
        settings = gateway_environment(port, home, [engine.url], changes)
        migrate(settings)
        if disk_seconds:
            settings |= {"PYTHONPATH": str(SLOW_DISK), "SLOW_DISK_SECONDS": str(disk_seconds)}
        gateway = kind(home, settings, url_of(port))
        rng = random.Random(1)
        model = "synthetic" if backend == "synthetic" else MODEL
        clients = SdkClients(gateway.url, model, max_tokens, rng)
        try:
            asyncio.run(_kill_over_and_over(gateway, clients, report, streams, rng))
            report.stats = idle_stats(engine.url)
        finally:
            gateway.stop()
        report.left_open = len(gateway.open_turns())
    rows = ledger_rows(database_url or f"sqlite:///{home / 'ledger.db'}")
    report.compare(
        clients,
        rows,
        lambda answer, row: (
            not answer.is_final
            or row["outcome"] not in ("gateway_killed", "open", "client_disconnect")
        ),
    )
    report.ledger = sums(rows)
    report.engine = counted(report.stats)
    return report


async def _kill_over_and_over(
    gateway: Killed, clients: SdkClients, report: GatewayReport, streams: int, rng: random.Random
) -> None:
    running = asyncio.create_task(clients.run(streams))
    for _ in range(report.kills):
        # The kill must hit streams, so new ones must have begun.
        await clients.begun(streams // 2)
        await asyncio.sleep(rng.uniform(0, 1))
        left = await asyncio.to_thread(gateway.kill)
        report.interrupted.append(len(left))
        await asyncio.to_thread(gateway.start)
        started = time.monotonic()
        await until(lambda left=left: not left & gateway.open_turns())  # type: ignore[misc]
        report.close_seconds.append(time.monotonic() - started)
    clients.stopping.set()
    await running
    await until(lambda: backlog(gateway.url) == 0)


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(eventually, condition, BOUND_SECONDS)


def backlog(gateway: str) -> int:
    """The turns in the journal of the gateway at this URL."""
    return Gateway(gateway).backlog


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


def sums(rows: list[Row]) -> dict[str, int]:
    """A ledger's tokens by class."""
    return {name: sum(row[name] for row in rows) for name in CLASSES}


def counted(stats: dict[str, Any]) -> dict[str, int]:
    """An engine's tokens by class."""
    return {name: stats["counters"].get(name, 0) for name in CLASSES}
