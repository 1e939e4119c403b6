"""`python -m dashboard`: serve the dashboard at DASHBOARD_HOST and DASHBOARD_PORT."""

import os
import sys

from pydantic import ValidationError

from dashboard.server import create_app, streamlit_config
from dashboard.settings import settings


def main() -> int:
    try:
        own = settings()
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            name = f"DASHBOARD_{str(problem['loc'][0]).upper()}"
            print(f"dashboard: {name}: {problem['msg']}", file=sys.stderr)
        return 2
    # Streamlit starts uvicorn, which believes the forwarded headers of these addresses alone.
    os.environ["FORWARDED_ALLOW_IPS"] = ",".join(own.trusted_proxies)
    create_app(own).run(config=streamlit_config(own))
    return 0


if __name__ == "__main__":
    sys.exit(main())
