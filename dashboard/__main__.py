"""`python -m dashboard`: serve the dashboard at DASHBOARD_HOST and DASHBOARD_PORT.

The gate and the sign-in page stand in front of Streamlit, which runs `app.py` for every page.
"""

import argparse
import os
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import ValidationError
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from streamlit.starlette import App

from dashboard.access import document
from dashboard.access.gate import SignInGate
from dashboard.access.login import Login
from dashboard.access.sessions import sessions
from dashboard.settings import Settings, settings
from dashboard.views import entries


def create_app(settings: Settings) -> App:
    first, *others = (entry.name for entry in entries())
    login = Login(sessions(), settings.gateway_url, settings.session_hours * 3600)
    return App(
        Path(__file__).parent / "app.py",
        lifespan=_closing,
        routes=[*login.routes, *document.routes(first, others)],
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dashboard",
        description="The dashboard. Settings: the environment, see dashboard/SETTINGS.md.",
    )
    parser.parse_args(arguments)
    try:
        options = settings()
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            name = f"DASHBOARD_{str(problem['loc'][0]).upper()}"
            message = problem["msg"].removeprefix("Value error, ")
            print(f"dashboard: {name}: {message}", file=sys.stderr)
        return 2
    try:
        socket.getaddrinfo(options.host, options.port)
    except (OSError, UnicodeError):  # a name that is too long raises UnicodeError
        print("dashboard: DASHBOARD_HOST: must be an address of this machine", file=sys.stderr)
        return 2
    # Streamlit starts uvicorn, which believes forwarded headers from these addresses only.
    os.environ["FORWARDED_ALLOW_IPS"] = ",".join(options.trusted_proxies)
    # The options that depend on the settings. All others are in `.streamlit/config.toml`.
    config = {
        "server.address": options.host,
        "server.port": options.port,
        "server.allowedHosts": list(options.allowed_hosts),
    }
    create_app(options).run(config=config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
