"""`python -m dashboard`: serve the dashboard at DASHBOARD_HOST and DASHBOARD_PORT."""

import argparse
import os
import socket
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from dashboard.server import create_app, streamlit_config
from dashboard.settings import settings


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dashboard",
        description="The dashboard. Settings: the environment, see dashboard/SETTINGS.md.",
    )
    parser.parse_args(arguments)
    try:
        own = settings()
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            name = f"DASHBOARD_{str(problem['loc'][0]).upper()}"
            told = problem["msg"].removeprefix("Value error, ")
            print(f"dashboard: {name}: {told}", file=sys.stderr)
        return 2
    try:
        socket.getaddrinfo(own.host, own.port)
    except (OSError, UnicodeError):  # the second is of a name that is too long
        print("dashboard: DASHBOARD_HOST: must be an address of this machine", file=sys.stderr)
        return 2
    # Streamlit starts uvicorn, which believes the forwarded headers of these addresses alone.
    os.environ["FORWARDED_ALLOW_IPS"] = ",".join(own.trusted_proxies)
    create_app(own).run(config=streamlit_config(own))
    return 0


if __name__ == "__main__":
    sys.exit(main())
