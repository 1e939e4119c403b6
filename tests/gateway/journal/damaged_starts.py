"""What the next start makes of a damaged data directory: in this process, and by a real gateway."""

import asyncio
import json
import os
import sqlite3
import subprocess
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from structlog.testing import capture_logs

from engine.protocol import FinalCounts, KeptRecord
from gateway.base.errors import GatewayError
from gateway.base.metrics import Metrics
from gateway.base.settings import DatabaseSettings
from gateway.cli.migrate import migrate
from gateway.journal.charge import Billing
from gateway.journal.drain import Drain
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.ledger.check import problems, stored_turns
from gateway.ledger.database import Ledger
from gateway.prices.files import load_prices
from scripts.stack import ENGINE_SECRET, ROOT, free_port, gateway_environment, python, start
from tests.gateway.journal.damaged_turns import ENGINE, Truth, counts_of
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import serve

_STEPS = 40
_TELLING = (
    "set_aside",
    "turn_lost",
    "turn_unsure",
    "lost_turns",
    "journal_damaged",
    "ledger_damage",
    "names_missing",
)
_STEADY_SECONDS = 3.0
_WAIT_SECONDS = 120.0


@dataclass
class Outcome:
    """What became of the turns of one trial, by their ids. `wrong` is anything else that is."""

    seed: int
    damages: list[str]
    is_process: bool = False
    has_started: bool = True
    said: str = ""
    intact: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    collateral: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Found:
    """What there is after a start. `ledger_is_gone`: the ledger as a whole is said to be broken."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    closed: dict[str, tuple[str, int]] = field(default_factory=dict)
    named: str = ""
    ledger_is_gone: bool = False

    @property
    def names_are_missing(self) -> bool:
        """Whether the list of drained turns is told to be short: it and the ledger are hurt."""
        return "names_missing" in self.named


def judge(truth: dict[str, Truth], found: Found, outcome: Outcome) -> None:
    hurt = {"journal" if each.startswith("journal/") else "ledger" for each in outcome.damages}
    for turn_id, true in truth.items():
        row = found.rows.get(turn_id)
        is_row = row is not None and true.is_row(row)
        is_open = true.stage == "open" and turn_id in found.open
        if is_row or is_open or found.closed.get(turn_id) == true.end:
            outcome.intact.append(turn_id)
            continue
        was_in = "ledger" if true.stage == "drained" else "journal"
        is_told = found.ledger_is_gone or found.names_are_missing
        is_known_lost = is_told and was_in == "ledger"
        if turn_id in found.named or is_known_lost:
            outcome.named.append(turn_id)
        else:
            outcome.unnamed.append(turn_id)
        if was_in not in hurt:
            outcome.collateral.append(turn_id)


class _Witness:
    """The engine that ran the turns, in this process."""

    name = ENGINE
    is_ready = True

    def __init__(self, truth: dict[str, Truth]) -> None:
        self.counts = {
            turn_id: counts_of(turn_id) for turn_id, true in truth.items() if true.stage == "open"
        }

    async def unacknowledged(self) -> list[FinalCounts]:
        return list(self.counts.values())

    async def ack(self, request_ids: list[str], /) -> None:
        for request_id in request_ids:
            self.counts.pop(request_id, None)

    async def records(self, _request_ids: list[str], /) -> list[KeptRecord]:
        return []

    async def drained(self, _engine: str, request_ids: list[str]) -> None:
        await self.ack(request_ids)

    async def cancel(self, _request_id: str, /) -> bool:
        return False


async def start_here(data: Path, truth: dict[str, Truth], outcome: Outcome) -> None:
    """The parts of a start, one after the other, and a look at every turn."""
    with capture_logs() as logged:
        said, found = await _start_here(data, truth, outcome)
    _conclude(truth, found, outcome, [*said, *_telling("\n".join(map(str, logged)))])


async def _start_here(
    data: Path, truth: dict[str, Truth], outcome: Outcome
) -> tuple[list[str], Found]:
    """What was said besides the log, and what there is then."""
    said: list[str] = []
    try:
        await asyncio.to_thread(migrate, DatabaseSettings(data=data))
    except GatewayError as error:
        said.append(str(error))
    found = Found(ledger_is_gone=bool(said))
    try:
        journal = Journal(data / "journal").start()
    except GatewayError as error:
        outcome.has_started = False
        said.append(str(error))
        return said, found
    ledger = Ledger(f"sqlite+aiosqlite:///{data}/ledger.db")
    witness, metrics = _Witness(truth), Metrics()
    charge = Billing(load_prices(), metrics).charge
    reconciler = Reconciler(journal, [witness], metrics, charge, time.monotonic, ledger.known)
    drain = Drain(journal, ledger.insert_turns, witness.drained, metrics, ledger.known)
    try:
        await reconciler.recover()
        for _ in range(_STEPS):
            await reconciler.step(is_sweep=True)
            if not await drain.step():
                break
        found.rows = await _rows(ledger)
        said += [line async for line in problems(ledger, lambda: asyncio.sleep(0))]
    except GatewayError as error:
        said.append(str(error))
        found.ledger_is_gone = True
    said += await _look_into(journal, found)
    await ledger.close()
    await journal.stop()
    return said, found


async def _look_into(journal: Journal, found: Found) -> list[str]:
    """Note what waits in the journal; return what was set aside."""
    found.open = {each.id for each in await journal.open_turns()}
    found.closed = {
        each.id: (each.outcome, each.output_tokens) for each in await journal.closed_turns(1000)
    }
    return await journal.set_aside_turns()


async def _rows(ledger: Ledger) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in await stored_turns(ledger)}


def _conclude(truth: dict[str, Truth], found: Found, outcome: Outcome, said: Iterable[str]) -> None:
    found.named = "\n".join(said)
    outcome.said = found.named
    judge(truth, found, outcome)


def start_a_gateway(data: Path, truth: dict[str, Truth], outcome: Outcome) -> None:
    """`migrate` and `serve`, as an operator starts them, and a look at what they left."""
    engine = ScriptedEngine(secret=ENGINE_SECRET)
    engine.final = dict(_Witness(truth).counts)
    log = data.parent / "gateway.log"
    with serve(engine) as engine_url:
        port = free_port()
        environment = gateway_environment(port, data, [engine_url])
        migrated = subprocess.run(
            [*python("gateway"), "migrate"],
            env={**os.environ, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if migrated.returncode and len(migrated.stderr.strip().splitlines()) != 1:
            outcome.wrong.append(f"migrate says more than one line: {migrated.stderr[-300:]}")
        process = start([*python("gateway"), "serve"], environment, log)
        try:
            health = _settled(f"http://127.0.0.1:{port}", process)
        finally:
            process.kill()
            process.wait()
    told = log.read_text("utf-8", "replace")
    outcome.has_started = health is not None
    if health is None and "Traceback" in told:
        outcome.wrong.append(f"a traceback instead of one line: {told[-300:]}")
    if health is not None and not health["ledger_damage"] and health["ledger"] is None:
        outcome.wrong += _wrong_sums(data)
    is_gone = bool(migrated.returncode or (health and health["ledger"]))
    is_gone |= any("the ledger's file is damaged" in each for each in _damage(health))
    found = Found(ledger_is_gone=is_gone)
    aside = asyncio.run(_left_in(data, found))
    lines = [migrated.stderr, *_telling(told), json.dumps(health), *aside]
    _conclude(truth, found, outcome, lines)


def _damage(health: dict[str, Any] | None) -> list[str]:
    return list((health or {}).get("ledger_damage") or [])


def _telling(log: str) -> list[str]:
    """The log's lines that tell of damage; an id in any other line names nothing."""
    return [line for line in log.splitlines() if any(word in line for word in _TELLING)]


