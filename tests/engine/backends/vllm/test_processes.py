"""vLLM as it is served: front end, scheduler and worker in processes of their own."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

ROOT = Path(__file__).resolve().parents[4]
GROUP = "vllm.general_plugins"


def install_entry_points(directory: Path) -> None:
    """What pip writes of our entry points; vLLM finds them by it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    info = directory / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    lines = [f"{name} = {value}" for name, value in project["entry-points"][GROUP].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")


@pytest.mark.timeout(900)
def test_served_under_multiconnector_by_entry_point(llama: Path, tmp_path: Path) -> None:
    install_entry_points(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.backends.vllm.served", str(llama)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    held = [{"key": "entry", "state": "leased", "tokens": 640}]
    assert seen["at_first_token"]["held"] == held
    assert seen["cached_tokens"] == 640
    assert (seen["reader"]["hit_tokens"], seen["reader"]["read_tokens"]) == (640, 640)
    assert seen["idle"]["leased_blocks"] == 20
    assert seen["metrics"]["vllm:holdfast_leases"] == 1
    assert seen["metrics"]["vllm:holdfast_leased_blocks"] == 20
    assert seen["metrics"]["vllm:holdfast_leases_sacrificed_total"] == 0
    assert seen["released"] == 1
    assert seen["after"]["leased_blocks"] == 0
    assert seen["after"]["free"] + seen["after"]["cached"] == seen["after"]["total"] == 127
    assert seen["was_reset"]
