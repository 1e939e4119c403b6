"""The dashboard as an ASGI application: the gate, the sign-in page, and behind them Streamlit."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from streamlit.starlette import App

from dashboard.access import index
from dashboard.access.gate import SignInGate
from dashboard.access.login import Login
from dashboard.access.sessions import sessions
from dashboard.settings import Settings

# Charts and tables are imported with the server, so that its first visitor does not wait for them.
from dashboard.views.catalogue import entries

SCRIPT = Path(__file__).parent / "app.py"


def create_app(settings: Settings) -> App:
    first, *others = (entry.name for entry in entries())
    login = Login(sessions(), settings.gateway_url, settings.session_hours * 3600)
    return App(
        SCRIPT,
        lifespan=_closing,
        routes=[*login.routes, *index.routes(first, others)],
        middleware=[
            # Against DNS rebinding, for requests and websockets alike.
            Middleware(TrustedHostMiddleware, allowed_hosts=list(settings.allowed_hosts)),
            Middleware(SignInGate, sessions=sessions()),
        ],
    )


@asynccontextmanager
async def _closing(_: App) -> AsyncGenerator[None]:
    yield
    sessions().close_all()


def streamlit_config(settings: Settings) -> dict[str, Any]:
    """What depends on the settings; the rest is in `.streamlit/config.toml`."""
    return {
        "server.address": settings.host,
        "server.port": settings.port,
        "server.allowedHosts": list(settings.allowed_hosts),
    }
