"""Times every query of the dashboard over a month of sample turns, on SQLite and PostgreSQL.

The turns are made up, deterministically: 12 workspaces, two engines, three models, office hours,
coding agents whose prefix grows with every turn beside applications that share a few prefixes.

    python -m scripts.bench.queries --turns 1000000 --data DIRECTORY --postgres URL
"""

import argparse
import asyncio
import random
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psycopg

from gateway.base.settings import DatabaseSettings
from gateway.cli.main import migrate
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.reads import latency as queries_latency
from gateway.ledger.reads import prefixes as queries_prefixes
from gateway.ledger.reads import turns as queries_turns
from gateway.ledger.reads.ranges import Range
from gateway.ledger.reads.totals import Queries
from gateway.ledger.reads.turns import Cursor, TurnFilter
from gateway.ledger.upkeep import rebuild
from gateway.prices.pricing import PriceBook, TokenCounts

ROOT = Path(__file__).resolve().parents[2]

END = datetime(2026, 11, 21, 12, 20, 30, tzinfo=UTC)
DAYS = 30
LIMIT_MS = 300.0
Query = Callable[[], Awaitable[Any]]

BY_PRICE = ("price", "prompt_above", "engine", "model")
COLUMNS = (
    "id instance workspace_id key_id model engine engine_model epoch stream opened_at opened_ms"
    " outcome miss_reason input_tokens cache_read_tokens cache_write_5m_tokens"
    " cache_write_1h_tokens automatic_tokens computed_tokens output_tokens thinking_tokens"
    " first_token_seconds duration_seconds price cost_nano cost_without_cache_nano num_removed"
    " fingerprint dialect prefix prefix_ttl stop_reason prefill_seconds"
).split()
MODELS = ("reference", "reference-large", "reference-small")
PREFILL_TOKENS_PER_SECOND = {"engine-0": 9000.0, "engine-1": 4000.0}


def sample_turns(num_turns: int) -> Iterator[dict[str, Any]]:
    """A month that ends at END, in order of time; the same for the same number."""
    chance = random.Random(20261121)
    price = PriceBook().find("reference", date(2026, 11, 1))
    assert price is not None
    weights = [hour_weight(hour) for hour in range(DAYS * 24)]
    first = END - timedelta(days=DAYS)
    moments = sorted(
        first + timedelta(hours=hour + chance.random())
        for hour in chance.choices(range(DAYS * 24), weights, k=num_turns)
    )
    talks: dict[str, list[int]] = {}
    for number, moment in enumerate(moments):
        yield sample_turn(chance, number, moment, talks) | {"_price": price}


def hour_weight(hour: int) -> float:
    """Nights and weekends are quiet."""
    day, of_day = divmod(hour, 24)
    return (1.0 if 8 <= of_day < 19 else 0.2) * (0.3 if day % 7 >= 5 else 1.0)


def sample_turn(
    chance: random.Random, number: int, moment: datetime, talks: dict[str, list[int]]
) -> dict[str, Any]:
    workspace = f"team-{min(int(chance.expovariate(0.35)), 11):02}"
    engine = chance.choice(("engine-0", "engine-1"))
    is_agent = chance.random() < 0.4
    tokens = {"input": chance.randrange(20, 600), "read": 0, "write_5m": 0, "write_1h": 0}
    miss = None
    if is_agent:
        talk = talks.setdefault(workspace, [0, 0])
        if chance.random() < 0.04:
            talk[:] = [talk[0] + 1, 0]
        step = chance.randrange(200, 3000)
        tokens["read"], tokens["write_5m"] = talk[1], step
        talk[1] = min(talk[1] + step, 180_000)
        prefix, ttl = f"{number:016x}", "5m"
        miss = None if tokens["read"] else "cold"
    else:
        shared = min(int(chance.expovariate(0.1)), 39)
        length, ttl = 1500 + 700 * shared, "1h" if shared % 3 == 0 else "5m"
        prefix = f"{(int(workspace[-2:]) * 100 + shared + 1) * 0x9E3779B97F4A7C15 % 2**64:016x}"
        if chance.random() < 0.85:
            tokens["read"] = length
        else:
            tokens["write_1h" if ttl == "1h" else "write_5m"] = length
            miss = chance.choice(("ttl_expired", "ttl_expired", "cold", "best_effort_evicted"))
    computed = tokens["input"] + tokens["write_5m"] + tokens["write_1h"]
    prefill = computed / PREFILL_TOKENS_PER_SECOND[engine] * chance.uniform(0.9, 1.3)
    first_token = prefill + chance.expovariate(30)
    failed = chance.random()
    outcome = "api_error" if failed < 0.004 else "overloaded_error" if failed < 0.008 else "stop"
    return {
        "id": f"msg_sample{number:022}",
        "instance": "sample",
        "workspace_id": workspace,
        "key_id": f"key_{workspace}_{chance.randrange(3)}",
        "model": MODELS[int(workspace[-2:]) % 3],
        "engine": engine,
        "engine_model": "sample/model",
        "epoch": "sample",
        "stream": chance.random() < 0.8,
        "opened_at": moment,
        "opened_ms": int(moment.timestamp() * 1000),
        "outcome": outcome,
        "miss_reason": miss,
        "computed_tokens": computed,
        "output_tokens": chance.randrange(5, 900),
        "first_token_seconds": first_token,
        "duration_seconds": first_token + chance.expovariate(0.2),
        # About what a conversation of some ten messages leaves.
        "fingerprint": chance.randbytes(300),
        "dialect": "anthropic" if is_agent else "openai",
        "prefix": prefix,
        "prefix_ttl": ttl,
        "stop_reason": "stop",
        "prefill_seconds": prefill,
        "_tokens": tokens,
    }


