"""scripts/gpu_check: what of it runs without a GPU."""

import os
import subprocess
from importlib.util import find_spec

import pytest

from scripts.stack import ROOT

COMMAND = str(ROOT / "scripts" / "gpu_check")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_paged_kernel_equals_plain_attention_in_the_interpreter() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([COMMAND, "--interpret"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout
