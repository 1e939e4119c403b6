"""scripts/gpu_check: what of it runs without a GPU."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.gpu.__main__ import main
from scripts.stack import ROOT

COMMAND = str(ROOT / "scripts" / "gpu_check")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_paged_kernel_equals_plain_attention_in_the_interpreter() -> None:
    done = subprocess.run(
        [COMMAND, "--interpret"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout and "model gemma2" in done.stdout


def test_the_speeds_are_measured_by_a_script_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has imported torch."""
    monkeypatch.setattr(sys, "argv", [COMMAND, "--small", "--out", str(tmp_path)])
    assert main() == 0
    rows = dict(json.loads((tmp_path / "gpu_check.json").read_text("utf-8"))["rows"])
    assert rows["attention"] in ("torch's functions", "the paged kernel")
    assert any(subject.startswith("decode, 4 sequences") for subject in rows)
    assert not any("did not run" in figure for figure in rows.values())
    assert "| measured |" in (tmp_path / "gpu_check.md").read_text("utf-8")
