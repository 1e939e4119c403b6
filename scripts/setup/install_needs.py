"""Install what was asked for into the running virtual environment, once.

Extras and dependency groups stand in pyproject.toml. requirements.lock (written by
scripts/setup/lock.py) has the versions that are installed and the hashes of their files, which pip
checks. Two things have no hash and are told when they are installed:

- torch, and what only its CUDA build needs: a machine without a GPU takes the CPU build, which has
  other files and comes from another place. Its version is pinned in pyproject.toml.
- a need that is not in the lock, such as the group `clients`.

What was installed is stamped: asking again for the same takes milliseconds. The base is always
among it, but for `--only NEED ...`. `--unlocked NEED ...` keeps every version that pyproject.toml
allows, for an environment whose packages somebody else has chosen. `--show FOLDER NEED ...` only
writes into FOLDER the parts of both files that installing them reads. The user's pip
configuration is left to pip. The only addition is PyTorch's index of CPU builds, where it answers
and the machine has no NVIDIA GPU, because the default build of torch brings gigabytes of CUDA.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOCK = "requirements.lock"
FOR = "# for: "
UNHASHED = "torch"
LOG = Path(sys.prefix) / "holdfast-install.log"
STAMP = Path(sys.prefix) / "holdfast-installed.json"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 5.0
LINE_SECONDS = 15.0


class InstallError(Exception):
    """Installing failed. The message says what to do."""


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


def read_lock() -> dict[str, list[str]]:
    """The entries of the lock by need. An entry is a pinned requirement with the hashes of its
    files."""
    entries: dict[str, list[str]] = {}
    path = ROOT / LOCK
    text = path.read_text("utf-8") if path.exists() else ""
    for part in text.split(FOR)[1:]:
        needs, _, entry = part.partition("\n")
        for need in needs.split():
            entries.setdefault(need, []).append(entry.strip())
    return entries


def show(folder: Path, needs: list[str]) -> None:
    """Write what `install` reads for `needs`, and nothing else."""
    project = read_project()
    lock = read_lock()
    # Lists of strings and quoted keys are the same in JSON and TOML.
    lines = ["[project]", f"dependencies = {json.dumps(requirements_of('base', project))}"]
    lines.append("[project.optional-dependencies]")
    lines += [f'"{need}" = {json.dumps(requirements_of(need, project))}' for need in needs]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text("\n".join([*lines, "[dependency-groups]", ""]), "utf-8")
    owners: dict[str, list[str]] = {}
    for need in ("base", *needs):
        for entry in lock.get(need, ()):
            owners.setdefault(entry, []).append(need)
    parts = [f"{FOR}{' '.join(owners[entry])}\n{entry}\n" for entry in sorted(owners)]
    (folder / LOCK).write_text("".join(parts), "utf-8")


def digest(requirements: list[str]) -> str:
    return hashlib.sha256("\n".join([sys.version, *sorted(requirements)]).encode()).hexdigest()


def has_nvidia_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def index_options(needs: list[str]) -> list[str]:
    if "engine" not in needs or has_nvidia_gpu():
        return []
    try:
        with urllib.request.urlopen(TORCH_CPU_INDEX + "/torch/", timeout=PROBE_SECONDS):
            return ["--extra-index-url", TORCH_CPU_INDEX]
    except OSError:
        print(f"    {TORCH_CPU_INDEX} does not answer; taking the torch that pip finds", flush=True)
        return []


def run(*arguments: str) -> None:
    """Run a module of Python, with its output in LOG, and say now and then that it goes on.

    The module ends with this process. Raise InstallError with its reason if it fails.
    """
    with LOG.open("a+") as log:
        begin = log.seek(0, os.SEEK_END)
        command = [sys.executable, "-m", *arguments]
        with subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT) as process:
            try:
                _wait(process)
            finally:
                process.terminate()
        log.seek(begin)
        lines = log.read().splitlines()
    if process.returncode != 0:
        errors = [line.partition("ERROR: ")[2] for line in lines if "ERROR: " in line]
        reason = " ".join(errors[:1] or lines[-1:]) or "it said nothing"
        raise InstallError(
            f"pip could not install: {reason[:200]}; look for room on the disk and whether the "
            f"package index is reached, and run again (all it said: {LOG})"
        )


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for the process, and print a line now and then."""
    began = time.monotonic()
    last_line = began
    while process.poll() is None:
        time.sleep(0.25)
        if time.monotonic() - last_line >= LINE_SECONDS:
            last_line = time.monotonic()
            print(f"    {last_line - began:.0f} s; what pip says is in {LOG}", flush=True)


def install(needs: list[str], *, is_base_wanted: bool = True, is_locked: bool = True) -> None:
    """Install the base, if it is wanted, and `needs`, unless the stamp says that they are here."""
    project = read_project()
    lock = read_lock() if is_locked else {}
    names = ["base", *needs] if is_base_wanted else needs
    requirements = {need: requirements_of(need, project) + lock.get(need, []) for need in names}
    # Two starts at the same time must not install over each other.
    with (Path(sys.prefix) / "holdfast-install.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        stamp = json.loads(STAMP.read_text("utf-8")) if STAMP.exists() else {}
        digests = {need: digest(lines) for need, lines in requirements.items()}
        missing_needs = [need for need in names if stamp.get(need) != digests[need]]
        if not missing_needs:
            return
        size = "; with PyTorch some 250 MB are downloaded" if "engine" in missing_needs else ""
        print(f"==> installing {', '.join(missing_needs)}{size}", flush=True)
        # `scripts/install` makes the environment without pip, which takes long.
        if importlib.util.find_spec("pip") is None:
            run("ensurepip", "--upgrade")
        install_all(names, project, lock)
        stamp.update({need: digests[need] for need in missing_needs})
        STAMP.write_text(json.dumps(stamp, indent=1), "utf-8")


def install_all(needs: list[str], project: dict[str, Any], lock: dict[str, list[str]]) -> None:
    """First install what has hashes, with each file checked. Then install the other requirements,
    which must agree with it."""
    hashed_entries: set[str] = set()
    unhashed: set[str] = set()
    for need in needs:
        hashed_entries.update(lock.get(need, ()))
        requirements = requirements_of(need, project)
        unhashed.update(line for line in requirements if need not in lock or is_unhashed(line))
    entries = sorted(hashed_entries)
    pip = ["pip", "install", "--no-input", "--progress-bar", "off", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        hashed = Path(folder, "hashed.txt")
        pins = Path(folder, "pins.txt")
        if entries:
            hashed.write_text("\n".join(entries), "utf-8")
            run(*pip, "--require-hashes", "--no-deps", "-r", str(hashed))
        if unhashed:
            if lock:
                names = ", ".join(sorted(re.split(r"[^\w.-]", line)[0] for line in unhashed))
                print(f"    not in {LOCK}, so without a hash: {names}", flush=True)
            pins.write_text("\n".join(entry.partition(" \\")[0] for entry in entries), "utf-8")
            run(*pip, *index_options(needs), "-c", str(pins), *sorted(unhashed))


def is_unhashed(requirement: str) -> bool:
    return re.match(rf"{UNHASHED}(?![\w-])", requirement) is not None


def main(arguments: list[str]) -> None:
    match arguments:
        case ["--show", folder, *needs]:
            show(Path(folder), needs)
        case ["--only", *needs]:
            install(needs, is_base_wanted=False)
        case ["--unlocked", *needs]:
            install(needs, is_locked=False)
        case needs:
            install(needs)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InstallError as error:
        sys.exit(f"install: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