def row_of(turn: dict[str, Any]) -> tuple[Any, ...]:
    tokens, price = turn["_tokens"], turn["_price"]
    cost = price.cost(TokenCounts(**tokens, output=turn["output_tokens"]))
    turn |= {
        "input_tokens": tokens["input"],
        "cache_read_tokens": tokens["read"],
        "cache_write_5m_tokens": tokens["write_5m"],
        "cache_write_1h_tokens": tokens["write_1h"],
        "automatic_tokens": 0,
        "thinking_tokens": 0,
        "num_removed": 0,
        "price": price.id,
        "cost_nano": cost.actual,
        "cost_without_cache_nano": cost.without_cache,
    }
    return tuple(turn[name] for name in COLUMNS)


def load_sqlite(path: Path, num_turns: int) -> None:
    with sqlite3.connect(path) as connection:
        marks = ", ".join("?" * len(COLUMNS))
        place = COLUMNS.index("opened_at")
        rows = (
            (*row[:place], row[place].strftime("%Y-%m-%d %H:%M:%S.%f"), *row[place + 1 :])
            for row in map(row_of, sample_turns(num_turns))
        )
        connection.executemany(f"INSERT INTO turns ({', '.join(COLUMNS)}) VALUES ({marks})", rows)
    connection.close()


def load_postgres(url: str, num_turns: int) -> None:
    plain = url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(plain) as connection:
        command = f"COPY turns ({', '.join(COLUMNS)}) FROM STDIN"
        with connection.cursor().copy(command.encode()) as copy:
            for turn in sample_turns(num_turns):
                copy.write_row(row_of(turn))


async def prepare(ledger: Ledger) -> None:
    await rebuild(ledger)
    await ledger.analyze()


def queries_of(ledger: Ledger) -> dict[str, Query]:
    """Each question of a page, over the range that is asked for in its name."""
    queries, own = Queries(ledger), PriceBook().own
    end = int(END.timestamp() * 1000)
    hour = 3_600_000
    spans = {"1h": hour, "24h": 24 * hour, "7d": 168 * hour, "30d": 720 * hour}
    found: dict[str, Query] = {}
    for name, span in spans.items():
        of = Range(since_ms=end - span + 12_345, until_ms=end)
        one = Range(since_ms=of.since_ms, until_ms=end, workspace="team-01", engine="engine-0")
        found |= {
            f"totals {name}": partial(queries.totals, of),
            f"totals of the period before {name}": partial(queries.totals, of.before()),
            f"series {name}": partial(queries.series, of),
            f"series {name}, one workspace and engine": partial(queries.series, one),
            f"miss reasons and outcomes {name}": partial(queries.reasons, of),
            f"savings {name}": partial(queries.totals_by, of, BY_PRICE),
            f"by workspace {name}": partial(queries.totals_by, of, ("workspace_id",)),
            f"by key {name}": partial(queries.totals_by, of, ("workspace_id", "key_id")),
            f"by engine {name}": partial(queries.totals_by, of, ("engine", "model")),
            f"latency {name}": partial(queries_latency.latency, ledger, of),
            f"latency {name}, one workspace": partial(queries_latency.latency, ledger, one),
            f"prefixes {name}": partial(queries_prefixes.prefixes, ledger, of, own, 100),
        }
    return found | turn_queries_of(ledger, Range(since_ms=0, until_ms=end))


