"""A run ends with each test that was left out, once and with its reason, in however many processes.

Each case is a run of its own, over a small folder with one test of every kind.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.left_out import MANY, lines_of

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "pytest.ini": "[pytest]\nmarkers = slow: takes long\n",
    "test_some.py": """
import pytest

from tests.left_out import MANY, lines_of

@pytest.mark.skip(reason="no engine here")
def test_skipped(): ...

@pytest.mark.parametrize("number", [1, 2])
def test_skipped_while_it_runs(number):
    pytest.skip("no engine here")

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.xfail(reason="not yet")
def test_that_is_expected_to_fail():
    raise AssertionError

def test_not_chosen(): ...

def test_that_runs(): ...
""",
    "test_whole_file.py": """
import pytest

from tests.left_out import MANY, lines_of

pytest.skip("needs another world", allow_module_level=True)
""",
    "test_other.py": "def test_that_runs_too(): ...\n",
}
SUMMARY = """left out here: 5
needs another world (1)
  test_whole_file.py
no engine here (3)
  test_some.py::test_skipped
  test_some.py::test_skipped_while_it_runs[1]
  test_some.py::test_skipped_while_it_runs[2]
slow; run by scripts/test --all (1)
  test_some.py::test_slow"""


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    for name, text in FILES.items():
        (folder / name).write_text(text, "utf-8")
    given = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.left_out", *arguments],
        cwd=folder,
        # Other plugins take longer to load than these tests take.
        env={**given, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )


def summary(output: str) -> str:
    """What the plugin wrote at the end, without the lines around it."""
    _, _, rest = output.partition("left out here: ")
    lines = [line.rstrip(" =") for line in f"left out here: {rest}".splitlines()]
    kept = [line for line in lines if line.startswith(("left out", "  ")) or line.endswith(")")]
    return "\n".join(kept)


@pytest.mark.parametrize(
    "workers",
    [[], ["-n", "2"], ["-n", "2", "--dist", "loadfile"]],
    ids=["alone", "two", "two-by-file"],
)
def test_each_is_named_once_with_its_reason(tmp_path: Path, workers: list[str]) -> None:
    done = run(tmp_path, "-m", "not slow", "-k", "not not_chosen", *workers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed, 4 skipped" in done.stdout, done.stdout
    assert summary(done.stdout) == SUMMARY, done.stdout


def test_what_was_asked_for_is_not_left_out(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "-k", "runs_too or slow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(done.stdout).splitlines() == [
        "left out here: 1",
        "needs another world (1)",
        "  test_whole_file.py",
    ]


def test_many_with_one_reason_are_told_by_their_files() -> None:
    few = {f"tests/test_a.py::test_{i}" for i in range(MANY)}
    assert lines_of(few) == sorted(few)
    many = few | {"tests/test_b.py::test_it[x::y]"}
    assert lines_of(many) == [f"tests/test_a.py ({MANY})", "tests/test_b.py (1)"]
