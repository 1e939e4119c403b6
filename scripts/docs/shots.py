"""Take screenshots of every page, light and dark, at 1,200 and 1,920 px, and check each page.

Money and requests are the sample month's. Leases, memory, engines and the playground are
a synthetic engine's. Each page is checked as it is drawn: no label clipped or overlapping, contrast
at least 4.5:1, a unit on each axis, no error in the console, no request to another host.

    python -m scripts.docs.shots [--out dashboard/screenshots] [--pages a,b] [--turns N]
"""

import io
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from PIL import Image
from playwright.sync_api import Browser, Page, Request, TimeoutError

from scripts.docs.dashboard_stack import (
    PAGES,
    DashboardStack,
    open_page,
    running,
    seed,
    send_traffic,
    signed_in,
)
from scripts.options import parse
from scripts.setup import chromium
from scripts.setup.chromium import browsing
from scripts.stack import API_KEY, ROOT

WIDTHS = (1200, 1920)
LIVE = ("prefixes", "memory", "fleet", "playground")
CHECKS = (Path(__file__).parent / "dashboard_checks.js").read_text("utf-8")
# The grid writes what a screen reader finds a moment after it is drawn.
TABLES_HAVE_TEXT = """() => [...document.querySelectorAll('[data-testid=stDataFrame]')]
    .every(frame => frame.querySelector('canvas table td'))"""
MAX_HEIGHT = 3000
QUALITY = 78


def main() -> int:
    options = parse(
        __doc__,
        out=ROOT / "dashboard" / "screenshots",
        pages=",".join(PAGES),
        turns=(60_000, "of the sample month"),
    )
    wanted = [name for name in options.pages.split(",") if name in PAGES]
    options.out.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    with TemporaryDirectory() as folder:
        sample, live = Path(folder, "sample"), Path(folder, "live")
        for data in (sample, live):
            data.mkdir()
        if names := [name for name in wanted if name not in LIVE]:
            seed(sample, options.turns)
            with running(sample) as stack, browsing() as browser:
                problems += shoot_all(browser, stack, names, "30d", options.out)
        if names := [name for name in wanted if name in LIVE]:
            with running(live, num_engines=2) as stack, browsing() as browser:
                send_traffic(stack.gateway, 80)
                problems += shoot_all(browser, stack, names, "1h", options.out)
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(f"{len(wanted) * 4} screenshots, {size / 2**20:.1f} MiB, {len(problems)} problems")
    return 1 if problems else 0


def shoot_all(
    browser: Browser, stack: DashboardStack, names: list[str], time_range: str, out: Path
) -> list[str]:
    problems: list[str] = []
    for theme in ("light", "dark"):
        for width in WIDTHS:
            size = {"width": width, "height": 1000}
            for is_sender in {name == "playground" for name in names}:
                key = {"key": API_KEY} if is_sender else {}
                page = signed_in(browser, stack, **key, viewport=size, color_scheme=theme)
                heard = listen(page, urlsplit(stack.dashboard).netloc)
                for name in names:
                    if (name == "playground") != is_sender:
                        continue
                    page.set_viewport_size({"width": width, "height": 1000})
                    open_page(page, stack, name, time_range)
                    picture = f"{name}-{theme}-{width}"
                    found = shoot(page, name, out / f"{picture}.webp")
                    lines = [f"{picture}: {problem}" for problem in [*found, *heard]]
                    heard.clear()
                    problems += lines
                    print(*lines, sep="\n", end="\n" if lines else "", flush=True)
                page.context.close()
    return problems


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
    page.wait_for_timeout(1500)  # charts are drawn after the script has ended
    block = "document.querySelector('[data-testid=stMainBlockContainer]').scrollHeight"
    for _ in range(2):
        height = min(max(int(page.evaluate(block)), 800), MAX_HEIGHT)
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(700)
    with suppress(TimeoutError):  # then the checks say which table has none
        page.wait_for_function(TABLES_HAVE_TEXT, timeout=6000)


def shoot(page: Page, name: str, path: Path) -> list[str]:
    """Write the whole page, up to a height that is still read; return what is wrong with it."""
    if name == "playground":
        for _ in range(2):
            page.get_by_role("button", name="Send").click()
            page.wait_for_selector("text=What became of the prompt", timeout=60_000)
            page.wait_for_timeout(1500)
    width = (page.viewport_size or {"width": WIDTHS[0]})["width"]
    show_whole(page, width)
    started = time.perf_counter()
    problems: list[str] = page.evaluate(CHECKS)
    image = Image.open(io.BytesIO(page.screenshot()))
    image.save(path, "WEBP", quality=QUALITY, method=6)
    print(
        f"{path.name}: {path.stat().st_size // 1024} KiB, checked in"
        f" {time.perf_counter() - started:.1f} s",
        flush=True,
    )
    return problems


if __name__ == "__main__":
    sys.exit(main())
