"""The plugin as README installs and starts it, where the environment has vLLM alone.

`scripts/long_tests install` makes that environment.
"""

import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest

from scripts.stack import ROOT, free_port, serving

pytestmark = pytest.mark.skipif(
    "PLUGIN_PYTHON" not in os.environ, reason="needs vLLM: scripts/long_tests install"
)
SECRET = "secret-of-the-installed-plugin"
README = ROOT / "engine" / "mount" / "distribution" / "README.md"
# What a CPU and a small model ask for; the rest of the line is README's.
ON_CPU = "--enforce-eager --dtype float32 --max-model-len 4096 --block-size 32"
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def test_every_module_can_be_imported(tmp_path: Path) -> None:
    program = """if True:
        import importlib, pkgutil, holdfast_vllm
        for module in pkgutil.walk_packages(holdfast_vllm.__path__, "holdfast_vllm."):
            importlib.import_module(module.name)
            print(module.name)
    """
    process = subprocess.run(
        [os.environ["PLUGIN_PYTHON"], "-c", program],
        cwd=tmp_path,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert "holdfast_vllm.mount.endpoint" in process.stdout.splitlines()


def test_the_line_of_readme_serves(tmp_path: Path) -> None:
    block = re.search(r"^VLLM_PLUGINS=.*?(?=```)", README.read_text("utf-8"), re.DOTALL | re.M)
    assert block is not None
    line = block[0].strip().replace("MODEL", str(ROOT / "engine" / "holdfast-demo"))
    port = free_port()
    command = ["sh", "-c", f"{line} {ON_CPU} --port {port}"]
    programs = str(Path(os.environ["PLUGIN_PYTHON"]).parent)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SECRET": SECRET, **ENVIRONMENT}
    log = tmp_path / "log"
    with serving(command, environment, port, ready="/holdfast/readyz", log=log) as server:
        server.wait()
        headers = {"authorization": f"Bearer {SECRET}"}
        described = httpx.get(f"{server.url}/holdfast/v1/describe", headers=headers, timeout=60)
    assert (described.status_code, described.json()["backend"]) == (200, "vllm")
