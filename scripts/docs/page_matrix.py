"""Check every page as it is drawn: in 4 widths, 2 themes, and each state of its data.

The states are: no data and no engine; one request; traffic on two and on four engines; the sample
month with its four engines. Why and Requests are also looked at with a request picked. The problems
are printed.

    python -m scripts.docs.page_matrix [--states empty,two] [--pages a,b] [--widths 480,1440]
        [--themes dark]
"""

import itertools
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
from playwright.sync_api import Browser, Page, Request, TimeoutError

from dashboard.views import entries
from scripts.bench.load import MESSAGES, body_of, headers_of, marked
from scripts.runner.options import sample_model
from scripts.setup import chromium
from scripts.setup.chromium import browsing, new_page, sign_in
from scripts.setup.options import parse
from scripts.stack import (
    ADMIN_KEY,
    API_KEY,
    free_port,
    gateway_environment,
    python,
    run,
    serving_dashboard,
    serving_engine,
    serving_gateway,
    start,
    stop,
    url_of,
)

CHECKS = (Path(__file__).parent / "dashboard_checks.js").read_text("utf-8")
# The grid writes its text for screen readers a moment after it is drawn.
TABLES_HAVE_TEXT = """() => [...document.querySelectorAll('[data-testid=stDataFrame]')]
    .every(frame => !frame.checkVisibility() || frame.querySelector('canvas table td'))"""
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
LOOK_MS = 150
NUM_EQUAL = 3
STILL_SECONDS = 60.0
MAX_HEIGHT = 3000


