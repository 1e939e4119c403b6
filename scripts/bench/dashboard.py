"""How soon each page shows its numbers with a month of data, and what ten open sessions cost.

A page's first paint is the time until its numbers, charts and tables are there and its script has
ended. `cold` begins when a browser with an empty cache opens the page's address, `warm` when the
same browser opens it again, and `switch` at the click that leads to it from another page. The
median and the worst time are printed. Each session is a browser on a page that refreshes itself.
What sessions cost is the dashboard process's processor time and resident memory.

    python -m scripts.bench.dashboard [--turns N] [--runs N] [--seconds N]
"""

import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil  # type: ignore[import-untyped]
from playwright.sync_api import Browser

from scripts.bench.report import table
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

NUM_SESSIONS = 10
RANGE = "30d"


def main() -> int:
    options = parse(
        __doc__,
        turns=(60_000, "of the sample month"),
        runs=3,
        seconds=(60.0, "that the sessions stay open"),
    )
    with TemporaryDirectory() as folder:
        seed(Path(folder), options.turns)
        # The browser's event loop runs in this thread, and a migration wants one of its own.
        with running(Path(folder)) as stack, browsing() as browser:
            signed_in(browser, stack).context.close()  # the sign-in itself is not timed
            rows = []
            for name in PAGES:
                runs = [first_paints(browser, stack, name) for _ in range(options.runs)]
                times = zip(*runs, strict=True)
                cells = [f"{median(paints):.2f} ({max(paints):.2f})" for paints in times]
                rows.append([name, *cells])
            print(table(("first paint, s", "cold", "warm", "switch"), rows), flush=True)
            print(cost_of_sessions(browser, stack, options.seconds))
    return 0


def first_paints(browser: Browser, stack: DashboardStack, name: str) -> tuple[float, float, float]:
    """The first paints of a page in a new browser, in seconds: cold, warm, by a click."""
    page = signed_in(browser, stack, viewport={"width": 1200, "height": 1000})
    cold, warm = (open_page(page, stack, name, RANGE) for _ in range(2))
    open_page(page, stack, "savings" if name != "savings" else "overview", RANGE)
    switched = switch_page(page, name)
    page.context.close()
    return cold, warm, switched


def cost_of_sessions(browser: Browser, stack: DashboardStack, seconds: float) -> str:
    """Open the sessions for some seconds. Return a line with their cost."""
    pages = [signed_in(browser, stack) for _ in range(NUM_SESSIONS)]
    for number, page in enumerate(pages):
        open_page(page, stack, PAGES[number % len(PAGES)], "24h")
    process = psutil.Process(stack.dashboard_pid)
    highest = 0
    before = cpu_seconds(stack.dashboard_pid)
    started = time.monotonic()
    passed = 0.0
    while passed < seconds:
        pages[0].wait_for_timeout(2000)
        highest = max(highest, process.memory_info().rss)
        passed = time.monotonic() - started
    cores = (cpu_seconds(stack.dashboard_pid) - before) / passed
    return f"{NUM_SESSIONS} sessions: {cores:.2f} of a core, {highest / 1e6:.0f} MB resident"


if __name__ == "__main__":
    sys.exit(main())
