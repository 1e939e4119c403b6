"""The dashboard in a real browser, before a real gateway and the synthetic engine."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from anthropic import Anthropic
from playwright.sync_api import Browser

from scripts.stack import ADMIN_KEY, API_KEY, running_stack
from tests.dashboard.ledgers import HOSTILE, fill, hostile
from tests.dashboard.page import WAIT_MS, Visit, browser, chromium, running_dashboard
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no Chromium"),
]
PAGES = ("/", "/savings", "/workspaces", "/requests", "/why")
CONTRAST = (Path(__file__).parent / "contrast.js").read_text("utf-8")
BOOK = "A lease holds blocks until it ends. " * 120


@dataclass(frozen=True)
class Site:
    gateway: str
    url: str
    browser: Browser
    theirs: str  # a key of the workspace `theirs`

    def ask(self, system: str, key: str = API_KEY) -> str:
        """One request with a marked system prompt; its id."""
        with Anthropic(base_url=self.gateway, api_key=key, max_retries=0) as client:
            message = client.messages.create(
                model="holdfast-demo",
                max_tokens=8,
                system=[{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
                messages=[{"role": "user", "content": "What is a lease?"}],
            )
        return message.id

    def is_recorded(self, turn_id: str) -> bool:
        headers = {"x-api-key": ADMIN_KEY}
        found = httpx.get(f"{self.gateway}/admin/v1/turns/{turn_id}", headers=headers, timeout=120)
        return found.status_code == 200


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    fill(folder / "data", hostile())
    engine = {"ENGINE_MIN_CACHE_TOKENS": "64"}
    with (
        running_stack(folder / "data", "synthetic", engine) as stack,
        running_dashboard(stack.gateway, folder) as url,
        browser() as opened,
    ):
        admin = Admin(stack.gateway, ADMIN_KEY)
        admin.workspace("theirs", display_name=HOSTILE)
        yield Site(stack.gateway, url, opened, admin.make_key("theirs")[1])


@pytest.fixture
def visits(site: Site) -> Iterator[list[Visit]]:
    """What a test opened; each must have been without errors and requests to other hosts."""
    opened: list[Visit] = []
    yield opened
    for visit in opened:
        visit.context.close()
        visit.check()


@pytest.fixture
def admin(site: Site, visits: list[Visit]) -> Visit:
    visits.append(Visit(site.browser, site.url, ADMIN_KEY))
    return visits[-1]


def test_traffic_moves_the_numbers(site: Site, admin: Visit) -> None:
    """Without a reload, and without anything being drawn anew that stays."""
    gateway = Admin(site.gateway, ADMIN_KEY)
    gateway.workspace("moving")
    key = gateway.make_key("moving")[1]
    first = site.ask(BOOK, key)
    eventually(lambda: site.is_recorded(first))
    page = admin.open("/?range=1h&workspace=moving")
    assert admin.metric("Requests") == "1"
    card = page.get_by_test_id("stMetric").first.element_handle()
    for _ in range(3):
        site.ask(BOOK, key)
    page.get_by_test_id("stMetricValue").get_by_text("4", exact=True).wait_for(timeout=WAIT_MS)
    hit_rate = admin.metric("Token hit rate")
    assert 70.0 < float(hit_rate.removesuffix("%")) < 75.0, (
        "three of four read all but the question"
    )
    assert card.evaluate("element => element.isConnected"), "the cards were replaced"


def test_a_deep_link_opens_one_request(site: Site, admin: Visit) -> None:
    # Prefixes are named every 8,192 characters: these two share the first name.
    site.ask(BOOK * 2 + " Today is Sunday.")
    turn_id = site.ask(BOOK * 2 + " Today is Monday.")
    eventually(lambda: site.is_recorded(turn_id))
    page = admin.open(f"/requests?request={turn_id}&range=1h")
    page.get_by_text(turn_id).first.wait_for(timeout=WAIT_MS)
    assert admin.metric("Read from cache") == "0"
    page.get_by_text("Why did this miss?").last.click()
    page.get_by_text("What to change").wait_for(timeout=WAIT_MS)
    assert f"miss={turn_id}" in page.url and "range=1h" in page.url
    assert admin.metric("First difference") == "System"
    assert admin.metric("Cost of the miss").startswith("$")


def test_a_link_leads_through_the_sign_in(site: Site, visits: list[Visit]) -> None:
    visit = Visit(site.browser, site.url, None)
    visits.append(visit)
    page = visit.page
    page.goto(f"{site.url}/savings?range=6h")
    assert "/login?next=" in page.url
    page.fill("#key", API_KEY)
    page.click("button")
    visit.wait_until_still()
    assert page.url == f"{site.url}/savings?range=6h"
    assert page.get_by_role("heading", name="Savings").is_visible()


def test_filters_stay_from_page_to_page(admin: Visit) -> None:
    page = admin.open("/?range=6h&workspace=default")
    page.get_by_role("link", name="Savings").click()
    page.get_by_role("heading", name="Savings", exact=True).wait_for(timeout=WAIT_MS)
    admin.wait_until_still()
    page.wait_for_url(re.compile("/savings.*range=6h"), timeout=WAIT_MS)
    assert "workspace=default" in page.url


def test_a_workspace_sees_itself_alone(site: Site, visits: list[Visit]) -> None:
    turn_id = site.ask(BOOK, site.theirs)
    mine = site.ask(BOOK)
    eventually(lambda: site.is_recorded(turn_id) and site.is_recorded(mine))
    visit = Visit(site.browser, site.url, site.theirs)
    visits.append(visit)
    visit.open("/?range=1h&workspace=default")
    assert visit.metric("Requests") == "1", "the only one that asks with that key"
    assert "Engines now" not in visit.text()
    visit.open(f"/requests?request={mine}")
    visit.page.get_by_text("There is no such request").wait_for(timeout=WAIT_MS)
    visit.open(f"/why?miss={mine}")
    visit.page.get_by_text("There is no such request").wait_for(timeout=WAIT_MS)
    visit.open("/workspaces")
    assert visit.metric("With traffic") == "1"


@pytest.mark.parametrize("path", PAGES)
def test_hostile_names_are_only_names(admin: Visit, path: str) -> None:
    """Nothing is loaded, run or marked up: `visits` sees requests, errors and dialogs."""
    page = admin.open(f"{path}?range=24h&request=msg_{1:028x}&miss=msg_{1:028x}")
    assert page.locator("img[src*='evil']").count() == 0
    admin.choose_from("Model", HOSTILE)
    assert page.locator("img[src*='evil']").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(site: Site, visits: list[Visit], scheme: str) -> None:
    """Contrast of 4.5 to 1 at least, and nothing wider than the window."""
    turn_id = site.ask(BOOK + f" In {scheme}.")
    eventually(lambda: site.is_recorded(turn_id))
    viewport = {"width": 1200, "height": 1000}
    visit = Visit(site.browser, site.url, ADMIN_KEY, color_scheme=scheme, viewport=viewport)
    visits.append(visit)
    for path in PAGES:
        page = visit.open(f"{path}?range=24h&request={turn_id}&miss={turn_id}")
        page.wait_for_timeout(1500)  # charts are drawn by the browser, after the script
        assert page.evaluate(CONTRAST) == [], path
        wide = "document.querySelector('[data-testid=stMain]')"
        assert page.evaluate(f"{wide}.scrollWidth - {wide}.clientWidth") <= 0, path
        clipped = page.evaluate(
            """() => [...document.querySelectorAll('[data-testid=stMetricValue] div')]
                .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)"""
        )
        assert clipped == [], path


def test_signing_out_ends_what_is_open_elsewhere(admin: Visit) -> None:
    page = admin.open("/")
    other = admin.context.new_page()
    other.goto(f"{admin.url}/savings")
    other.get_by_text("Updated").wait_for(timeout=WAIT_MS)
    other.get_by_role("button", name="Sign out").click()
    other.get_by_text("Reload this page to sign in again").wait_for(timeout=WAIT_MS)
    page.get_by_text("Reload this page to sign in again").wait_for(timeout=WAIT_MS)
    page.reload()
    assert page.url.endswith("/login")
