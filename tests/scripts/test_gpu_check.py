"""scripts/gpu_check: what of it runs without a GPU."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.stack import ROOT

COMMAND = str(ROOT / "scripts" / "gpu_check")


def test_tiers_are_skipped_where_vllm_is_not_and_run_where_it_is(tmp_path: Path) -> None:
    """Without a GPU another connector stands for the tiers."""
    python = os.environ.get("VLLM_PYTHON")
    environment = os.environ | ({"PYTHON": python} if python else {})
    command = [COMMAND, "--tiers", "--out", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stdout + process.stderr
    wanted = "read after kill -9" if python or find_spec("vllm") else "skipped: no vLLM"
    assert wanted in process.stdout


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_paged_kernel_equals_plain_attention_in_the_interpreter() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [COMMAND, "--interpret"], capture_output=True, text=True, env=environment
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "0 wrong" in process.stdout
