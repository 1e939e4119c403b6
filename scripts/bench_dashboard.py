"""How soon each page shows its numbers with a month of data, and what ten open sessions cost.

A page's first paint is the time from navigation until its numbers are there and its script has
ended, in a browser that has not seen it. Sessions are as many browsers, each on a page that
refreshes itself; counted are the dashboard process's processor time and resident memory.

    python scripts/bench_dashboard.py [--turns N] [--runs N] [--seconds N]
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil  # type: ignore[import-untyped]
from dashboard_stack import PAGES, Stack, chromium, open_page, running, seed, signed_in
from playwright.sync_api import Browser

PAINT_SECONDS = 2.0
MAX_CORES = 0.5
MAX_MEGABYTES = 400
NUM_SESSIONS = 10
RANGES = ("24h", "30d")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=60_000, help="of the sample month")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="that the sessions stay open")
    options = parser.parse_args()
    with TemporaryDirectory() as folder, chromium() as browser:
        seed(Path(folder), options.turns)
        with running(Path(folder)) as stack:
            is_good = time_pages(browser, stack, options.runs)
            is_good &= count_sessions(browser, stack, options.seconds)
    return 0 if is_good else 1


def time_pages(browser: Browser, stack: Stack, runs: int) -> bool:
    """Print a line for each page and range; whether all were soon enough."""
    print(
        f"\nload of the machine (1 minute): {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    )
    print(f"first paint in seconds, median and worst of {runs}; limit {PAINT_SECONDS}\n")
    signed_in(browser, stack).context.close()  # the process has imported what pages need
    worst = 0.0
    for name in PAGES:
        cells = []
        for time_range in RANGES:
            times = []
            for _ in range(runs):
                page = signed_in(browser, stack, viewport={"width": 1200, "height": 1000})
                times.append(open_page(page, stack, name, time_range))
                page.context.close()
            worst = max(worst, median(times))
            cells.append(f"{time_range}: {median(times):.2f} ({max(times):.2f})")
        print(f"{name:12} " + "   ".join(cells), flush=True)
    print(f"slowest median {worst:.2f} s")
    return worst <= PAINT_SECONDS


def count_sessions(browser: Browser, stack: Stack, seconds: float) -> bool:
    """Open the sessions, wait, and print what they cost."""
    pages = []
    for number in range(NUM_SESSIONS):
        page = signed_in(browser, stack)
        open_page(page, stack, PAGES[number % len(PAGES)], "24h")
        pages.append(page)
    process = psutil.Process(stack.dashboard_pid)
    before, started = process.cpu_times(), time.monotonic()
    highest = process.memory_info().rss
    while time.monotonic() - started < seconds:
        pages[0].wait_for_timeout(2000)
        highest = max(highest, process.memory_info().rss)
    used, passed = process.cpu_times(), time.monotonic() - started
    cores = (used.user + used.system - before.user - before.system) / passed
    megabytes = highest / 1e6
    print(
        f"\n{NUM_SESSIONS} sessions for {passed:.0f} s: {cores:.2f} of a core (limit {MAX_CORES}),"
        f" {megabytes:.0f} MB resident (limit {MAX_MEGABYTES})"
    )
    return bool(cores <= MAX_CORES and megabytes <= MAX_MEGABYTES)


if __name__ == "__main__":
    sys.exit(main())
