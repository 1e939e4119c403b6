"""Packs `engine` as `holdfast_vllm`, without what only our own process needs.

vLLM's users start it in directories of their own. A package named `engine` there would be imported
in the place of ours, so the distribution has a name of its own and every import is written anew.
"""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
ENGINE = HERE.parents[1]
SOURCE = HERE / "build" / "source"
PACKAGE = "holdfast_vllm"
LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "compute", "holdfast-demo", "distribution", "Dockerfile*", "*.md",
    "__main__.py", "native.py",
)  # fmt: skip
IMPORT = re.compile(r"^([ \t]*)(from|import) engine(?=[.\s])", re.MULTILINE)


def write_package() -> str:
    """Write the package's source; return its version."""
    if ENGINE.name == "engine":
        shutil.rmtree(SOURCE, ignore_errors=True)
        shutil.copytree(ENGINE, SOURCE / PACKAGE, ignore=LEFT_OUT)
        for path in (SOURCE / PACKAGE).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            path.write_text(IMPORT.sub(rf"\1\2 {PACKAGE}", text), encoding="utf-8")
    project = tomllib.loads((ENGINE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    version: str = project["project"]["version"]
    return version


setup(version=write_package(), packages=find_packages(str(SOURCE)))
