"""The plugin's wheel: what it needs is what it lists, and it says so where something is missing."""

import ast
import re
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Where an import's name is not its distribution's.
PACKAGES = {"opentelemetry": "opentelemetry-api", "PIL": "pillow"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", tree)
    skipped = shutil.ignore_patterns("__pycache__", "holdfast-demo", "build", "*.egg-info")
    shutil.copytree(ROOT / "engine", tree / "engine", ignore=skipped)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", "dist", "./engine/mount/distribution"]
    subprocess.run(command, cwd=tree, check=True)
    (built,) = (tree / "dist").glob("holdfast_vllm-*.whl")
    return built


def imports_of(source: str) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add((node.module or "").partition(".")[0])
    return modules


def test_each_import_is_listed_as_a_requirement(wheel: Path) -> None:
    with ZipFile(wheel) as files:
        sources = [files.read(name).decode() for name in files.namelist() if name.endswith(".py")]
        (info,) = {name.partition("/")[0] for name in files.namelist() if ".dist-info/" in name}
    imported = set().union(*map(imports_of, sources)) - {"holdfast_vllm", "vllm"}
    needed = {
        PACKAGES.get(name, name.replace("_", "-")) for name in imported - sys.stdlib_module_names
    }
    listed = PathDistribution(ZipPath(wheel, f"{info}/")).requires or []
    assert needed == {re.split(r"[^\w.-]", requirement)[0] for requirement in listed}


def test_a_package_that_is_missing_ends_the_start(wheel: Path) -> None:
    program = """if True:
        import sys
        sys.path.insert(0, sys.argv[1])
        sys.modules["structlog"] = None
        from holdfast_vllm.mount.plugin import HoldfastPlugin
        try:
            HoldfastPlugin().attach_router(None)
        except RuntimeError as error:
            print(error)
    """
    process = subprocess.run(
        [sys.executable, "-c", program, str(wheel)], capture_output=True, text=True, check=True
    )
    assert (
        process.stdout.startswith("holdfast can't be mounted: ") and "structlog" in process.stdout
    )
