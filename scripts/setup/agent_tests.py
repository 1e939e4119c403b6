"""Install agents from npm beside the project, and run them against a scripted engine.

python -m scripts.setup.agent_tests [pytest arguments]
"""

import os
import subprocess
import sys

from scripts.stack import ROOT, python

FOLDER = ROOT / ".agents"
PACKAGES = ("@google/gemini-cli", "@openai/codex", "openai", "ai", "@ai-sdk/openai", "zod")


def main(arguments: list[str]) -> int:
    FOLDER.mkdir(exist_ok=True)
    subprocess.run(["npm", "install", "--no-fund", "--no-audit", *PACKAGES], cwd=FOLDER, check=True)
    environment = {**os.environ, "AGENTS_FOLDER": str(FOLDER)}
    command = [*python("pytest"), "--timeout", "0", "-rP", "tests/e2e/test_agents.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
