"""Many streams at once, then a mixture for a long time: whole, in order, and nothing grows.

Starts two gateways before three synthetic engines, or asks those that `--url` and `--engine` name
(the synthetic engine's words are what is checked, and its `/metrics` must be reachable). Rounds of
`--streams` streams at once must all be whole, in order and without an error; afterwards memory and
descriptors are compared with those after the first round. Then `--minutes` of hits, misses, aborts
and errors. Ends with 1 if anything was wrong or grows.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.bench.report import markdown, percentile
from scripts.setup.options import parse
from scripts.stack import API_KEY
from tests.e2e.fleet import running_fleet
from tests.e2e.soaking import (
    ENGINE,
    GATEWAY,
    MIB,
    SPARE_FDS,
    Reading,
    Soak,
    Streams,
    Target,
    idle_readings,
    run_soak,
    run_streams,
    slope_an_hour,
)

# Between two rounds of the same load: allocators keep some of what was freed.
MAX_ADDED_MIB = 16
MAX_MIB_AN_HOUR, MAX_FDS_AN_HOUR = 8, 8


def main() -> int:
    options = parse(
        __doc__,
        streams=500,
        rounds=4,
        max_tokens=100,
        minutes=20.0,
        clients=(16, "of the mixture"),
        url=([], "gateways that run already"),
        engine=([], "the engines behind them"),
        key=(API_KEY, "API key"),
        model="synthetic",
    )
    with target_of(options) as target:
        problems = asyncio.run(run(target, options))
    print("\n".join(problems) or "nothing wrong, nothing grows", flush=True)
    return 1 if problems else 0


@contextmanager
def target_of(options: argparse.Namespace) -> Iterator[Target]:
    if options.url:
        yield Target(options.url, options.engine, options.key, options.model)
        return
    with (
        TemporaryDirectory(prefix="soak-") as directory,
        running_fleet(Path(directory), 3, 2, ENGINE, GATEWAY) as fleet,
    ):
        urls = [gateway.url for gateway in fleet.gateways]
        yield Target(urls, fleet.engines, API_KEY, "synthetic")


async def run(target: Target, options: argparse.Namespace) -> list[str]:
    problems: list[str] = []
    after: list[dict[str, Reading]] = [await idle_readings(target)]
    for number in range(options.rounds):
        streams = await run_streams(target, options.streams, options.max_tokens)
        after.append(await idle_readings(target, after[0]))
        print_streams(number, streams)
        problems += streams.wrong[:5]
        if streams.wrong:
            problems.append(f"round {number}: {len(streams.wrong)} streams were not right")
    if options.rounds > 1:
        problems += compare(after[0], after[1], after[-1])
    if options.minutes:
        seconds = options.minutes * 60
        soak = await run_soak(target, seconds, options.clients, max(seconds / 120, 1))
        end = await idle_readings(target, after[0])
        problems += report(soak, options.minutes)
        problems += more_descriptors(after[-1], end, "before the mixture")
    return problems


def print_streams(number: int, streams: Streams) -> None:
    print(
        f"round {number}: {streams.count} streams, {streams.num_open_at_once} open at once,"
        f" {len(streams.wrong)} wrong, {streams.seconds:.1f} s; to the first text"
        f" p50 {percentile(streams.first, 0.5):.2f} s, p99 {percentile(streams.first, 0.99):.2f} s",
        flush=True,
    )


def compare(
    idle: dict[str, Reading], first: dict[str, Reading], last: dict[str, Reading]
) -> list[str]:
    """Memory after the last round against that after the first; descriptors against the start."""
    problems, rows = [], []
    for url, end in last.items():
        start, one = idle[url], first[url]
        readings = (start, one, end)
        memory = [f"{reading.rss / MIB:.1f}" for reading in readings]
        rows.append([url, *memory, ", ".join(f"{reading.fds:.0f}" for reading in readings)])
        if end.rss - one.rss > MAX_ADDED_MIB * MIB:
            problems.append(f"{url}: {(end.rss - one.rss) / MIB:.1f} MiB more than after one round")
    heads = ("process", "MiB at start", "after the first round", "after the last", "descriptors")
    print(f"\n{markdown(heads, rows)}\n", flush=True)
    return problems + more_descriptors(idle, last, "at the start")


def report(soak: Soak, minutes: float) -> list[str]:
    counts = ", ".join(f"{name}: {count}" for name, count in sorted(soak.asked.items()))
    print(f"{minutes:g} minutes: {counts}; unexpected: {len(soak.unexpected)}\n")
    problems, rows = soak.unexpected[:5], []
    for url, history in soak.history.items():
        memory = slope_an_hour(history, "rss") / MIB
        fds, active = slope_an_hour(history, "fds"), slope_an_hour(history, "active")
        ends = f"{history[0].rss / MIB:.1f}, {history[-1].rss / MIB:.1f}"
        rows.append([url, ends, f"{memory:+.1f}", f"{fds:+.1f}", f"{active:+.1f}"])
        if memory > MAX_MIB_AN_HOUR:
            problems.append(f"{url}: memory grows by {memory:.1f} MiB an hour")
        if fds > MAX_FDS_AN_HOUR:
            problems.append(f"{url}: {fds:.1f} descriptors more an hour")
    heads = ("MiB first, last", "MiB an hour", "descriptors an hour", "active blocks an hour")
    print(f"{markdown(('process', *heads), rows)}\n", flush=True)
    return problems


def more_descriptors(before: dict[str, Reading], end: dict[str, Reading], when: str) -> list[str]:
    """The processes that have more descriptors than they had before."""
    return [
        f"{url}: {end[url].fds - one.fds:.0f} descriptors more than {when}"
        for url, one in before.items()
        if end[url].fds - one.fds > SPARE_FDS
    ]


if __name__ == "__main__":
    sys.exit(main())
