"""The dashboard in Chromium: sign in with a key, and see what the gateway has counted."""

import os
import shutil
from functools import partial

from playwright.sync_api import ConsoleMessage, sync_playwright

from scripts.compose.project import ComposeError

WAIT_MS = 90_000
NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
# The script has run, and nothing that it drew is being replaced.
SETTLED = '[data-testid="stApp"][data-test-script-state="notRunning"]'


def chromium() -> str | None:
    """The browser's path: CHROMIUM's, or one of the usual names."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def note_error(errors: list[str], said: ConsoleMessage) -> None:
    if said.type == "error":
        errors.append(said.text)


def sign_in(url: str, key: str) -> str:
    """Sign in and return the first cards of the overview.

    Raises ComposeError for any error that the page shows or logs.
    """
    errors: list[str] = []
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=chromium(), args=flags)
        page = browser.new_page(locale="en-GB", timezone_id="UTC")
        page.set_default_timeout(WAIT_MS)
        page.on("console", partial(note_error, errors))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{url}/login")
        page.fill("#key", key)
        page.click("button")
        page.get_by_text("Updated").first.wait_for()
        page.get_by_test_id("stMetric").first.wait_for()
        page.locator(SETTLED).wait_for()
        cards = page.get_by_test_id("stMetric").all()
        shown = [" ".join(card.inner_text().split()) for card in cards]
        errors += [box.inner_text() for box in page.get_by_test_id("stException").all()]
        browser.close()
    if errors or not shown:
        raise ComposeError(f"the dashboard shows {len(shown)} cards and these errors: {errors}")
    return "; ".join(shown[:4])