def listen(page: Page, address: str) -> list[str]:
    """The list to which problems outside the picture are added as they happen."""
    heard: list[str] = []
    chromium.listen(page, heard)

    def look(request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != address:
            heard.append(f"outside request: {request.url}")

    page.on("request", look)
    return heard


def show_whole(page: Page, width: int) -> None:
    """Make the window so high that the whole page is visible."""
    page.set_viewport_size({"width": width, "height": 1000})
    page.mouse.move(1, 1)
    wait_until_still(page)
    block = "document.querySelector('[data-testid=stMainBlockContainer]').scrollHeight"
    for _ in range(2):
        height = min(max(int(page.evaluate(block)), 800), MAX_HEIGHT)
        if page.viewport_size != {"width": width, "height": height}:
            page.set_viewport_size({"width": width, "height": height})
            wait_until_still(page)
    with suppress(TimeoutError):  # the checks then say which table has no text
        page.wait_for_function(TABLES_HAVE_TEXT, timeout=6000)


def wait_until_still(page: Page) -> None:
    """Wait until no element changes its size any more. Charts are drawn after the script has
    ended."""
    before = None
    num_equal = 0
    deadline = time.monotonic() + STILL_SECONDS
    while num_equal < NUM_EQUAL and time.monotonic() < deadline:
        page.wait_for_timeout(LOOK_MS)
        now = page.evaluate(LAYOUT)
        num_equal = num_equal + 1 if now is not None and now == before else 0
        before = now


PAGES = tuple(entry.name for entry in entries())
IDLE = '[data-testid="stApp"][data-test-script-state="notRunning"]'
WAIT_MS = 180_000
# A table in a closed tab or expander is there too, but not visible.
SHOWN = ":is([data-testid=stMetric], [data-testid=stDataFrame], [data-testid=stAlert], textarea)"
SHOWN += ":visible"


@dataclass(frozen=True, slots=True)
class DashboardStack:
    gateway: str
    dashboard: str
    dashboard_pid: int


@contextmanager
def running(
    data: Path, *, num_engines: int = 0, is_sample: bool = False
) -> Iterator[DashboardStack]:
    """A gateway over `data`, a dashboard, and synthetic engines. With the sample month the engines
    are kept busy."""
    settings = {"ENGINE_NUM_BLOCKS": "6000", "ENGINE_HOST_BLOCKS": "2000"}
    with ExitStack() as stack:
        models = [
            {"ENGINE_SYNTHETIC_MODEL": sample_model(number)} if is_sample else {}
            for number in range(num_engines)
        ]
        engines = [
            stack.enter_context(serving_engine("synthetic", settings | model)) for model in models
        ]
        # Without an engine the gateway is never ready, but it serves what the ledger has.
        urls = [engine.url for engine in engines] or [url_of(free_port())]
        ready = "/readyz" if num_engines else "/healthz"
        gateway = stack.enter_context(serving_gateway(data, urls, ready=ready))
        dashboard = stack.enter_context(serving_dashboard(gateway.url))
        for server in (*engines, gateway, dashboard):
            server.wait()
        if is_sample:
            environment = gateway_environment(gateway.port, data, urls)
            stack.callback(stop, start(python("scripts.sample.live"), environment))
            time.sleep(SAMPLE_SECONDS)
        yield DashboardStack(gateway.url, dashboard.url, dashboard.pid)


def seed(data: Path, num_turns: int) -> None:
    """Fill an empty ledger with the sample month."""
    for command in (["gateway", "migrate"], ["scripts.sample", "--turns", str(num_turns)]):
        module, *words = command
        run([*python(module), *words], {"HOLDFAST_DATA": str(data)})


def send_traffic(gateway: str, num_turns: int) -> None:
    """Turns of three workspaces with shared prefixes, more than the pool holds."""
    admin = {"x-api-key": ADMIN_KEY}
    chance = random.Random(1)
    keys = []
    with httpx.Client(base_url=gateway, timeout=60, trust_env=False) as http:
        for name in ("support-desk", "coding", "reports"):
            http.post("/admin/v1/workspaces", json={"id": name}, headers=admin).raise_for_status()
            reply = http.post("/admin/v1/keys", json={"workspace": name}, headers=admin)
            keys.append(reply.json()["key"])
        for number in range(num_turns):
            key = chance.choice(keys)
            prefix = chance.randrange(6)
            text = f"{prefix} " + "The lamp is lit at dusk. " * (240 + 150 * prefix)
            system = marked(text, "1h" if prefix % 2 else "5m")
            limit = chance.randrange(1, 8)
            question = f"{number} " * chance.randrange(10, 900)
            body = body_of("synthetic", system, question, max_tokens=limit)
            http.post(MESSAGES, json=body, headers=headers_of(key)).raise_for_status()


def signed_in(
    browser: Browser, stack: DashboardStack, key: str = ADMIN_KEY, **options: Any
) -> Page:
    """A signed-in page, in a context of its own with these `options`."""
    page = new_page(browser, **options)
    sign_in(page, stack.dashboard, key)
    page.wait_for_load_state(timeout=WAIT_MS)
    return page


def open_page(
    page: Page,
    stack: DashboardStack,
    name: str,
    time_range: str,
    query: Mapping[str, str] | None = None,
) -> float:
    """Open a page; return the seconds until it shows its numbers and its script has ended."""
    parameters = urlencode({"range": time_range, **(query or {})})
    started = time.perf_counter()
    page.goto(f"{stack.dashboard}/{name}?{parameters}", wait_until="domcontentloaded")
    _wait_for_numbers(page)
    return time.perf_counter() - started


def switch_page(page: Page, name: str) -> float:
    """Go to a page by the sidebar; return the seconds as `open_page` does."""
    title = next(entry.title for entry in entries() if entry.name == name)
    started = time.perf_counter()
    page.get_by_test_id("stSidebarNavLink").filter(has_text=title).first.click()
    page.get_by_role("heading", name=title, exact=True, level=1).wait_for(timeout=60_000)
    _wait_for_numbers(page)
    return time.perf_counter() - started


def _wait_for_numbers(page: Page) -> None:
    page.wait_for_selector(SHOWN, timeout=WAIT_MS)
    page.wait_for_selector(IDLE, timeout=WAIT_MS)
    page.wait_for_selector('[data-testid="stSkeleton"]', state="detached", timeout=WAIT_MS)


STATES = {"empty": 0, "one": 1, "two": 2, "four": 4, "month": 4}
"""How many engines run in each state."""
SAMPLE_SECONDS = 30.0
"""How long the sample's applications ask before a page is checked."""
NUM_TURNS = {"one": 1, "two": 60, "four": 60}
WIDTHS = (480, 1200, 1440, 1920)
PHONE = 480
"""A window of this width is opened anew: its menu is folded from the start."""
THEMES = ("light", "dark")
PICKED = {"why": ("miss", "any"), "requests": ("request", None)}
"""The pages that show one request: its parameter in their URL, and the miss reason to look for."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A page at one width in one theme, and what is wrong with it."""

    state: str
    theme: str
    width: int
    sight: str
    problems: Sequence[str]
    picture: bytes

    @property
    def name(self) -> str:
        return f"{self.sight}-{self.state}-{self.theme}-{self.width}"


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
    num_problems = 0
    num_drawn = 0
    for state in options.states.split(","):
        with stack_in(state, options.turns) as stack:
            for sight in look(stack, state, options.themes.split(","), pages, widths):
                num_drawn += 1
                num_problems += len(sight.problems)
                for line in sight.problems:
                    print(f"{state} {sight.theme} {sight.width}: {sight.sight}: {line}", flush=True)
                if options.out:
                    Path(options.out, f"{sight.name}.png").write_bytes(sight.picture)
    print(f"{num_drawn} pages drawn and checked, {num_problems} problems")
    return 1 if num_problems else 0


@contextmanager
def stack_in(state: str, num_turns: int) -> Iterator[DashboardStack]:
    """The servers of a state."""
    with TemporaryDirectory() as folder:
        data = Path(folder)
        if state == "month":
            seed(data, num_turns)
        with running(data, num_engines=STATES[state], is_sample=state == "month") as stack:
            if state in NUM_TURNS:
                send_traffic(stack.gateway, NUM_TURNS[state])
            yield stack


def look(
    stack: DashboardStack,
    state: str,
    themes: Sequence[str],
    pages: Sequence[str],
    widths: Sequence[int],
) -> Iterator[Drawn]:
    """Every page at every width in every theme. The pages of one request also with the newest one
    picked."""
    sights: list[tuple[str, dict[str, str]]] = [(page, {}) for page in pages]
    with httpx.Client(base_url=stack.gateway, headers={"x-api-key": ADMIN_KEY}, timeout=60) as http:
        for picked, (name, reason) in PICKED.items():
            parameters = {"limit": 1, "since_ms": 0} | ({"miss_reason": reason} if reason else {})
            turns = http.get("/admin/v1/turns/search", params=parameters).raise_for_status().json()
            if picked in pages and turns["turns"]:
                sights.append((picked, {name: turns["turns"][0]["id"]}))
    phone = [width for width in widths if width == PHONE]
    wide = [width for width in widths if width != PHONE]
    groups = itertools.product(themes, filter(None, (phone, wide)), (ADMIN_KEY, API_KEY))
    time_range = "30d" if state == "month" else "1h"
    with browsing() as browser:
        for theme, group_widths, key in groups:
            key_sights = [
                sight for sight in sights if (sight[0] == "playground") is (key == API_KEY)
            ]
            if not key_sights:
                continue
            size: Any = {"width": group_widths[0], "height": 1000}
            page = signed_in(browser, stack, key, viewport=size, color_scheme=theme)
            heard = listen(page, urlsplit(stack.dashboard).netloc)
            for name, query in key_sights:
                page.set_viewport_size(size)
                open_page(page, stack, name, time_range, query)
                for width in group_widths:
                    give_input(page, name)
                    show_whole(page, width)
                    problems = [*page.evaluate(CHECKS), *heard]
                    heard.clear()
                    file_name = f"{name}-picked" if query else name
                    yield Drawn(state, theme, width, file_name, problems, page.screenshot())
            page.context.close()


def give_input(page: Page, name: str) -> None:
    """Make a plan; let the playground send twice."""
    plan = page.get_by_role("button", name="Plan", exact=True)
    if name == "plan" and plan.count() and not page.get_by_text("What each change").count():
        plan.first.click()
        page.wait_for_selector("text=/What each change|There is no plan/", timeout=180_000)
    send = page.get_by_role("button", name="Send", exact=True)
    if name == "playground" and send.count() and not page.get_by_text("What became of").count():
        for _ in range(2):
            send.first.click()
            page.wait_for_selector("text=/What became of|The turn failed/", timeout=120_000)


if __name__ == "__main__":
    sys.exit(main())
