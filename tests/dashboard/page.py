"""The dashboard as its user sees it: a process of its own and a browser, or else its test harness.

The page's text and HTML come back, its log goes to a file.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
from streamlit.testing.v1 import AppTest

from tests.e2e.stack import free_port

ROOT = Path(__file__).resolve().parents[2]
APP = str(ROOT / "dashboard" / "app.py")
START_SECONDS = 60


def page_of(gateway: str, admin_key: str, logs: Path) -> str:
    """All that the overview shows; with Chromium, its HTML too."""
    settings = {"DASHBOARD_GATEWAY_URL": gateway, "DASHBOARD_ADMIN_KEY": admin_key}
    port = free_port()
    flags = ["--server.port", str(port), "--server.address", "127.0.0.1"]
    command = [sys.executable, "-m", "streamlit", "run", APP, "--server.headless", "true", *flags]
    with (logs / "dashboard.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--logger.level", "debug"],
            env={**os.environ, **settings},
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(url, process)
        html = _html(url)
    finally:
        process.terminate()
        process.wait(30)
    return _harness_text(settings) + html


def _wait_until_up(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None and time.monotonic() < deadline, "no dashboard"
        try:
            if httpx.get(f"{url}/_stcore/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)


def _html(url: str) -> str:
    """What Chromium has of the page; nothing where there is none."""
    chromium = os.environ.get("CHROMIUM")
    if chromium is None:
        return ""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(url)
        page.get_by_test_id("stMetric").first.wait_for(timeout=60_000)
        text = page.content() + page.locator("body").inner_text()
        browser.close()
    return text


def _harness_text(settings: dict[str, str]) -> str:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        app = AppTest.from_file(APP, default_timeout=60).run()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    assert not app.exception and app.metric, "the page shows its numbers"
    app.session_state["client"]._http.close()
    return str(app)
