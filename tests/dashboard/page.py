"""The dashboard as a process of its own, and a browser in front of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, TimeoutError

from scripts.setup.chromium import browsing, find_chromium, listen, new_page
from scripts.stack import serving_dashboard

# All is drawn. Streamlit drops the filters that are not drawn yet when a link is clicked.
SETTLED = '[data-test-script-state="notRunning"]:not(:has([data-testid="stSkeleton"]))'
WAIT_MS = 180_000
# Each frame of an animation is painted by the processor.
STILL = """
const still = new CSSStyleSheet();
still.replaceSync("*, ::before, ::after { animation: none !important }");
document.adoptedStyleSheets.push(still);
"""


@contextmanager
def running_dashboard(gateway: str, logs: Path, **settings: str) -> Iterator[str]:
    """Serve it on a free port; its log goes to `dashboard.log`."""
    settings = {"STREAMLIT_LOGGER_LEVEL": "debug", **settings}
    with serving_dashboard(gateway, settings, logs / "dashboard.log") as server:
        yield server.wait().url


class Visit:
    """A page that is signed in, and everything that must not have happened meanwhile."""

    def __init__(self, opened: Browser, url: str, key: str | None, **options: object) -> None:
        self.url = url
        self.page: Page = new_page(opened, **options)
        self.context = self.page.context
        self.context.add_init_script(STILL)
        self._heard: list[str] = []
        addresses = (url, url.replace("http", "ws"), "data:", "blob:")
        listen(self.page, self._heard)
        self.page.on("dialog", lambda dialog: self._heard.append(dialog.message))
        self.context.on(
            "request",
            lambda request: request.url.startswith(addresses) or self._heard.append(request.url),
        )
        if key is not None:
            self._sign_in(key)

    def _sign_in(self, key: str) -> None:
        """As the form does it, but for the page that comes behind it: the slowest that there is."""
        login = f"{self.url}/login"
        reply = self.context.request.post(login, form={"key": key}, max_redirects=0)
        assert reply.status == 303, reply.text()

    def open(self, path: str) -> Page:
        self.page.goto(self.url + path)
        self.wait_until_still()
        return self.page

    def wait_until_still(self) -> None:
        sign = self.page.get_by_text("Updated").or_(self.page.get_by_test_id("stAlert"))
        sign.first.wait_for(timeout=WAIT_MS)
        self.page.locator(SETTLED).wait_for(timeout=WAIT_MS)

    def choose_from(self, label: str, option: str) -> None:
        """Open a choice until it offers this: the page may close it once, as it refreshes."""
        choice = self.page.get_by_role("option").filter(has_text=option)
        deadline = time.monotonic() + WAIT_MS / 1000
        while not choice.count():
            assert time.monotonic() < deadline, f"{label} does not offer {option}"
            self.page.get_by_label(label).first.click()
            try:
                choice.first.wait_for(timeout=5000)
            except TimeoutError:
                self.page.keyboard.press("Escape")

    def text(self) -> str:
        return self.page.locator("body").inner_text()

    def metric(self, label: str) -> str:
        card = self.page.get_by_test_id("stMetric").filter(has_text=label).first
        card.wait_for(timeout=WAIT_MS)
        return card.get_by_test_id("stMetricValue").inner_text()

    def check(self) -> None:
        """No error in the console, no dialog, no request to another host."""
        assert not self._heard, "; ".join(self._heard)


def page_of(gateway: str, key: str, logs: Path) -> str:
    """All that the overview shows, as text and HTML; just the sign-in page without a browser."""
    with running_dashboard(gateway, logs) as url:
        if find_chromium() is None:
            return httpx.get(f"{url}/login", timeout=120).text
        with browsing() as opened:
            visit = Visit(opened, url, key)
            visit.open("/")
            return visit.page.content() + visit.text()
