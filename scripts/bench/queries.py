"""Times every query of the dashboard over the sample month, on SQLite and PostgreSQL.

The sample month is what `python -m scripts.sample` makes up, the same in every run.

    python -m scripts.bench.queries --turns 1000000 --data DIRECTORY --postgres URL
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from gateway.base.settings import DatabaseSettings
from gateway.cli.migrate import migrate
from gateway.ledger.database import Ledger
from gateway.ledger.reads import latency as queries_latency
from gateway.ledger.reads import prefixes as queries_prefixes
from gateway.ledger.reads import turns as queries_turns
from gateway.ledger.reads.sums import Queries, Range
from gateway.ledger.reads.turns import Cursor, TurnFilter
from gateway.prices.book import PriceBook
from scripts.bench.report import table
from scripts.sample.__main__ import fill_sample
from scripts.setup.options import parse

END = datetime(2026, 11, 21, 12, 20, 30, tzinfo=UTC)
LIMIT_MS = 300.0
Query = Callable[[], Awaitable[Any]]

BY_PRICE = ("price", "prompt_above", "engine", "model")


async def queries_of(ledger: Ledger) -> dict[str, Query]:
    """Each question of a page, over the range that is asked for in its name."""
    queries, own = Queries(ledger), PriceBook().own
    end = int(END.timestamp() * 1000)
    hour = 3_600_000
    spans = {"1h": hour, "24h": 24 * hour, "7d": 168 * hour, "30d": 720 * hour}
    found: dict[str, Query] = {}
    for name, span in spans.items():
        of = Range(since_ms=end - span + 12_345, until_ms=end)
        one = Range(since_ms=of.since_ms, until_ms=end, workspace="coding", engine="engine-2")
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
    return found | await turn_queries_of(ledger, Range(since_ms=0, until_ms=end))


async def turn_queries_of(ledger: Ledger, of: Range) -> dict[str, Query]:
    middle = Cursor(of.until_ms - 15 * 86_400_000, "msg")
    one, marked = (
        Range(since_ms=0, until_ms=of.until_ms, workspace=name)
        for name in ("translation", "coding")
    )
    known = (await queries_turns.page(ledger, marked, TurnFilter(), 1, None)).turns[0]

    def page(of: Range, after: Cursor | None = None, **which: Any) -> Query:
        return partial(queries_turns.page, ledger, of, TurnFilter(**which), 100, after)

    return {
        "turns, newest": page(of),
        "turns, from the middle": page(of, middle),
        "turns of one workspace": page(one),
        "turns of one workspace, from the middle": page(one, middle),
        "turns with an error": page(of, outcome="error"),
        "turns with an outcome that is not there": page(of, outcome="invalid_request_error"),
        "turns with a miss reason": page(of, miss_reason="best_effort_evicted"),
        "turns with a miss reason that is not there": page(of, miss_reason="sacrificed"),
        "turns of one prefix": page(of, prefix=known.prefix),
        "turns of one key": page(of, key_id=known.key_id),
        "one turn": partial(queries_turns.one, ledger, known.id),
    }


async def measure(url: str, runs: int) -> dict[str, tuple[float, float]]:
    """Median and worst, in milliseconds, of each query."""
    ledger = Ledger(url, 60.0)  # a deadline would hide how slow a query is
    await Queries(ledger).totals(Range(since_ms=0, until_ms=1))  # the connection is opened
    found = {}
    for name, query in (await queries_of(ledger)).items():
        times = []
        for _ in range(runs):
            started = time.perf_counter()
            await query()
            times.append((time.perf_counter() - started) * 1000)
        found[name] = (median(times), max(times))
    await ledger.close()
    return found


def main() -> int:
    options = parse(
        __doc__,
        turns=1_000_000,
        runs=5,
        data=(Path, "directory for the SQLite file"),
        postgres=("", "SQLAlchemy URL of an empty database"),
    )
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
    """Fill the database and time the queries."""
    migrate(settings)
    started = time.perf_counter()
    num_turns = fill_sample(settings, END, options.turns, seed=1)
    seconds = time.perf_counter() - started
    print(f"{kind}: {num_turns:,} turns made, loaded and summed in {seconds:.0f} s", flush=True)
    return asyncio.run(measure(settings.ledger_url, options.runs))


def report(columns: dict[str, dict[str, tuple[float, float]]], runs: int) -> int:
    """Print the table; 1 where a query was slower than the limit."""
    print(f"\nmilliseconds, median / worst of {runs} runs; limit {LIMIT_MS:.0f}\n")
    names = next(iter(columns.values()))
    cells = [
        [f"{m:.1f} / {w:.1f}" for m, w in (by[name] for name in names)] for by in columns.values()
    ]
    print(table(("query", *columns), list(zip(names, *cells, strict=True))))
    slow = sum(any(by[name][1] > LIMIT_MS for by in columns.values()) for name in names)
    print(f"\n{slow} over the limit" if slow else "\nall under the limit")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
