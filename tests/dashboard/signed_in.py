"""A page of the dashboard in Streamlit's own test harness, signed in as the server would."""

from pathlib import Path
from typing import Any

import pytest
from streamlit.runtime.context import ContextProxy, StreamlitCookies
from streamlit.testing.v1 import AppTest

from dashboard import client as client_module
from dashboard.access.sessions import COOKIE, sessions
from dashboard.client import AdminClient
from gateway.structs.fleet import About
from tests.gateway.serving import WAIT_SECONDS

APP = Path(__file__).resolve().parents[2] / "dashboard" / "app.py"


LINK = "requests?request="
_IDS = {"Id", "Last request", "Request id"}


def sign_in(monkeypatch: pytest.MonkeyPatch, gateway_url: str, key: str) -> None:
    """Open a real session and give the harness its cookie, which has no browser to hold it."""
    monkeypatch.setattr(client_module, "KEPT_SECONDS", 0.0)
    # The default of every call; a busy machine answers later than a page waits for.
    monkeypatch.setattr(client_module.TIMEOUT, "read", WAIT_SECONDS)
    client = AdminClient(gateway_url, key)
    cookie = sessions().open(client, client.get("/admin/v1/about", About))
    cookies = StreamlitCookies({COOKIE: cookie})
    monkeypatch.setattr(ContextProxy, "cookies", property(lambda self: cookies))


def open_page(name: str, query: dict[str, str] | None = None) -> AppTest:
    """The named page, as somebody who follows a link to it would come to it."""
    app = AppTest.from_file(APP, default_timeout=120)
    for parameter, value in (query or {}).items():
        app.query_params[parameter] = value
    if name != "overview":
        app.switch_page(f"views/{name}.py")
    return app.run()


def metrics(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def table(app: AppTest, column: str) -> Any:
    """The first table that has such a column; a link's cell is the id that it shows."""
    frame = next(
        element.value for element in app.dataframe if column in element.value.columns
    ).copy()
    for name in _IDS & set(frame):
        links = frame[name].dropna()
        assert links.str.startswith(LINK).all()
        frame[name] = frame[name].str.removeprefix(LINK)
    return frame


def said(app: AppTest, *kinds: str) -> str:
    """All that the page says, or that its elements of these kinds say."""
    element_kinds = kinds or (
        "text",
        "info",
        "markdown",
        "caption",
        "warning",
        "error",
        "subheader",
    )
    return " ".join(str(element.value) for kind in element_kinds for element in app.get(kind))


def press(app: AppTest, label: str) -> AppTest:
    next(button for button in app.button if button.label == label).click().run()
    assert not app.exception
    return app
