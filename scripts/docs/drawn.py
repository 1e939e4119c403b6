"""A page as it is drawn in a browser: when it stands still, and what is wrong with it."""

import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Page, Request, TimeoutError

from scripts.setup import chromium

CHECKS = (Path(__file__).parent / "dashboard_checks.js").read_text("utf-8")
# The grid writes what a screen reader finds a moment after it is drawn.
TABLES_HAVE_TEXT = """() => [...document.querySelectorAll('[data-testid=stDataFrame]')]
    .every(frame => frame.querySelector('canvas table td'))"""
# Where everything stands; null while the script runs or a chart has not been drawn.
LAYOUT = """() => {
    if (!document.querySelector('[data-test-script-state="notRunning"]')) return null;
    const charts = [...document.querySelectorAll('[data-testid=stVegaLiteChart]')];
    if (document.querySelector('[data-testid^=stSkeleton]')) return null;
    if (charts.some(chart => !chart.querySelector('svg .role-mark'))) return null;
    const boxes = [...document.querySelectorAll(
        '[data-testid=stMainBlockContainer] :is([data-testid], canvas, svg, svg text, svg path)')];
    return boxes.map(each => {
        const box = each.getBoundingClientRect();
        return [box.x, box.y, box.width, box.height].map(Math.round).join();
    }).join(';');
}"""
LOOK_MS, NUM_EQUAL, STILL_SECONDS = 150, 3, 60.0
MAX_HEIGHT = 3000


def listen(page: Page, own: str) -> list[str]:
    """What goes wrong outside the picture, as it happens."""
    heard: list[str] = []
    chromium.listen(page, heard)

    def look(request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != own:
            heard.append(f"outside request: {request.url}")

    page.on("request", look)
    return heard


def show_whole(page: Page, width: int) -> None:
    """Make the window so high that all of the page is drawn."""
    page.set_viewport_size({"width": width, "height": 1000})
    page.mouse.move(1, 1)
    wait_until_still(page)
    block = "document.querySelector('[data-testid=stMainBlockContainer]').scrollHeight"
    for _ in range(2):
        height = min(max(int(page.evaluate(block)), 800), MAX_HEIGHT)
        if page.viewport_size != {"width": width, "height": height}:
            page.set_viewport_size({"width": width, "height": height})
            wait_until_still(page)
    with suppress(TimeoutError):  # then the checks say which table has none
        page.wait_for_function(TABLES_HAVE_TEXT, timeout=6000)


def wait_until_still(page: Page) -> None:
    """Charts are drawn after the script has ended: wait until nothing changes its size any more."""
    before, num_equal = None, 0
    deadline = time.monotonic() + STILL_SECONDS
    while num_equal < NUM_EQUAL and time.monotonic() < deadline:
        page.wait_for_timeout(LOOK_MS)
        now = page.evaluate(LAYOUT)
        num_equal = num_equal + 1 if now is not None and now == before else 0
        before = now
