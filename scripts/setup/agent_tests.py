"""Install agents from npm and PyPI, run them against a scripted engine, and print their table.

    python -m scripts.setup.agent_tests [names]

AGENTS_FOLDER says where they are installed, `.agents` by default; agents.toml lists them. Some want
a newer Node than a machine has, so Node comes from npm too.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from scripts.stack import ROOT, python

NODE = "node@22"


def install(folder: Path) -> None:
    """Install all groups. A group that fails is named, and its clients count as not installed."""
    groups = tomllib.loads(Path(__file__).with_name("agents.toml").read_text("utf-8"))
    npm = ["npm", "install", "--no-fund", "--no-audit"]
    for group in groups["npm"]:
        manifest = folder / group / "package.json"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        if not manifest.exists():  # else npm installs into a folder above
            manifest.write_text('{"private": true}')
    subprocess.run([*npm, NODE], cwd=folder, check=True)
    # npm takes releases that go with the Node which runs it.
    path = f"{folder}/node_modules/.bin:{os.environ['PATH']}"
    for group, packages in groups["npm"].items():
        latest = [name if "@" in name[1:] else f"{name}@latest" for name in packages]
        environment = {**os.environ, "PATH": path}
        report_failure(group, subprocess.run([*npm, *latest], cwd=folder / group, env=environment))
    for group, packages in groups["pip"].items():
        interpreter = folder / group / "bin" / "python"
        if not interpreter.exists():
            subprocess.run([sys.executable, "-m", "venv", folder / group], check=True)
        pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--upgrade"]
        report_failure(group, subprocess.run([*pip, *packages]))


def report_failure(group: str, process: "subprocess.CompletedProcess[bytes]") -> None:
    if process.returncode != 0:
        print(f"{group}: not installed (status {process.returncode})", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    folder = Path(os.environ.get("AGENTS_FOLDER", ROOT / ".agents")).resolve()
    install(folder)
    environment = {**os.environ, "AGENTS_FOLDER": str(folder)}
    command = [*python("tests.agents"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
