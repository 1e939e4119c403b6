"""Commands in shell say what they are for, before they install anything."""

import subprocess
from pathlib import Path

import pytest

from scripts.setup.long_tests import jobs

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.parametrize("name", ["check", "compose_env", "install", "install_vllm_cpu", "test"])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_told_and_nothing_else_happens(name: str, option: str, tmp_path: Path) -> None:
    process = subprocess.run(
        [SCRIPTS / name, option], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert process.returncode == 0 and not process.stderr
    assert f"scripts/{name}" in process.stdout and "==>" not in process.stdout


def test_a_long_test_names_files_that_are_there() -> None:
    named = [path for job in jobs().values() for path in job.get("tests", ())]
    assert len(named) > 10 and not [path for path in named if not (SCRIPTS.parent / path).exists()]
