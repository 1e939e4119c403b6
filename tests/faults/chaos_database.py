"""The database is away while requests keep coming: served throughout, nothing lost, not slower.

A real gateway in front of a real synthetic engine gets so many requests a second, each at its time
whether or not the ones before were answered. First with a database that works, then for so many
minutes without one: PostgreSQL frozen (SIGSTOP) for the first half and stopped for the second,
SQLite locked by another process all the time. Then the database returns, and the ledger is compared
with the answers. Ends with 1 when a request was not served, a row is missing, there twice or wrong,
or (`--max-added-ms`) the 99th percentile grew by more.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from scripts.bench.load import MESSAGES, ask
from scripts.bench.report import markdown, percentile
from scripts.setup.options import parse
from scripts.stack import API_HEADERS, running_stack
from tests.e2e.outage import (
    data_directory,
    frozen_postgres,
    locked_sqlite,
    stopped_postgres,
)
from tests.gateway.records import ledger_rows
from tests.postgres import new_database, running_postgres

ENGINE = {
    "ENGINE_SYNTHETIC_DECODE_MS": "2",
    "ENGINE_MAX_RUNNING": "64",
    "ENGINE_LOG_LEVEL": "error",
}
DRAIN_SECONDS = 300


@dataclass
class Phase:
    """`seconds` are those of the answers, `usage` what they said, by turn."""

    name: str
    asked: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    usage: dict[str, tuple[int, int]] = field(default_factory=dict)

    def percentile(self, share: float) -> float:
        """In milliseconds."""
        return percentile(self.seconds, share) * 1000


def main() -> int:
    options = parse(
        __doc__,
        minutes=(10.0, "without the database"),
        before=(2.0, "minutes of the same load before"),
        rate=(20.0, "requests a second"),
        database=("postgres", None, ["sqlite", "postgres"]),
        max_added_ms=5.0,
    )
    with TemporaryDirectory(prefix="chaos-") as directory:
        data = Path(directory)
        with database(options.database, data) as (url, faults):
            settings = {"HOLDFAST_DATABASE_URL": url, "HOLDFAST_LOG_LEVEL": "error"}
            with running_stack(data, "synthetic", ENGINE, settings) as stack:
                phases, drain = asyncio.run(measure(stack.gateway, options, faults))
            # The gateway has been stopped; the server goes with its context.
            rows = ledger_rows(url or f"sqlite:///{data / 'ledger.db'}")
    return report(options, phases, drain, rows)


@contextmanager
def database(kind: str, data: Path) -> Iterator[tuple[str, list[Any]]]:
    """The ledger's URL and the faults, each a name and what makes a context of it."""
    if kind == "sqlite":
        yield "", [("locked", lambda: locked_sqlite(data / "ledger.db"))]
        return
    with running_postgres() as server:
        url = new_database(server, "chaos")
        where = data_directory(url)
        frozen = ("frozen", lambda: frozen_postgres(where))
        yield url, [frozen, ("stopped", lambda: stopped_postgres(where))]


async def measure(
    url: str, options: argparse.Namespace, faults: list[Any]
) -> tuple[list[Phase], float]:
    # Shorter than the server's own, so that no request goes out on a connection that it just ended.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
    async with httpx.AsyncClient(timeout=30, limits=limits, trust_env=False) as http:
        await load(http, url, Phase("warm-up"), options.rate, 10)
        phases = [Phase("before")]
        await load(http, url, phases[0], options.rate, options.before * 60)
        for name, fault in faults:
            phases.append(Phase(name))
            with fault():
                seconds = options.minutes * 60 / len(faults)
                await load(http, url, phases[-1], options.rate, seconds)
        phases.append(Phase("after"))
        started = time.monotonic()
        draining = asyncio.create_task(drained(http, url))
        await load(http, url, phases[-1], options.rate, 30)
        await draining
        return phases, draining.result() - started


async def load(
    http: httpx.AsyncClient, url: str, phase: Phase, rate: float, seconds: float
) -> None:
    """An open loop: request number n goes out at n / rate, however long others take."""
    started = time.monotonic()
    tasks = []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, started + number / rate - time.monotonic()))
        tasks.append(asyncio.create_task(send(http, url, phase)))
    await asyncio.gather(*tasks)


async def send(http: httpx.AsyncClient, url: str, phase: Phase) -> None:
    phase.asked += 1
    question = f"Question {phase.asked} of {phase.name}."
    body = {"model": "synthetic", "max_tokens": 4}
    body |= {"messages": [{"role": "user", "content": question}]}
    answer = await ask(http, body, f"{url}{MESSAGES}", API_HEADERS)
    if answer.status:
        phase.seconds.append(answer.seconds)
    if answer.error:
        phase.failures.append(answer.error)
    else:
        usage = answer.usage
        phase.usage[answer.id] = (usage["input_tokens"], usage["output_tokens"])


async def drained(http: httpx.AsyncClient, url: str) -> float:
    """Wait until the journal holds no more than what is in flight; return when that was."""
    deadline = time.monotonic() + DRAIN_SECONDS
    while (await http.get(f"{url}/readyz")).json()["journal_backlog"] > 50:
        if time.monotonic() > deadline:
            raise TimeoutError("the journal was not drained")
        await asyncio.sleep(0.1)
    return time.monotonic()


def differences(rows: list[dict[str, Any]], phases: list[Phase]) -> list[str]:
    ledger = {row["id"]: (row["input_tokens"], row["output_tokens"]) for row in rows}
    problems = [f"{len(rows) - len(ledger)} duplicates"] if len(ledger) != len(rows) else []
    for phase in phases:
        missing = phase.usage.keys() - ledger.keys()
        wrong = [i for i, usage in phase.usage.items() if i in ledger and ledger[i] != usage]
        if missing or wrong:
            problems.append(f"{phase.name}: {len(missing)} rows missing, {len(wrong)} wrong")
    return problems


def report(
    options: argparse.Namespace, phases: list[Phase], drain: float, rows: list[dict[str, Any]]
) -> int:
    """Print the table; return the exit status."""
    problems, lines = differences(rows, phases), []
    for phase in phases:
        p50, p99 = phase.percentile(0.5), phase.percentile(0.99)
        added = [p50 - phases[0].percentile(0.5), p99 - phases[0].percentile(0.99)]
        failed = len(phase.failures)
        cells = [f"{p50:.1f}", f"{p99:.1f}", *(f"{each:+.1f}" for each in added)]
        lines.append([phase.name, phase.asked, failed, *cells])
        problems += [f"{phase.name}: {failed} not served: {phase.failures[0]}"] if failed else []
        if phase.name != "after" and added[1] > options.max_added_ms:
            problems.append(f"{phase.name}: p99 grew by more than {options.max_added_ms} ms")
    print(f"\n{options.database}, {options.rate:g} requests a second\n")
    heads = ("database", "asked", "not served", "p50 ms", "p99 ms", "added p50", "added p99")
    print(markdown(heads, lines))
    answered = sum(len(phase.usage) for phase in phases)
    print(f"\n{answered} answers, {len(rows)} rows, drained {drain:.1f} s after the return")
    print("\n".join(problems) or "nothing lost, nothing twice", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
