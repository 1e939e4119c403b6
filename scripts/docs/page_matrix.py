"""Check every page as it is drawn: 4 widths, 2 themes, and each state that its data can be in.

The states are: no data and no engine, one request, traffic on two and on four engines, and the
sample month. Prints a table of problems by state and width.

    python -m scripts.docs.page_matrix [--states empty,two] [--pages a,b] [--widths 480,1440]
        [--themes dark]
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page

from scripts.docs.dashboard_stack import (
    PAGES,
    DashboardStack,
    open_page,
    running,
    seed,
    send_traffic,
    signed_in,
)
from scripts.docs.shots import CHECKS, listen, show_whole
from scripts.options import parse
from scripts.setup.chromium import browsing
from scripts.stack import API_KEY

STATES = {"empty": 0, "one": 1, "two": 2, "four": 4, "month": 0}
"""By state how many engines run."""
WIDTHS = (480, 1200, 1440, 1920)
PHONE = 480
"""A window of this width is opened anew: its menu is folded from the start."""
THEMES = ("light", "dark")


def main() -> int:
    options = parse(
        __doc__,
        states=",".join(STATES),
        pages=",".join(PAGES),
        widths=",".join(map(str, WIDTHS)),
        themes=",".join(THEMES),
        turns=(20_000, "of the sample month"),
        out=("", "a folder for a picture of each page"),
    )
    pages = [name for name in options.pages.split(",") if name in PAGES]
    widths = [int(width) for width in options.widths.split(",")]
    found: Counter[tuple[str, int, str]] = Counter()
    for state in options.states.split(","):
        # The servers first: a browser brings an event loop, in which nothing can be migrated.
        with stack_in(state, options.turns) as stack, browsing() as browser:
            for theme in options.themes.split(","):
                for width, line in problems_of(
                    browser, stack, state, theme, pages, widths, options.out
                ):
                    if line:
                        print(f"{state} {theme} {width}: {line}", flush=True)
                    found[state, width, theme] += bool(line)
    print_table(found, widths)
    return 1 if sum(found.values()) else 0


def print_table(found: Counter[tuple[str, int, str]], widths: list[int]) -> None:
    print(f"\n{'state':<8} {'theme':<6}" + "".join(f"{width:>7}" for width in widths))
    for state, theme in sorted({(state, theme) for state, _, theme in found}):
        counts = "".join(f"{found[state, width, theme]:>7}" for width in widths)
        print(f"{state:<8} {theme:<6}{counts}")
    print(f"{sum(found.values())} problems")


@contextmanager
def stack_in(state: str, num_turns: int) -> Iterator[DashboardStack]:
    """Servers whose data are in that state."""
    with TemporaryDirectory() as folder:
        data = Path(folder)
        if state == "month":
            seed(data, num_turns)
        with running(data, num_engines=STATES[state]) as stack:
            if state in ("two", "four"):
                send_traffic(stack.gateway, 60)
            elif state == "one":
                send_traffic(stack.gateway, 1)
            yield stack


def problems_of(
    browser: Browser,
    stack: DashboardStack,
    state: str,
    theme: str,
    names: list[str],
    widths: list[int],
    out: str = "",
) -> Iterator[tuple[int, str]]:
    """Each width with each problem; an empty line for a page without any."""
    for phone in (True, False):
        wanted = [width for width in widths if (width == PHONE) is phone]
        for is_sender in (False, True):
            own = [name for name in names if (name == "playground") is is_sender]
            if not wanted or not own:
                continue
            key = {"key": API_KEY} if is_sender else {}
            size: Any = {"width": wanted[0], "height": 1000}
            page = signed_in(browser, stack, **key, viewport=size, color_scheme=theme)
            heard = listen(page, urlsplit(stack.dashboard).netloc)
            for name in own:
                page.set_viewport_size(size)
                open_page(page, stack, name, "30d" if state == "month" else "1h")
                for width in wanted:
                    lines = [*checked(page, name, width), *heard]
                    heard.clear()
                    if out:
                        page.screenshot(path=f"{out}/{name}-{state}-{theme}-{width}.png")
                    yield from ((width, f"{name}: {line}") for line in lines or [""] if line)
                    yield width, ""
            page.context.close()


def checked(page: Page, name: str, width: int) -> list[str]:
    send = page.get_by_role("button", name="Send", exact=True)
    if name == "playground" and send.count() and not page.get_by_text("What became of").count():
        send.first.click()
        page.wait_for_selector("text=/What became of the prompt|The turn failed/", timeout=120_000)
    show_whole(page, width)
    problems: list[str] = page.evaluate(CHECKS)
    return problems


if __name__ == "__main__":
    sys.exit(main())
