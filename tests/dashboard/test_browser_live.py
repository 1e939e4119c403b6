"""In a real browser, against a real gateway and engine: a lease is dropped, the playground runs."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any
from urllib.parse import urlsplit

import pytest
from anthropic import Anthropic

from scripts.stack import ADMIN_KEY, API_KEY, Stack, running_stack, serving_dashboard
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = os.environ.get("CHROMIUM") or which("chromium-headless-shell") or which("chromium")
ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "The handbook of the lighthouse keeper. " * 200
WAIT_MS = 180_000

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("browser"), "synthetic") as running:
        yield running


@pytest.fixture(scope="module")
def dashboard(stack: Stack) -> Iterator[str]:
    with serving_dashboard(stack.gateway) as server:
        yield server.wait().url


@contextmanager
def signed_in(dashboard: str, key: str) -> Iterator[Any]:
    """A page whose console and requests are watched: both must be clean in the end."""
    heard: list[str] = []
    own = urlsplit(dashboard).netloc
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1400})
        page.on("console", lambda m: heard.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on(
            "request",
            lambda request: (
                heard.append(request.url) if urlsplit(request.url).netloc not in ("", own) else None
            ),
        )
        page.goto(f"{dashboard}/login")
        page.fill("input[name=key]", key)
        page.click("button")
        # Whoever goes on before the session's cookie has come is sent back to the sign-in.
        page.wait_for_url(lambda url: "/login" not in url, timeout=WAIT_MS, wait_until="commit")
        yield page
        browser.close()
    assert not heard


def send(stack: Stack) -> Any:
    with Anthropic(base_url=stack.gateway, api_key=API_KEY, max_retries=0, timeout=120) as client:
        mark: Any = {"type": "ephemeral"}
        return client.messages.create(
            model="synthetic",
            max_tokens=4,
            system=[{"type": "text", "text": SYSTEM, "cache_control": mark}],
            messages=[{"role": "user", "content": "What is a lease?"}],
        )


def drop_all(admin: Admin) -> None:
    for lease in admin.get("leases"):
        path = f"leases/{lease['entry']['entry']}?workspace={lease['workspace']}"
        admin.delete(f"{path}&engine={lease['engine']}")


def test_a_lease_is_dropped_by_a_click_and_gone_in_the_engine(stack: Stack, dashboard: str) -> None:
    admin = Admin(stack.gateway, ADMIN_KEY)
    drop_all(admin)  # what the other test left: the click below picks the first row
    send(stack)
    assert len(admin.get("leases")) == 1
    with signed_in(dashboard, ADMIN_KEY) as page:
        page.goto(f"{dashboard}/prefixes")
        table = page.get_by_test_id("stDataFrame").first
        table.wait_for(timeout=WAIT_MS)
        # The table is a canvas; its first column holds the box that picks a row.
        table.click(position={"x": 16, "y": 52})
        drop = page.get_by_role("button", name="Drop it")
        drop.wait_for(timeout=WAIT_MS)
        drop.click()
        page.get_by_text("Dropped. The engine holds it no more.").wait_for(timeout=WAIT_MS)
    assert admin.get("leases") == []
    with stack.engine_client() as http:
        assert http.get("/v1/entries").json() == []
    assert send(stack).model_extra["holdfast"]["miss_reason"] == "dropped"


def test_the_playground_sends_and_shows_what_became_of_the_prompt(
    stack: Stack, dashboard: str
) -> None:
    with signed_in(dashboard, API_KEY) as page:
        page.goto(f"{dashboard}/playground")
        button = page.get_by_role("button", name="Send", exact=True)
        button.click(timeout=WAIT_MS)
        page.get_by_text("written, 1 hour").first.wait_for(timeout=WAIT_MS)
        page.get_by_text("synthetic 0 1 2").first.wait_for(timeout=WAIT_MS)
        button.click(timeout=WAIT_MS)
        page.get_by_text(re.compile(r"^[\d,]+ read from cache$")).first.wait_for(timeout=WAIT_MS)
    admin = Admin(stack.gateway, ADMIN_KEY)
    # Nothing else is read here: the other test's prompt is written anew each time.
    eventually(lambda: any(turn["cache_read_tokens"] > 1000 for turn in admin.get("turns")))
