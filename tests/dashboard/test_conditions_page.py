"""A sick engine is seen on every page, in a real browser: killed, standing still, draining, with a
store that can't be written. In Memory and Prefixes it is a row, and not an absence."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, Locator

from dashboard.views import entries
from scripts.setup.chromium import browsing, find_chromium
from scripts.stack import ADMIN_KEY
from tests.dashboard.page import WAIT_MS, Visit, running_dashboard
from tests.e2e.fleet import Fleet, running_fleet
from tests.gateway.serving import eventually

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium"),
]
SYSTEM = "The handbook of the lighthouse keeper. " * 300
ADMIN_PAGES = {"memory", "fleet"}


@dataclass(frozen=True)
class Site:
    fleet: Fleet
    url: str
    browser: Browser

    def visit(self, key: str = ADMIN_KEY) -> Visit:
        return Visit(self.browser, self.url, key)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("conditions")
    # No directory can be made there, by root either.
    per_engine = ({}, {"ENGINE_STORE": "/proc/no-store"})
    with (
        running_fleet(folder, 2, per_engine=per_engine) as fleet,
        running_dashboard(fleet.gateway.url, folder) as url,
        browsing() as opened,
    ):
        yield Site(fleet, url, opened)


@pytest.fixture
def site(served: Site) -> Site:
    """Of all that can be wrong only the store is.

    Leases that ended with an engine that another test killed are told for ten minutes more.
    """
    served.fleet.restored()

    def is_quiet() -> bool:
        conditions = served.fleet.gateway.get("conditions")
        kinds = [condition["kind"] for condition in conditions]
        return [kind for kind in kinds if kind != "leases_ended_early"] == ["store_off"]

    eventually(is_quiet)
    return served


def strip(visit: Visit, severity: str) -> Locator:
    return visit.page.locator(f'[class*="st-key-condition_{severity}"]')


def background(banner: Locator) -> tuple[int, int, int]:
    colour: str = banner.evaluate("each => getComputedStyle(each).backgroundColor")
    red, green, blue = (int(part) for part in colour.partition("(")[2].rstrip(")").split(",")[:3])
    return red, green, blue


def test_a_killed_engine_is_a_red_strip_on_every_page_until_it_is_back(site: Site) -> None:
    visit = site.visit()
    visit.open("/?range=1h")
    assert strip(visit, "critical").count() == 0
    site.fleet.kill(0)
    banner = strip(visit, "critical").first
    banner.wait_for(timeout=WAIT_MS)
    assert "engine-0 has not answered since " in banner.inner_text()
    assert ": cannot connect" in banner.inner_text()
    assert "start it again" in banner.inner_text()
    assert "`" not in banner.inner_text()
    assert banner.locator("code").first.inner_text() == "docker inspect"
    red, green, blue = background(banner)
    assert red > green + 15 and red > blue + 15
    for entry in entries():
        visit.open(f"/{entry.name}?range=1h")
        strip(visit, "critical").first.wait_for(timeout=WAIT_MS)
        assert "engine-0 has not answered since " in visit.text(), entry.name
        assert "The store of engine-1 has been off since " in visit.text(), entry.name
        top = strip(visit, "critical").first.bounding_box()
        title = visit.page.locator("h1").first.bounding_box()
        assert top and title and top["y"] < title["y"], entry.name
    site.fleet.restart(0)
    strip(visit, "critical").first.wait_for(state="detached", timeout=WAIT_MS)
    visit.check()
    visit.context.close()


def test_an_engine_that_stands_still_is_a_row_in_memory_and_prefixes(site: Site) -> None:
    site.fleet.gateway.answer(SYSTEM)
    visit = site.visit()
    for process in site.fleet.processes:
        process.send_signal(signal.SIGSTOP)
    try:
        visit.open("/memory")
        banner = strip(visit, "critical").first
        for number in range(2):
            sentence = f"engine-{number} has not answered since "
            banner.get_by_text(sentence).wait_for(timeout=WAIT_MS)
        assert banner.get_by_text("SIGCONT").count() == 1, "what to do stands there once"
        visit.page.get_by_text("None of 2 engines tells").wait_for(timeout=WAIT_MS)
        assert "scripts/run" not in visit.text()
        heading = visit.page.get_by_role("heading", name="Engines whose memory is not known now")
        heading.wait_for(timeout=WAIT_MS)
        visit.open("/prefixes")
        visit.page.get_by_text("What is promised is not known right now").wait_for(timeout=WAIT_MS)
        assert "Nothing is held" not in visit.text()
        assert visit.metric("Leases") == "–"
        visit.open("/fleet?range=1h")
        assert "scripts/run" not in visit.text()
    finally:
        for process in site.fleet.processes:
            process.send_signal(signal.SIGCONT)
    visit.context.close()


def test_draining_is_blue_and_a_store_that_is_off_is_amber(site: Site) -> None:
    site.fleet.gateway.use(1, "drain")
    visit = site.visit()
    visit.open("/?range=1h")
    draining = strip(visit, "info").first
    draining.wait_for(timeout=WAIT_MS)
    assert "engine-1 has been draining since " in draining.inner_text()
    red, _, blue = background(draining)
    assert blue > red
    off = strip(visit, "warning").filter(has_text="the store of engine-1").first
    assert "The store of engine-1 has been off since " in off.inner_text()
    assert "can't be opened or written" in off.inner_text()
    red, green, blue = background(off)
    assert red > blue + 15 and green > blue
    visit.context.close()


@pytest.mark.slow  # tests/e2e/test_conditions.py asks the API the same
def test_a_workspaces_key_sees_how_engines_fare(site: Site) -> None:
    site.fleet.gateway.workspace("guests")
    _, key = site.fleet.gateway.make_key("guests")
    site.fleet.kill(0)
    visit = site.visit(key)
    for entry in entries():
        if entry.name in ADMIN_PAGES:
            continue
        visit.open(f"/{entry.name}?range=1h")
        banner = strip(visit, "critical").first
        banner.wait_for(timeout=WAIT_MS)
        assert "engine-0 has not answered since " in banner.inner_text()
        assert "HOLDFAST_ENGINES" not in visit.text()
    visit.context.close()
