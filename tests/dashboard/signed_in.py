"""A page of the dashboard in Streamlit's own test harness, signed in as the server would."""

from pathlib import Path

import pytest
from streamlit.runtime.context import ContextProxy, StreamlitCookies
from streamlit.testing.v1 import AppTest

from dashboard import client as client_module
from dashboard.access.sessions import COOKIE, sessions
from dashboard.client import AdminClient
from gateway.admin.structs.fleet import About

APP = Path(__file__).resolve().parents[2] / "dashboard" / "app.py"


def sign_in(monkeypatch: pytest.MonkeyPatch, gateway_url: str, key: str) -> AdminClient:
    """Open a real session and give the harness its cookie, which has no browser to hold it."""
    monkeypatch.setattr(client_module, "KEPT_SECONDS", 0.0)
    made = AdminClient(gateway_url, key)
    cookie = sessions().open(made, made.get("/admin/v1/about", About))
    cookies = StreamlitCookies({COOKIE: cookie})
    monkeypatch.setattr(ContextProxy, "cookies", property(lambda self: cookies))
    return made


def open_page(name: str, query: dict[str, str] | None = None) -> AppTest:
    """The named page, as somebody who follows a link to it would come to it."""
    app = AppTest.from_file(APP, default_timeout=120)
    for parameter, value in (query or {}).items():
        app.query_params[parameter] = value
    if name != "overview":
        app.switch_page(f"views/{name}.py")
    return app.run()
