"""The dashboard over a gateway with sample data, or with a synthetic engine and some traffic."""

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from playwright.sync_api import Browser, Page

from dashboard.views.catalogue import entries
from scripts.bench.load import MESSAGES, body_of, headers_of, marked
from scripts.setup.chromium import new_page, sign_in
from scripts.stack import (
    ADMIN_KEY,
    free_port,
    python,
    run,
    serving_dashboard,
    serving_engine,
    serving_gateway,
    url_of,
)

PAGES = tuple(entry.name for entry in entries())
IDLE = '[data-testid="stApp"][data-test-script-state="notRunning"]'
WAIT_MS = 180_000
SHOWN = '[data-testid="stMetric"], [data-testid="stDataFrame"], [data-testid="stAlert"], textarea'


@dataclass(frozen=True, slots=True)
class DashboardStack:
    gateway: str
    dashboard: str
    dashboard_pid: int


@contextmanager
def running(data: Path, *, num_engines: int = 0) -> Iterator[DashboardStack]:
    """A gateway over `data`, a dashboard, and as many synthetic engines as are wanted."""
    settings = {"ENGINE_NUM_BLOCKS": "6000", "ENGINE_HOST_BLOCKS": "2000"}
    with ExitStack() as stack:
        engines = [
            stack.enter_context(serving_engine("synthetic", settings)) for _ in range(num_engines)
        ]
        # Without an engine it is never ready, and serves what the ledger has.
        urls = [one.url for one in engines] or [url_of(free_port())]
        ready = "/readyz" if num_engines else "/healthz"
        gateway = stack.enter_context(serving_gateway(data, urls, ready=ready))
        dashboard = stack.enter_context(serving_dashboard(gateway.url))
        for server in (*engines, gateway, dashboard):
            server.wait()
        yield DashboardStack(gateway.url, dashboard.url, dashboard.pid)


def seed(data: Path, num_turns: int) -> None:
    """Fill an empty ledger with the sample month."""
    for command in (["migrate"], ["seed", "--turns", str(num_turns)]):
        run([*python("gateway"), *command], {"HOLDFAST_DATA": str(data)})


def send_traffic(gateway: str, num_turns: int) -> None:
    """Turns of three workspaces with shared prefixes, more than the pool holds."""
    admin, chance = {"x-api-key": ADMIN_KEY}, random.Random(1)
    keys = []
    with httpx.Client(base_url=gateway, timeout=60, trust_env=False) as http:
        for name in ("support-desk", "coding", "reports"):
            http.post("/admin/v1/workspaces", json={"id": name}, headers=admin).raise_for_status()
            made = http.post("/admin/v1/keys", json={"workspace": name}, headers=admin)
            keys.append(made.json()["key"])
        for number in range(num_turns):
            key, which = chance.choice(keys), chance.randrange(6)
            text = f"{which} " + "The lamp is lit at dusk. " * (240 + 150 * which)
            system, limit = marked(text, "1h" if which % 2 else "5m"), chance.randrange(1, 8)
            question = f"{number} " * chance.randrange(10, 900)
            body = body_of("synthetic", system, question, max_tokens=limit)
            http.post(MESSAGES, json=body, headers=headers_of(key)).raise_for_status()


def signed_in(
    browser: Browser, stack: DashboardStack, key: str = ADMIN_KEY, **options: Any
) -> Page:
    """A page in a context of its own; `options` are the context's."""
    page = new_page(browser, **options)
    sign_in(page, stack.dashboard, key)
    page.wait_for_load_state()
    return page


def open_page(
    page: Page,
    stack: DashboardStack,
    name: str,
    time_range: str,
    query: Mapping[str, str] | None = None,
) -> float:
    """Go there; return the seconds until it shows its numbers and its script has ended."""
    asked = urlencode({"range": time_range, **(query or {})})
    started = time.perf_counter()
    page.goto(f"{stack.dashboard}/{name}?{asked}", wait_until="domcontentloaded")
    _wait_for_numbers(page)
    return time.perf_counter() - started


def switch_page(page: Page, name: str) -> float:
    """Go there by the sidebar; return the seconds, as `open_page` does."""
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
