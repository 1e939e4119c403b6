"""The dashboard in Chromium: sign in with a key, and see what the gateway has counted."""

import os
import shutil
from functools import partial

from playwright.sync_api import ConsoleMessage, sync_playwright

from scripts.compose.project import ComposeError

WAIT_MS = 600_000
"""A busy machine needs minutes. A page that shows an error is not waited for."""
NUM_CARDS = 4
NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
# The cards' texts, read at one moment: a page that updates itself replaces them. Undefined until
# there are enough and each has its number, or until the page shows an exception.
CARDS = """
num => {
  const texts = name => [...document.querySelectorAll(`[data-testid="${name}"]`)].map(
    element => element.innerText.split(/\\s+/).filter(word => word).join(" "));
  const cards = texts("stMetric"), errors = texts("stException");
  const isThere = cards.length >= num && cards.every(text => text.includes(" "));
  return isThere || errors.length ? {cards, errors} : undefined;
}
"""


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
        seen = page.wait_for_function(CARDS, arg=NUM_CARDS).json_value()
        shown: list[str] = seen["cards"]
        errors += seen["errors"]
        browser.close()
    if errors or len(shown) < NUM_CARDS:
        raise ComposeError(f"the dashboard shows {len(shown)} cards and these errors: {errors}")
    return "; ".join(shown[:NUM_CARDS])
