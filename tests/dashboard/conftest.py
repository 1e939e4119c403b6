"""Real gateways over real SQLite ledgers, one for each state that a page must draw."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest
from streamlit import config
from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

from dashboard.access.sessions import sessions
from tests.dashboard.ledgers import FILLS, fill
from tests.dashboard.signed_in import open_page, sign_in
from tests.gateway.serving import ADMIN_KEY, serve_gateway


@pytest.fixture(scope="session")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Gateways"]:
    """Gateways by the state of their ledger, started when first asked for."""
    with ExitStack() as stack:
        yield Gateways(tmp_path_factory.mktemp("ledgers"), stack)


@pytest.fixture(scope="session", autouse=True)
def pages_begin_at_once() -> Iterator[None]:
    """Each harness would look through all installed packages, and rewrite the scripts of pages.
    dashboard/.streamlit/config.toml has the latter off."""
    config.set_option("runner.magicEnabled", False)
    with pytest.MonkeyPatch.context() as patch:
        found_once = functools.cache(manifest_scanner.scan_component_manifests)
        patch.setattr(manifest_scanner, "scan_component_manifests", found_once)
        yield


@pytest.fixture(autouse=True)
def no_session_is_left() -> Iterator[None]:
    yield
    sessions().close_all()


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> "Show":
    """A page of a gateway, opened with a key, on which nothing went wrong."""

    def open_at(url: str, name: str, key: str = ADMIN_KEY, **query: str) -> AppTest:
        sign_in(monkeypatch, url, key)
        app = open_page(name, query)
        assert not app.exception and not app.error, (app.exception, app.error)
        return app

    return open_at


class Show(Protocol):
    def __call__(self, url: str, name: str, key: str = ADMIN_KEY, **query: str) -> AppTest: ...


class Gateways:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._urls: dict[str, str] = {}

    def data(self, state: str) -> Path:
        return self._folder / state

    def url(self, state: str) -> str:
        if state not in self._urls:
            fill(self.data(state), FILLS[state]())
            served = serve_gateway(self.data(state), "http://127.0.0.1:9")
            self._urls[state] = self._stack.enter_context(served)
        return self._urls[state]
