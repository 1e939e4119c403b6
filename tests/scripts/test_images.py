"""The Dockerfiles: what their layers of packages depend on."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.stack import ROOT

PROGRAM = "scripts/setup/install_needs.py"
FILES = ("pyproject.toml", "requirements.lock")
RECIPES = sorted(ROOT.glob("*/Dockerfile"))


def stages(path: Path) -> dict[str, str]:
    """Those with a name, by it."""
    parts = re.split(r"^FROM ", path.read_text("utf-8"), flags=re.MULTILINE)[1:]
    named = (re.match(r"\S+ AS (\w+)\n(.*)", stage, re.DOTALL) for stage in parts)
    return {name[1]: name[2] for name in named if name is not None}


def needs_of(path: Path) -> list[str]:
    (needs,) = re.findall(rf"{PROGRAM} --show /needs(.*)$", stages(path)["needs"], re.MULTILINE)
    return str(needs).split()


def run_program(tree: Path, *needs: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, PROGRAM, "--show", "shown", *needs]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


def show(tree: Path, needs: list[str]) -> str:
    """Both files that `--show` writes, one behind the other."""
    process = run_program(tree, *needs)
    assert process.returncode == 0, process.stderr
    return "".join((tree / "shown" / name).read_text("utf-8") for name in FILES)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a stage with all of both files has."""
    for name in (*FILES, PROGRAM):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def change(tree: Path, old: str, new: str, file: str = "pyproject.toml") -> None:
    path = tree / file
    before = path.read_text("utf-8")
    after = re.sub(old, new, before, flags=re.MULTILINE)
    assert after != before, old
    path.write_text(after, "utf-8")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_are_installed_from_what_is_needed_alone(path: Path, tree: Path) -> None:
    """What is needed changes with the requirements, and is all that installing reads."""
    stage = stages(path)["packages"]
    needs = needs_of(path)
    copied = re.findall(r"^COPY (.*)$", stage, re.MULTILINE)
    assert copied == ["--from=needs /needs ./", f"{PROGRAM} scripts/setup/"]
    (installed,) = re.findall(rf"{PROGRAM}([\w -]*)", stage.partition("RUN ")[2])
    assert [word for word in installed.split() if word != "--unlocked"] == needs
    before = show(tree, needs)
    change(tree, r"^line-length = \d+", "line-length = 77")
    change(tree, r"^version = .*", 'version = "99.0"')
    change(tree, r"^check = .*", 'check = ["ruff"]')
    change(tree, r"^pytest==\d+", "pytest==99", "requirements.lock")
    assert show(tree, needs) == before
    change(tree, r"^httpx==\d+", "httpx==98", "requirements.lock")
    assert show(tree, needs) != before and "\nhttpx==98" in show(tree, needs)
    change(tree, r"httpx>=[^\"]*", "httpx==99.0")
    before = show(tree, needs)
    assert '"httpx==99.0"' in before
    for name in FILES:
        shutil.copy(tree / "shown" / name, tree / name)
    assert show(tree, needs) == before, "shown again from what was shown it is the same"
    process = run_program(tree, "nothing")
    assert process.returncode == 1 and "`nothing` is neither" in process.stderr


IMPORTS_ALL = """
import importlib, pathlib
for path in sorted(pathlib.Path({package!r}).rglob("*.py")):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    if not name.endswith("__main__") and path.parts[1] != "views":
        importlib.import_module(name)
"""


@pytest.mark.parametrize("package", ["gateway", "dashboard"])
def test_an_image_has_every_module_that_its_program_imports(package: str, tmp_path: Path) -> None:
    """Those of the last stage are copied by name; one that is forgotten ends the container."""
    last = (ROOT / package / "Dockerfile").read_text("utf-8").rpartition("\nFROM ")[2]
    for line in re.findall(r"^COPY (?!--from)(.*)$", last, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            into = tmp_path / (f"{target}{Path(source).name}" if target.endswith("/") else target)
            into.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("screenshots"))
            else:
                shutil.copy(ROOT / source, into)
    command = [sys.executable, "-c", IMPORTS_ALL.format(package=package)]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
