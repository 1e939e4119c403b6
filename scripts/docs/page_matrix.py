"""Check every page as it is drawn: 4 widths, 2 themes, and each state that its data can be in.

The states are: no data and no engine, one request, traffic on two and on four engines, and the
sample month. Why and Requests are looked at with a request picked, too, and Advice and Plan with
what they refuse. Both themes are looked at at once, each in a browser of its own. Prints a table of
problems by state and width.

    python -m scripts.docs.page_matrix [--states empty,two] [--pages a,b] [--widths 480,1440]
        [--themes dark]
"""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import httpx
from playwright.sync_api import Browser, Page, TimeoutError

from scripts.docs.dashboard_stack import (
    PAGES,
    DashboardStack,
    open_page,
    running,
    seed,
    send_traffic,
    signed_in,
)
from scripts.docs.drawn import CHECKS, listen, show_whole
from scripts.setup.chromium import browsing
from scripts.setup.options import parse
from scripts.stack import ADMIN_KEY, API_KEY

STATES = {"empty": 0, "one": 1, "two": 2, "four": 4, "month": 0}
"""By state how many engines run."""
WIDTHS = (480, 1200, 1440, 1920)
PHONE = 480
"""A window of this width is opened anew: its menu is folded from the start."""
THEMES = ("light", "dark")
PICKED = {"why": ("miss", "any"), "requests": ("request", None)}
"""The pages that show one request: its name in their URL, and which miss reasons are asked for."""

WRONG = {
    "advice": ("Pasted requests", "A JSON body or a curl", "Advise", "The gateway refuses that"),
    "plan": ("A trace", "Lines of JSON", "Plan", "There is no plan"),
}
"""What is chosen on a page, the text area that gets no JSON, the button, and what is then said."""

SAID = {1: "Send it once more", 2: "The second send (answered|has)|Both sends"}
"""How the playground's first sentence begins after each send."""


@dataclass(frozen=True, slots=True)
class Sight:
    """A page that is looked at, with what its URL picks.

    `is_wrong`: it is given what it refuses.
    """

    page: str
    query: Mapping[str, str]
    is_wrong: bool = False

    @property
    def name(self) -> str:
        if self.is_wrong:
            return f"{self.page}-wrong"
        return f"{self.page}-picked" if self.query else self.page


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sight at one width in one theme, and what is wrong with it."""

    state: str
    theme: str
    width: int
    sight: str
    problems: Sequence[str]
    picture: bytes


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
    themes = options.themes.split(",")
    found: Counter[tuple[str, int, str]] = Counter()
    num_drawn, started = 0, time.monotonic()
    for state in options.states.split(","):
        with stack_in(state, options.turns) as stack:
            wrong = [name for name in pages if name in WRONG]
            for each in look(stack, state, themes, pages, widths, wrong):
                num_drawn += 1
                found[state, each.width, each.theme] += len(each.problems)
                for line in each.problems:
                    print(f"{state} {each.theme} {each.width}: {each.sight}: {line}", flush=True)
                if options.out:
                    name = f"{each.sight}-{state}-{each.theme}-{each.width}.png"
                    Path(options.out, name).write_bytes(each.picture)
    print_table(found, widths)
    print(f"{num_drawn} pages drawn and checked in {time.monotonic() - started:,.0f} s")
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


def look(
    stack: DashboardStack,
    state: str,
    themes: Sequence[str],
    pages: Sequence[str],
    widths: Sequence[int],
    wrong: Sequence[str] = (),
) -> Iterable[Drawn]:
    """Every page at every width; a browser and a thread for each theme. Those of `wrong` are also
    given what they refuse."""
    sights = [*(Sight(page, {}) for page in pages), *picked(stack.gateway, pages)]
    sights += [Sight(page, {}, is_wrong=True) for page in wrong]

    def of_theme(theme: str) -> list[Drawn]:
        with browsing() as browser:
            return list(drawn(browser, stack, state, theme, sights, widths))

    with ThreadPoolExecutor(len(themes)) as pool:
        for found in pool.map(of_theme, themes):
            yield from found


def picked(gateway: str, pages: Sequence[str]) -> Iterator[Sight]:
    """The pages of one request, with the newest that they can show."""
    with httpx.Client(base_url=gateway, headers={"x-api-key": ADMIN_KEY}, timeout=60) as http:
        for page, (name, reason) in PICKED.items():
            asked = {"limit": 1, "since_ms": 0} | ({"miss_reason": reason} if reason else {})
            turns = http.get("/admin/v1/turns/search", params=asked).raise_for_status().json()
            if page in pages and turns["turns"]:
                yield Sight(page, {name: turns["turns"][0]["id"]})


def drawn(
    browser: Browser,
    stack: DashboardStack,
    state: str,
    theme: str,
    sights: Sequence[Sight],
    widths: Sequence[int],
) -> Iterator[Drawn]:
    time_range = "30d" if state == "month" else "1h"
    for phone in (True, False):
        wanted = [width for width in widths if (width == PHONE) is phone]
        for is_sender in (False, True):
            own = [sight for sight in sights if (sight.page == "playground") is is_sender]
            if not wanted or not own:
                continue
            key = {"key": API_KEY} if is_sender else {}
            size: Any = {"width": wanted[0], "height": 1000}
            page = signed_in(browser, stack, **key, viewport=size, color_scheme=theme)
            heard = listen(page, urlsplit(stack.dashboard).netloc)
            for sight in own:
                page.set_viewport_size(size)
                open_page(page, stack, sight.page, time_range, sight.query)
                for width in wanted:
                    problems = [*checked(page, sight, width), *heard]
                    heard.clear()
                    yield Drawn(state, theme, width, sight.name, problems, page.screenshot())
            page.context.close()


def checked(page: Page, sight: Sight, width: int) -> list[str]:
    """What is wrong with the page. The playground sends twice first, so that it has all to show,
    and a plan is made."""
    if sight.is_wrong:
        give_wrong_input(page, sight.page)
    else:
        give_input(page, sight.page)
    show_whole(page, width)
    problems: list[str] = page.evaluate(CHECKS)
    return problems


def give_wrong_input(page: Page, name: str) -> None:
    chosen, label, button, said = WRONG[name]
    if page.get_by_text(said).count():
        return
    page.get_by_test_id("stButtonGroup").get_by_text(chosen, exact=True).click()
    area = page.get_by_label(label).first
    area.wait_for(timeout=60_000)
    area.fill("no JSON")
    area.blur()
    page.get_by_role("button", name=button, exact=True).click()
    page.get_by_text(said).first.wait_for(timeout=180_000)


def give_input(page: Page, name: str) -> None:
    plan = page.get_by_role("button", name="Plan", exact=True)
    if name == "plan" and plan.count() and not page.get_by_text("What each purchase").count():
        plan.first.click()
        page.wait_for_selector("text=/What each purchase|There is no plan/", timeout=180_000)
    send = page.get_by_role("button", name="Send", exact=True)
    if name == "playground" and send.count() and not page.get_by_text("What became of").count():
        for number in (1, 2):
            send.first.click()
            page.wait_for_selector("text=/What became of|The turn failed/", timeout=120_000)
            if page.get_by_text("What became of").count():
                # It stays away where the ledger was late: the page is checked all the same.
                with suppress(TimeoutError):
                    page.wait_for_selector(f"text=/{SAID[number]}/", timeout=20_000)


if __name__ == "__main__":
    sys.exit(main())
