"""Run tests/clients with the Python of another virtual environment against a real service.

Gateway and native engine are started from this environment; the tests are told a URL and a key, and
nothing else of ours. Further arguments are pytest's.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.stack import API_KEY, running_stack

ROOT = Path(__file__).resolve().parents[2]

PYTEST = (
    "-m", "pytest", "-rA",
    # The tests above these need packages that the clients' environment does not have, and what
    # other people's packages warn of is not ours to end on.
    "--confcutdir=tests/clients", "-o", "filterwarnings=default", "-o", "timeout=600",
)  # fmt: skip


def main(python: str, arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as data, running_stack(Path(data)) as stack:
        environment = {
            **os.environ,
            "CLIENT_TESTS_URL": stack.gateway,
            "CLIENT_TESTS_KEY": API_KEY,
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",  # else it is fetched from GitHub at import
        }
        command = [python, *PYTEST, *(arguments or ["tests/clients"])]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