def turn_queries_of(ledger: Ledger, of: Range) -> dict[str, Query]:
    middle = Cursor(of.until_ms - 15 * 86_400_000, "msg")
    one = Range(since_ms=0, until_ms=of.until_ms, workspace="team-07")

    def page(of: Range, after: Cursor | None = None, **which: Any) -> Query:
        return partial(queries_turns.page, ledger, of, TurnFilter(**which), 100, after)

    return {
        "turns, newest": page(of),
        "turns, from the middle": page(of, middle),
        "turns of one workspace": page(one),
        "turns of one workspace, from the middle": page(one, middle),
        "turns with an error": page(of, outcome="error"),
        "turns with an outcome that is not there": page(of, outcome="timeout_error"),
        "turns with a miss reason": page(of, miss_reason="best_effort_evicted"),
        "turns with a miss reason that is not there": page(of, miss_reason="sacrificed"),
        "turns of one prefix": page(of, prefix=f"{102 * 0x9E3779B97F4A7C15 % 2**64:016x}"),
        "turns of one key": page(of, key_id="key_team-11_2"),
        "one turn": partial(queries_turns.one, ledger, f"msg_sample{1234:022}"),
    }


async def measure(url: str, runs: int) -> dict[str, tuple[float, float]]:
    """Median and worst, in milliseconds, of each query."""
    ledger = Ledger(url, 60.0)  # what is too slow is to be seen, not cut off
    await Queries(ledger).totals(Range(since_ms=0, until_ms=1))  # the connection is opened
    found = {}
    for name, query in queries_of(ledger).items():
        times = []
        for _ in range(runs):
            started = time.perf_counter()
            await query()
            times.append((time.perf_counter() - started) * 1000)
        found[name] = (median(times), max(times))
    await ledger.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--data", type=Path, help="directory for the SQLite file")
    parser.add_argument("--postgres", default="", help="SQLAlchemy URL of an empty database")
    parser.add_argument("--loaded", action="store_true", help="the turns are there already")
    options = parser.parse_args()
    columns: dict[str, dict[str, tuple[float, float]]] = {}
    with TemporaryDirectory() as spare:
        for kind, url in (("SQLite", ""), ("PostgreSQL", options.postgres)):
            if options.data is None if kind == "SQLite" else not url:
                continue
            place = options.data or Path(spare)
            columns[kind] = run(kind, DatabaseSettings(data=place, database_url=url), options)
    return report(columns, options.runs)


def run(
    kind: str, settings: DatabaseSettings, options: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Load and sum the turns, unless that is done, and time the queries."""
    if not options.loaded:
        migrate(settings)
        started = time.perf_counter()
        if settings.sqlite_path is not None:
            load_sqlite(settings.sqlite_path, options.turns)
        else:
            load_postgres(settings.ledger_url, options.turns)
        loaded = time.perf_counter()
        asyncio.run(with_ledger(settings.ledger_url, prepare))
        print(
            f"{kind}: {options.turns:,} turns loaded in {loaded - started:.0f} s,"
            f" summed in {time.perf_counter() - loaded:.0f} s",
            flush=True,
        )
    return asyncio.run(measure(settings.ledger_url, options.runs))


def report(columns: dict[str, dict[str, tuple[float, float]]], runs: int) -> int:
    """Print the table; 1 where a query was slower than the limit."""
    print(f"\nmilliseconds, median / worst of {runs} runs; limit {LIMIT_MS:.0f}\n")
    print(f"| {'query':50} | " + " | ".join(f"{kind:>15}" for kind in columns) + " |")
    print(f"|{'-' * 52}|" + "|".join("-" * 17 for _ in columns) + "|")
    slow = 0
    for name in next(iter(columns.values())):
        cells = [columns[kind][name] for kind in columns]
        slow += any(worst > LIMIT_MS for _, worst in cells)
        print(f"| {name:50} | " + " | ".join(f"{m:6.1f} / {w:6.1f}" for m, w in cells) + " |")
    print(f"\n{slow} over the limit" if slow else "\nall under the limit")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
