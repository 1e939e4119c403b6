"""Limits of workspaces over three gateways under load, one of them killed: is more let through?

Three gateways share a PostgreSQL database and an engine. Clients of four workspaces, one limit
each, ask all gateways at random, more often than is allowed. In the middle one gateway is ended by
`kill -9` and started again. What was let through is counted outside: by the clients' answers and,
of money, by the ledger's costs. FAULTS=full does it for minutes.

A bucket of N a minute begins full, so in S seconds it lets N * (1 + S / 60) through, and not more.
"""

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from scripts.stack import (
    API_HEADERS,
    ENGINE_SECRET,
    free_port,
    gateway_environment,
    migrate,
    serving_engine,
    stop,
    url_of,
)
from tests.e2e.kills import Killed, idle_stats
from tests.faults import sizes
from tests.gateway.admin_client import Admin
from tests.gateway.records import ledger_rows
from tests.gateway.serving import eventually
from tests.postgres import new_database

REQUESTS = 60
TOKENS = 10_000
CONCURRENCY = 4
SPEND = 400_000_000
LIMITS: dict[str, dict[str, int]] = {
    "requests": {"requests_per_minute": REQUESTS},
    "tokens": {"tokens_per_minute": TOKENS},
    "concurrency": {"max_concurrency": CONCURRENCY},
    "spend": {"monthly_spend_nano": SPEND},
}
ALLOWED = 1.01
PRICES = """[[price]]
model = "reference"
from = 2026-01-01
input = "10"
write_5m = "12.5"
write_1h = "20"
read = "1"
output = "50"
"""
ENGINE = {
    "ENGINE_MAX_RUNNING": "64",
    "ENGINE_SYNTHETIC_DECODE_MS": "20",
    "ENGINE_MIN_CACHE_TOKENS": "64",
    "ENGINE_LOG_LEVEL": "error",
}


@dataclass
class Turn:
    """One turn that was let through, at the time of its first event."""

    at: float
    tokens: int


@dataclass
class Seen:
    turns: list[Turn] = field(default_factory=list)
    refused: int = 0
    failed: int = 0


Shares = dict[str, tuple[float, Seen]]


def share_of_bucket(times: list[tuple[float, int]], per_minute: int) -> float:
    """The most that any stretch of time used, as a share of what a bucket lets through in it."""
    times = sorted(times)
    sums = [0]
    for _, amount in times:
        sums.append(sums[-1] + amount)
    pairs = combinations(range(len(times)), 2)
    return max(
        (
            (sums[last + 1] - sums[first])
            / (per_minute * (1 + (times[last][0] - times[first][0]) / 60))
            for first, last in pairs
        ),
        default=0.0,
    )


class Gateways:
    """Three gateways of one database; the last can be killed and started again."""

    def __init__(self, folder: Path, engine: str, database: str) -> None:
        self.database = database
        prices = folder / "prices.toml"
        prices.write_text(PRICES)
        shared = {
            "HOLDFAST_DATABASE_URL": database,
            "HOLDFAST_PRICES": str(prices),
            "HOLDFAST_QUEUE_SECONDS": "0",
        }
        environments = [
            gateway_environment(free_port(), folder / name, [engine], shared) for name in "abc"
        ]
        migrate(environments[0])
        self._all = [
            Killed(
                Path(environment["HOLDFAST_DATA"]),
                environment,
                url_of(int(environment["HOLDFAST_PORT"])),
            )
            for environment in environments
        ]
        self.last = self._all[-1]
        self.urls = [gateway.url for gateway in self._all]
        eventually(
            lambda: all(report["limits_hold"] == "all_gateways" for report in self.readiness())
        )

    def readiness(self) -> list[dict[str, Any]]:
        replies = (httpx.get(f"{url}/readyz", timeout=120, trust_env=False) for url in self.urls)
        return [reply.json() for reply in replies]

    def is_drained(self) -> bool:
        return all(report["journal_backlog"] == 0 for report in self.readiness())

    def stop(self) -> None:
        stop(*(gateway.process for gateway in self._all))


@contextmanager
def running(folder: Path, postgres: str) -> Iterator[tuple[Gateways, str]]:
    with serving_engine("synthetic", ENGINE) as engine, ExitStack() as stack:
        engine.wait()
        gateways = Gateways(folder, engine.url, new_database(postgres, uuid4().hex))
        stack.callback(gateways.stop)
        yield gateways, engine.url


