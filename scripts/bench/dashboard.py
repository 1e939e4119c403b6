"""How soon each page shows its numbers with a month of data, and what ten open sessions cost.

A page's first paint is the time until its numbers are there, its charts and tables are no empty
places any more, and its script has ended: `cold` from opening its address in a browser with nothing
in its cache, `warm` from opening it again there, `switch` from the click that leads to it from
another page. Sessions are as many browsers, each on a page that refreshes itself; counted are the
dashboard process's processor time and resident memory.

    python -m scripts.bench.dashboard [--turns N] [--runs N] [--seconds N]
"""

import os
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil  # type: ignore[import-untyped]
from playwright.sync_api import Browser

from scripts.docs.page_matrix import (
    PAGES,
    DashboardStack,
    open_page,
    running,
    seed,
    signed_in,
    switch_page,
)
from scripts.setup.chromium import browsing
from scripts.setup.options import parse
from scripts.stack import cpu_seconds

PAINT_SECONDS = 2.0
MAX_CORES = 0.5
MAX_MEGABYTES = 400
NUM_SESSIONS = 10
RANGE = "30d"
KINDS = ("cold", "warm", "switch")


def main() -> int:
    options = parse(
        __doc__,
        turns=(60_000, "of the sample month"),
        runs=3,
        seconds=(60.0, "that the sessions stay open"),
    )
    with TemporaryDirectory() as folder, browsing() as browser:
        seed(Path(folder), options.turns)
        with running(Path(folder)) as stack:
            is_good = time_pages(browser, stack, options.runs)
            is_good &= count_sessions(browser, stack, options.seconds)
    return 0 if is_good else 1


def time_pages(browser: Browser, stack: DashboardStack, runs: int) -> bool:
    """Print a line for each page; whether all were soon enough."""
    print(
        f"\nload of the machine (1 minute): {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    )
    print(f"first paint in seconds, median and worst of {runs}; limit {PAINT_SECONDS}\n")
    signed_in(browser, stack).context.close()  # the sign-in itself is not timed
    worst = dict.fromkeys(KINDS, 0.0)
    print(f"{'page':12} " + " ".join(f"{kind:>13}" for kind in KINDS))
    for name in PAGES:
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(runs):
            for kind, seconds in first_paints(browser, stack, name).items():
                times[kind].append(seconds)
        cells = [f"{median(found):6.2f} ({max(found):.2f})" for found in times.values()]
        print(f"{name:12} " + " ".join(f"{cell:>13}" for cell in cells), flush=True)
        worst = {kind: max(worst[kind], median(found)) for kind, found in times.items()}
    print("slowest median: " + ", ".join(f"{kind} {worst[kind]:.2f} s" for kind in KINDS))
    return max(worst.values()) < PAINT_SECONDS


def first_paints(browser: Browser, stack: DashboardStack, name: str) -> dict[str, float]:
    """Seconds, in a browser of its own, by kind."""
    page = signed_in(browser, stack, viewport={"width": 1200, "height": 1000})
    found = {
        "cold": open_page(page, stack, name, RANGE),
        "warm": open_page(page, stack, name, RANGE),
    }
    open_page(page, stack, "savings" if name != "savings" else "overview", RANGE)
    found["switch"] = switch_page(page, name)
    page.context.close()
    return found


def count_sessions(browser: Browser, stack: DashboardStack, seconds: float) -> bool:
    """Open the sessions, wait, and print what they cost."""
    pages = []
    for number in range(NUM_SESSIONS):
        page = signed_in(browser, stack)
        open_page(page, stack, PAGES[number % len(PAGES)], "24h")
        pages.append(page)
    pid = stack.dashboard_pid
    before, started, highest = cpu_seconds(pid), time.monotonic(), 0
    process = psutil.Process(pid)
    while (passed := time.monotonic() - started) < seconds:
        pages[0].wait_for_timeout(2000)
        highest = max(highest, process.memory_info().rss)
    cores, megabytes = (cpu_seconds(pid) - before) / passed, highest / 1e6
    print(
        f"\n{NUM_SESSIONS} sessions for {passed:.0f} s: {cores:.2f} of a core (limit {MAX_CORES}),"
        f" {megabytes:.0f} MB resident (limit {MAX_MEGABYTES})"
    )
    return cores <= MAX_CORES and megabytes <= MAX_MEGABYTES


if __name__ == "__main__":
    sys.exit(main())
