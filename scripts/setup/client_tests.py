"""Run tests/clients with the Python of other virtual environments against a real service.

    python -m scripts.setup.client_tests [pytest arguments]

There are two environments, because their SDKs exclude each other. Gateway and native engine are
started from this one; the tests are told a URL and a key, and nothing else of ours.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.stack import API_KEY, ROOT, running_stack

PYTEST = (
    "-m", "pytest", "-rA",
    # The conftest.py above these needs packages that the clients' environment does not have.
    # Warnings of other people's packages are no failures.
    "--confcutdir=tests/clients", "-o", "filterwarnings=default", "-o", "timeout=600",
)  # fmt: skip


GROUPS = {
    "clients": ("test_anthropic_clients.py", "test_litellm.py", "test_js_sdks.py"),
    "clients-llm": ("test_llm.py",),
}


def environment_of(group: str) -> Path:
    """The interpreter of a group's own virtual environment, which is made if it is missing."""
    interpreter = ROOT / f".venv-{group}" / "bin" / "python"
    if not interpreter.exists():
        subprocess.run([sys.executable, "-m", "venv", interpreter.parents[1]], check=True)
    installer = "scripts/setup/install_needs.py"
    subprocess.run([interpreter, installer, "--only", group], cwd=ROOT, check=True)
    return interpreter


def main(arguments: list[str]) -> int:
    status = 0
    for group, files in GROUPS.items():
        interpreter = environment_of(group)
        with tempfile.TemporaryDirectory() as data, running_stack(Path(data)) as stack:
            environment = {
                **os.environ,
                "CLIENT_TESTS_URL": stack.gateway,
                "CLIENT_TESTS_KEY": API_KEY,
                "LITELLM_LOCAL_MODEL_COST_MAP": "true",  # else it is fetched from GitHub at import
            }
            tests = [f"tests/clients/{file}" for file in files]
            command = [str(interpreter), *PYTEST, *tests, *arguments]
            status |= subprocess.run(command, cwd=ROOT, env=environment).returncode
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