def _settled(url: str, process: "subprocess.Popen[bytes]") -> dict[str, Any] | None:
    """The last readiness report, once nothing changes any more; None where the process ended."""
    deadline, since, last = time.monotonic() + _WAIT_SECONDS, 0.0, None
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return None
        try:
            health = httpx.get(f"{url}/readyz", timeout=10).json()
        except httpx.TransportError:
            time.sleep(0.1)
            continue
        state = (health["journal"]["backlog"], health["ledger"], health["ledger_damage"])
        if state != last:
            last, since = state, time.monotonic()
        is_over = health["ledger_damage"] is not None or health["ledger"] is not None
        if is_over and time.monotonic() - since > _STEADY_SECONDS:
            return dict(health)
        time.sleep(0.2)
    return dict(health)


async def _left_in(data: Path, found: Found) -> list[str]:
    """Note the ledger's rows and what waits in the journal; return what was set aside there."""
    if (data / "ledger.db").exists():
        ledger = Ledger(f"sqlite+aiosqlite:///{data}/ledger.db")
        with suppress(GatewayError, ValueError):
            found.rows = await _rows(ledger)
        await ledger.close()
    journal = Journal(data / "journal").start()
    aside = await _look_into(journal, found)
    await journal.stop()
    return aside


def _wrong_sums(data: Path) -> list[str]:
    """What is wrong with the sums of hours and days, which must be those of the rows."""
    with closing(sqlite3.connect(data / "ledger.db")) as db:
        (turns,) = db.execute("SELECT coalesce(sum(output_tokens), 0) FROM turns").fetchone()
        for width in (3600, 86_400):
            query = "SELECT sum(output_tokens) FROM turn_rollups WHERE width_seconds = ?"
            summed = db.execute(query, (width,)).fetchone()[0] or 0
            if summed != turns:
                return [f"the sums have {summed} output tokens, the turns {turns}: not a word"]
    return []
