"""Install what was asked for into the running virtual environment, once.

Reads the extras and dependency groups straight from pyproject.toml, so any pip of the last years
will do, and stamps what it installed: asking again for the same takes milliseconds. The base is
always among it, but for `--only EXTRA_OR_GROUP ...`. `--show EXTRA_OR_GROUP ...` installs nothing
and prints the part of pyproject.toml that installing them reads. The user's pip configuration is
left to pip; the only addition is PyTorch's index of CPU builds, where it answers and the machine
has no NVIDIA GPU, because the default build of torch brings gigabytes of CUDA.
"""

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STAMP = Path(sys.prefix) / "holdfast-installed.json"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 5.0
SLOW = {
    "engine": "PyTorch and transformers, minutes on a slow line",
    "dashboard": "Streamlit and pandas, about a minute",
}


class InstallError(Exception):
    """Installing failed; the message says what to do."""


def read_project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def requirements_of(need: str, project: dict[str, Any]) -> list[str]:
    """Find the requirements of the base, an extra or a dependency group by its name."""
    if need == "base":
        return list(project["project"]["dependencies"])
    for table in (project["project"]["optional-dependencies"], project["dependency-groups"]):
        if need in table:
            return list(table[need])
    raise InstallError(f"`{need}` is neither an extra nor a dependency group of pyproject.toml")


def shown(needs: list[str], project: dict[str, Any]) -> str:
    """Write what `install` reads for `needs`, and nothing else, as a pyproject.toml of its own."""
    # Lists of strings and quoted keys are the same in JSON and TOML.
    lines = ["[project]", f"dependencies = {json.dumps(requirements_of('base', project))}"]
    lines.append("[project.optional-dependencies]")
    lines += [f'"{need}" = {json.dumps(requirements_of(need, project))}' for need in needs]
    return "\n".join([*lines, "[dependency-groups]"])


def digest(requirements: list[str]) -> str:
    return hashlib.sha256("\n".join([sys.version, *sorted(requirements)]).encode()).hexdigest()


def read_stamp() -> dict[str, str]:
    if not STAMP.exists():
        return {}
    stamp: dict[str, str] = json.loads(STAMP.read_text("utf-8"))
    return stamp


@contextmanager
def locked() -> Iterator[None]:
    """Keep two starts at the same time from installing over each other."""
    with (Path(sys.prefix) / "holdfast-install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def has_nvidia_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def answers(url: str) -> bool:
    """Whether a URL answers within the probe's time, name resolution included."""
    replies: list[int] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=PROBE_SECONDS) as reply:
                replies.append(reply.status)
        except (urllib.error.URLError, OSError):
            return

    # A resolver may sit on a name for longer than any socket timeout, so the wait is outside.
    probe = threading.Thread(target=ask, daemon=True)
    probe.start()
    probe.join(PROBE_SECONDS)
    return replies == [200]


def index_options(needs: list[str]) -> list[str]:
    if "engine" not in needs or has_nvidia_gpu():
        return []
    if answers(TORCH_CPU_INDEX + "/torch/"):
        return ["--extra-index-url", TORCH_CPU_INDEX]
    print(f"    {TORCH_CPU_INDEX} does not answer; taking the torch that pip finds", flush=True)
    return []


def run_pip(requirements: list[str], options: list[str]) -> None:
    """Run pip and pass on the lines that show it moves."""
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", *options, *requirements]
    shown = ("  Downloading", "Processing", "Installing collected", "ERROR", "WARNING: Retrying")
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        tail: list[str] = []
        for line in pip.stdout or ():
            tail = [*tail[-14:], line.rstrip()]
            if line.startswith(shown) and ".metadata" not in line:
                print(f"    {line.strip()[:100]}", flush=True)
    if pip.returncode != 0:
        raise InstallError("pip failed; its last lines were:\n  " + "\n  ".join(tail))


def install(needs: list[str], *, is_base_wanted: bool = True) -> None:
    """Install the base, if wanted, and `needs` unless the stamp says that they are here."""
    project = read_project()
    names = ["base", *needs] if is_base_wanted else needs
    wanted = {need: requirements_of(need, project) for need in names}
    with locked():
        stamp = read_stamp()
        missing = [n for n, requirements in wanted.items() if stamp.get(n) != digest(requirements)]
        if not missing:
            return
        slow = "; ".join(SLOW[need] for need in missing if need in SLOW)
        print(f"==> installing {', '.join(missing)}" + (f" ({slow})" if slow else ""), flush=True)
        has_pip = [sys.executable, "-m", "pip", "--version"]
        if subprocess.run(has_pip, capture_output=True).returncode != 0:
            subprocess.run([sys.executable, "-m", "ensurepip", "--upgrade"], check=True)
        # Everything known goes in, so that one resolution fits all of it together.
        run_pip(sorted({r for need in wanted.values() for r in need}), index_options(missing))
        stamp.update({need: digest(wanted[need]) for need in missing})
        STAMP.write_text(json.dumps(stamp, indent=1), "utf-8")


if __name__ == "__main__":
    try:
        match sys.argv[1:]:
            case ["--show", *needs]:
                print(shown(needs, read_project()))
            case ["--only", *needs]:
                install(needs, is_base_wanted=False)
            case needs:
                install(needs)
    except InstallError as error:
        sys.exit(f"install: {error}")
