"""The browser of tests, screenshots and measurements, and its sign-in to the dashboard."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars")


def find_chromium() -> str | None:
    """The browser's path: CHROMIUM's, or one of the usual names."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browsing(*flags: str) -> Iterator["Browser"]:
    """A browser with these command-line flags beside the usual ones."""
    from playwright.sync_api import sync_playwright  # not installed for every user of this module

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=[*FLAGS, *flags])
        yield browser
        browser.close()


def new_page(browser: "Browser", **options: Any) -> "Page":
    """A page in a context of its own; `options` are the context's."""
    return browser.new_context(locale="en-GB", timezone_id="UTC", **options).new_page()


def listen(page: "Page", heard: list[str]) -> None:
    """Add to `heard` what the page logs as an error."""
    page.on("console", lambda m: heard.append(f"console: {m.text}") if m.type == "error" else None)
    page.on("pageerror", lambda error: heard.append(f"script: {error}"))


def sign_in(page: "Page", url: str, key: str) -> None:
    page.goto(f"{url}/login")
    page.fill("#key", key)
    page.click("button")
