"""Render, lint, validate and run the Helm chart: tests/chart, with Helm in its own environment.

python -m scripts.setup.chart_tests [pytest arguments]
"""

import os
import subprocess
import sys

from scripts.setup.client_tests import environment_of
from scripts.stack import ROOT


def main(arguments: list[str]) -> int:
    environment = {**os.environ, "CHART_PYTHON": str(environment_of("chart"))}
    command = [sys.executable, "-m", "pytest", "tests/chart", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
