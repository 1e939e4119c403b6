"""Pages in bad times, in a real browser: a key that ends, a dashboard that is started again, a page
that is loaded again, names that nobody has, and a gateway that nobody has asked anything."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, WebSocketRoute

from scripts.setup.chromium import browsing, find_chromium
from scripts.stack import ADMIN_KEY, free_port, running_stack
from tests.dashboard.page import WAIT_MS, Visit, running_dashboard
from tests.gateway.admin_client import Admin

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium"),
]

NUM_REFRESHES = 40


@dataclass(frozen=True)
class Site:
    gateway: str
    url: str
    browser: Browser
    logs: Path

    @property
    def admin(self) -> Admin:
        return Admin(self.gateway)

    @contextmanager
    def visit(self, key: str = ADMIN_KEY) -> Iterator[Visit]:
        visit = Visit(self.browser, self.url, key)
        yield visit
        visit.context.close()


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Site]]:
    """Two sites with one browser. Playwright keeps this thread's event loop running, and a stack
    cannot start beside one: both start before the browser."""
    first = tmp_path_factory.mktemp("bad-times")
    second = tmp_path_factory.mktemp("untouched")
    with (
        serving_site(first) as (gateway, url),
        serving_site(second) as (untouched_gateway, untouched_url),
        browsing() as browser,
    ):
        yield (
            Site(gateway, url, browser, first),
            Site(untouched_gateway, untouched_url, browser, second),
        )


@pytest.fixture
def site(sites: tuple[Site, Site]) -> Site:
    return sites[0]


@pytest.fixture
def untouched(sites: tuple[Site, Site]) -> Site:
    """A site of which one test asks something, and no other."""
    return sites[1]


@contextmanager
def serving_site(folder: Path) -> Iterator[tuple[str, str]]:
    """The addresses of a gateway and its dashboard."""
    with (
        running_stack(folder / "data", "synthetic", {}) as stack,
        running_dashboard(stack.gateway, folder) as url,
    ):
        yield stack.gateway, url


def test_where_nobody_asked_anything_nothing_is_ticked(untouched: Site) -> None:
    with untouched.visit() as visit:
        for path in ("/", "/why", "/fleet", "/advice"):
            page = visit.open(f"{path}?range=1h")
            page_text = visit.text()
            assert "Nothing missed" not in page_text, path
            assert page.get_by_text("check_circle").count() == 0, path
        visit.open("/why?range=1h")
        assert "Nothing was asked in the last hour" in visit.text()


@pytest.mark.parametrize(
    "name",
    ["model", *(pytest.param(name, marks=pytest.mark.slow) for name in ("workspace", "engine"))],
)
def test_a_name_that_nobody_has_is_said_to_be_unknown(site: Site, name: str) -> None:
    with site.visit() as visit:
        for path in ("/", "/savings", "/requests", "/why"):
            visit.open(f"{path}?range=1h&{name}=no-such-thing")
            page_text = visit.text()
            assert f"The gateway knows no {name} of this name:\n" in page_text, path
            assert "no-such-thing" in page_text
            assert "To see numbers here" not in page_text, path
        visit.open("/savings?range=1h&workspace=default")
        assert "The gateway knows no" not in visit.text()
        assert "run this command with a key of the chosen workspace" in visit.text()


def test_a_page_of_a_time_that_is_over_offers_no_command_that_fills_it(site: Site) -> None:
    with site.visit() as visit:
        visit.open("/savings?range=custom&from=2026-01-01T00:00&to=2026-01-02T00:00")
        assert "No requests in this range" in visit.text()
        assert "To see numbers here" not in visit.text()


@pytest.mark.parametrize(
    "path",
    [
        "/?range=1h",
        "/requests?range=30d",
        *(pytest.param(path, marks=pytest.mark.slow) for path in ("/playground", "/plan")),
    ],
)
def test_what_a_page_shows_goes_with_its_key(site: Site, path: str) -> None:
    """Within seconds, also on pages that ask anew each minute or never."""
    key_id, key = site.admin.make_key("default")
    with site.visit(key) as visit:
        page = visit.page
        page.goto(site.url + path)
        page.get_by_role("button", name="Sign out").wait_for(timeout=WAIT_MS)
        site.admin.post(f"keys/{key_id}/revoke")
        page.get_by_text("The session or its key has ended").wait_for(timeout=WAIT_MS)
        assert "default" not in visit.text()
        page.reload()
        assert "/login" in page.url
        page.get_by_text("You are signed out").wait_for(timeout=WAIT_MS)


def test_refreshes_on_their_way_leave_what_a_page_says_when_its_key_has_ended(site: Site) -> None:
    """Several parts of a page refresh themselves: some ask just when the page is signed out."""
    key_id, key = site.admin.make_key("default")
    with site.visit(key) as visit:
        page = visit.page
        servers = list[WebSocketRoute]()
        refreshes = list[str | bytes]()
        is_holding = False

        def between(socket: WebSocketRoute) -> None:
            servers.append(socket.connect_to_server())
            socket.on_message(pass_on)

        def pass_on(message: str | bytes) -> None:
            if is_holding:
                refreshes.append(message)
            else:
                servers[-1].send(message)

        page.route_web_socket("**/_stcore/stream", between)
        visit.open("/savings?range=1h")
        is_holding = True
        site.admin.post(f"keys/{key_id}/revoke")
        deadline = time.monotonic() + WAIT_MS / 1000
        while not refreshes:
            assert time.monotonic() < deadline, "the page does not refresh itself"
            page.wait_for_timeout(100)
        for _ in range(NUM_REFRESHES):
            servers[-1].send(refreshes[0])
            page.wait_for_timeout(2)
        page.get_by_text("The session or its key has ended").wait_for(timeout=WAIT_MS)
        page.wait_for_timeout(1000)
        assert "The session or its key has ended" in visit.text()


def test_a_page_of_a_dashboard_that_was_started_again_leads_to_the_sign_in(site: Site) -> None:
    settings = {"DASHBOARD_PORT": str(free_port())}
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        url = first.enter_context(running_dashboard(site.gateway, site.logs, **settings))
        visit = Visit(site.browser, url, ADMIN_KEY)
        stack.callback(visit.context.close)
        page = visit.open("/savings?range=6h")
        first.close()
        assert stack.enter_context(running_dashboard(site.gateway, site.logs, **settings)) == url
        page.get_by_text("You are signed out").wait_for(timeout=WAIT_MS)
        assert "Connection failed" not in visit.text()
        page.fill("#key", ADMIN_KEY)
        page.click("button")
        visit.wait_until_still()
        assert page.url == f"{url}/savings?range=6h"


def test_a_new_key_is_there_after_a_reload(site: Site) -> None:
    with site.visit() as visit:
        page = visit.open("/workspaces?range=1h")
        page.get_by_text("Make and change workspaces and keys").click()
        page.get_by_role("tab", name="New or rotated key").click()
        # A click while the page refreshes is lost.
        visit.wait_until_still()
        page.get_by_role("button", name="Create key").click()
        notice = page.get_by_text("The key is shown this once")
        notice.wait_for(timeout=WAIT_MS)
        key = page.get_by_test_id("stCode").first.inner_text()
        page.reload()
        notice.wait_for(timeout=WAIT_MS)
        assert page.get_by_test_id("stCode").first.inner_text() == key
        page.get_by_role("button", name="Dismiss").click()
        notice.wait_for(state="detached", timeout=WAIT_MS)
        visit.open("/workspaces?range=1h")
        assert key not in visit.text()


def test_the_playground_makes_a_key_when_something_is_sent(site: Site) -> None:
    site.admin.workspace("playing")

    def keys() -> list[str]:
        listing = site.admin.get("keys?workspace=default") + site.admin.get(
            "keys?workspace=playing"
        )
        return [key["id"] for key in listing if key["name"] == "playground"]

    with site.visit() as visit:
        page = visit.page
        page.goto(f"{site.url}/playground")
        choice = page.get_by_role("combobox", name="Act as the workspace")
        choice.click(timeout=WAIT_MS)
        page.get_by_role("option", name="playing").click(timeout=WAIT_MS)
        send = page.get_by_role("button", name="Send", exact=True)
        send.wait_for(timeout=WAIT_MS)
        assert keys() == []
        send.click()
        page.get_by_text("What became of the prompt").wait_for(timeout=WAIT_MS)
        assert len(keys()) == 1
        send.click()
        page.get_by_text("The second send").first.wait_for(timeout=WAIT_MS)
        assert len(keys()) == 1
