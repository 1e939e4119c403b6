"""scripts/gpu_check: what of it runs without a GPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import scripts.gpu.__main__ as gpu
from engine.compute.loading import LoadedModel
from scripts.gpu import speed
from scripts.gpu.__main__ import main
from scripts.stack import ROOT

COMMAND = str(ROOT / "scripts" / "gpu_check")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_paged_kernel_equals_plain_attention_in_the_interpreter() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([COMMAND, "--interpret"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout


def test_a_part_that_fails_or_has_no_time_leaves_the_others_and_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoding(loaded: LoadedModel, sizes: speed.Sizes) -> Iterator[tuple[str, str]]:
        yield "decode, 1 sequence", "1 token/s"
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 13 GiB\nand advice")

    def run() -> tuple[int, dict[str, str]]:
        """The exit status, and the rows by subject."""
        status = main()
        _, _, *rows = (tmp_path / "gpu_check.md").read_text("utf-8").splitlines()
        cells = [row.strip("| ").split(" | ") for row in rows]
        return status, {subject: figure for subject, figure in cells}

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", [COMMAND, "--small", "--out", str(tmp_path)])
    monkeypatch.setattr(speed, "decoding", decoding)
    status, rows = run()
    assert status == 1
    assert rows["decode, 1 sequence"] == "1 token/s"
    assert rows["decoding"].startswith("failed: OutOfMemoryError: CUDA out of memory.")
    assert "host tier: to the host, back" in rows
    monkeypatch.setattr(gpu, "LIMIT_SECONDS", 0.0)
    status, rows = run()
    assert status == 0
    assert rows["decoding"] == rows["host tier"] == "not run: no time left"


def test_a_comparison_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> float:
        raise RuntimeError("out of resource: shared memory")

    compared = [("one", fail, 1.0), ("two", lambda: 0.5, 1.0), ("three", lambda: 2.0, 1.0)]
    monkeypatch.setattr(gpu, "comparisons", lambda _device: compared)
    report = gpu.Report(None)
    report.run("exactness", lambda: gpu.exactness(torch.device("cpu"), report, float("inf")))
    assert report.has_failed
    assert dict(report.rows)["comparisons with plain attention"].startswith("1 right, 2 wrong, 0")