def ask(client: httpx.Client, url: str, key: str, rng: random.Random, tally: Seen) -> bool:
    """One streamed turn of 20 to 400 tokens of prompt and up to 40 of answer; whether it ended."""
    words = " ".join(str(rng.random()) for _ in range(rng.randrange(1, 20)))
    body = {
        "model": "synthetic",
        "max_tokens": rng.randrange(1, 40),
        "stream": True,
        "messages": [{"role": "user", "content": words}],
    }
    headers = {**API_HEADERS, "x-api-key": key}
    turn: Turn | None = None
    try:
        with client.stream("POST", f"{url}/v1/messages", json=body, headers=headers) as reply:
            if reply.status_code in (402, 429):
                tally.refused += 1
                return False
            assert reply.status_code == 200, reply.read()
            turn = Turn(time.monotonic(), 0)
            tally.turns.append(turn)
            for line in reply.iter_lines():
                if line.startswith("data:"):
                    event = json.loads(line[5:])
                    usage = event.get("message", event).get("usage") or {}
                    tokens = sum(value for value in usage.values() if isinstance(value, int))
                    turn.tokens = max(turn.tokens, tokens)
    except httpx.TransportError:
        tally.failed += 1
        return False
    return True


def load(
    gateways: Gateways, names: Sequence[str], seconds: float, clients: int, seed: int
) -> dict[str, Seen]:
    """Ask with `clients` threads a workspace; kill a gateway at a third, start it at two thirds."""
    admin = Admin(gateways.urls[0])
    tallies = {name: Seen() for name in names}
    ends = time.monotonic() + seconds

    def run(name: str, key: str, number: int) -> None:
        rng = random.Random(f"{seed}-{name}-{number}")
        with httpx.Client(timeout=120, trust_env=False) as client:
            while time.monotonic() < ends:
                if not ask(client, rng.choice(gateways.urls), key, rng, tallies[name]):
                    time.sleep(rng.uniform(0, 0.2))

    with ThreadPoolExecutor(clients * len(names)) as pool:
        futures = []
        for name in names:
            admin.workspace(name, **LIMITS[name])
            key = admin.make_key(name)[1]
            futures += [pool.submit(run, name, key, number) for number in range(clients)]
        time.sleep(seconds / 3)
        gateways.last.kill()
        time.sleep(seconds / 3)
        gateways.last.start()
        for future in futures:
            future.result()
    return tallies


@contextmanager
def most_at_once(engine: str) -> Iterator[list[int]]:
    """How many turns the engine had, asked all the time."""
    counts = list[int]()
    ended = threading.Event()

    def watch() -> None:
        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        with httpx.Client(headers=headers, timeout=120, trust_env=False) as client:
            while not ended.wait(0.01):
                stats = client.get(f"{engine}/v1/stats").json()
                counts.append(stats["running"] + stats["waiting"])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield counts
    finally:
        ended.set()
        thread.join()


def measure(folder: Path, postgres: str, seconds: float, clients: int, seed: int) -> Shares:
    """What was let through of each limit, as a share of it, and how many turns each had."""
    with running(folder, postgres) as (gateways, engine):
        tallies = load(gateways, ["requests", "tokens", "spend"], seconds, clients, seed)
        idle_stats(engine)
        with most_at_once(engine) as counts:
            tallies |= load(gateways, ["concurrency"], seconds, clients, seed)
        idle_stats(engine)
        eventually(gateways.is_drained)
        rows = [row for row in ledger_rows(gateways.database) if row["workspace_id"] == "spend"]
    starts = [(turn.at, 1) for turn in tallies["requests"].turns]
    # A turn's tokens are known at its end, and reserved at its beginning.
    used = [(turn.at, turn.tokens) for turn in tallies["tokens"].turns]
    shares = {
        "requests": share_of_bucket(starts, REQUESTS),
        "tokens": share_of_bucket(used, TOKENS),
        "concurrency": max(counts) / CONCURRENCY,
        "spend": sum(row["cost_nano"] for row in rows) / SPEND,
    }
    return {name: (share, tallies[name]) for name, share in shares.items()}


@pytest.mark.postgres
def test_three_gateways_let_no_more_through_than_one(tmp_path: Path, postgres: str) -> None:
    measured = measure(tmp_path, postgres, sizes.number(15.0, 120.0), clients=6, seed=1)
    for name, (share, tally) in measured.items():
        sizes.told(
            name, share=share, turns=len(tally.turns), refused=tally.refused, broken=tally.failed
        )
        assert tally.turns and share <= ALLOWED, f"{name}: {share:.3f} of the limit was let through"
