"""Leases that end with a killed engine, as a person meets them: in a real browser, in `/metrics`
and on the command line. The engine has no store, and is killed twice."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator

from dashboard.ui import formats
from scripts.bench.load import marked
from scripts.setup.chromium import browsing, find_chromium
from scripts.stack import ADMIN_KEY, ROOT, python
from tests.dashboard.page import WAIT_MS, Visit, running_dashboard
from tests.e2e.fleet import Fleet, running_fleet
from tests.gateway.serving import eventually

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium"),
]
NUM_LEASES = 2


@dataclass(frozen=True)
class Site:
    fleet: Fleet
    url: str
    browser: Browser

    def lease(self, life: int) -> None:
        """Let so many one-hour leases be granted, until the ledger knows them."""
        before = self.kept()["held"]
        for number in range(NUM_LEASES):
            system = marked(f"Life {life}, rule {number}. " * 200, "1h")
            self.fleet.gateway.answer(system)
        eventually(lambda: self.kept()["held"] == before + NUM_LEASES)

    def kept(self) -> dict[str, Any]:
        shares: dict[str, Any] = self.fleet.gateway.get("leases/kept")
        return shares

    def metric(self, series: str) -> float:
        url = f"{self.fleet.gateway.url}/metrics"
        text = httpx.get(url, timeout=120, trust_env=False).text
        (line,) = [line for line in text.splitlines() if line.startswith(f"{series} ")]
        return float(line.removeprefix(f"{series} "))

    def conditions(self) -> subprocess.CompletedProcess[str]:
        """What the command line says."""
        command = [*python("gateway"), "conditions", "--url", self.fleet.gateway.url]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("lost")
    with (
        running_fleet(folder, settings={"ENGINE_MIN_CACHE_TOKENS": "64"}) as fleet,
        running_dashboard(fleet.gateway.url, folder) as url,
        browsing() as browser,
    ):
        yield Site(fleet, url, browser)


@pytest.fixture
def visit(site: Site) -> Iterator[Visit]:
    visit = Visit(site.browser, site.url, ADMIN_KEY)
    yield visit
    visit.context.close()


def card_of(visit: Visit) -> Locator:
    return visit.page.get_by_test_id("stMetric").filter(has_text="Leases kept").first


def wait_for_card(visit: Visit, words: str) -> str:
    """The card's text, once it says this by itself."""
    card = card_of(visit)
    card.get_by_text(words).first.wait_for(timeout=WAIT_MS)
    return card.inner_text()


def is_green(visit: Visit) -> bool:
    """Whether what stands below the card's value is green, as it is where all were kept."""
    below = card_of(visit).get_by_test_id("stMetricDelta")
    colour = below.evaluate("element => getComputedStyle(element).color")
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return green > red and green > blue


def check_down(site: Site, visit: Visit, lost: int) -> None:
    """While the engine is down, what it held is not known on any page, and nothing is green."""
    (down,) = site.fleet.gateway.get("conditions")[:1]
    assert down["kind"] == "engine_not_answering"
    visit.open("/?range=1h")
    card = wait_for_card(visit, "not known since")
    since = formats.since(site.kept()["not_known_since_ms"])
    assert f"{NUM_LEASES} not known since {since}" in card
    assert "100" not in card
    assert ("lost in a restart" in card) == (lost > 0)
    assert not is_green(visit)
    for path, words in (
        ("/memory", "The engine does not tell what is in its memory"),
        ("/prefixes", "What is promised is not known right now"),
    ):
        page = visit.open(f"{path}?range=1h")
        page.get_by_text("engine-0 has not answered since").first.wait_for(timeout=WAIT_MS)
        page_text = visit.text()
        assert words in page_text, path
        assert "No engine is running" not in page_text, path
    eventually(lambda: site.metric("holdfast_gateway_leases_not_known") == NUM_LEASES)
    conditions = site.conditions()
    assert conditions.returncode == 1
    assert "engine-0 has not answered since" in conditions.stdout


def check_back(site: Site, visit: Visit, lost: int) -> None:
    """When it is back, they ended early, and every place says how many and why."""
    visit.open("/?range=1h")
    card = wait_for_card(visit, f"early: {lost} lost in a restart")
    assert visit.metric("Leases kept") == "0.0%"
    assert "not known" not in card
    assert not is_green(visit)
    strip = visit.page.get_by_text("engine-0 has ended leases before their time since")
    strip.filter(has_text=f"{lost} lost in a restart").first.wait_for(timeout=WAIT_MS)
    series = 'holdfast_gateway_leases_ended_total{reason="restart"}'
    eventually(lambda: site.metric(series) == lost)
    assert site.metric("holdfast_gateway_leases_not_known") == 0
    assert (
        site.metric('holdfast_gateway_conditions{kind="leases_ended_early",severity="warning"}')
        == 1
    )
    conditions = site.conditions()
    assert conditions.returncode == 1
    assert f"{lost} lost in a restart" in conditions.stdout
    visit.open("/prefixes?range=1h")
    assert "not known since" not in visit.text()


def test_leases_of_a_killed_engine_are_not_known_and_then_lost_twice(
    site: Site, visit: Visit
) -> None:
    for life in (1, 2):
        site.lease(life)
        site.fleet.kill()
        eventually(lambda: site.kept()["not_known"] == NUM_LEASES)
        check_down(site, visit, lost=NUM_LEASES * (life - 1))
        site.fleet.restart()
        eventually(lambda: site.fleet.num_ready() == 1)
        check_back(site, visit, lost=NUM_LEASES * life)
