"""A real `llama-server`, which can be killed and started again, and an engine in front of it.

LLAMA_SERVER is the program, LLAMA_MODELS the directory of its models, and LLAMA_SMOLLM2 SmolLM2's
tokenizer: `scripts/setup/llamacpp_tests.py` makes them. The others have our demo model's.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from engine.settings import DEMO_MODEL
from scripts.stack import free_port
from tests.conformance.engines import Engine, running_engine
from tests.engine.backends.upstream.conftest import wait_until

needs_server = pytest.mark.skipif(
    "LLAMA_SERVER" not in os.environ, reason="LLAMA_SERVER names no llama-server"
)
SMOLLM2 = "smollm2"
FLAGS = ("--cache-ram", "0", "--no-cache-idle-slots")


@dataclass
class Real:
    """A server at an address of its own. `context` is in tokens, of each slot."""

    folder: Path
    model: str = "full"
    num_slots: int = 2
    context: int = 8192
    flags: Sequence[str] = FLAGS
    port: int = field(default_factory=free_port)
    log: Path | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        model = Path(os.environ["LLAMA_MODELS"]) / f"{self.model}.gguf"
        command = [
            os.environ["LLAMA_SERVER"],
            "-m",
            str(model),
            *self.flags,
            "--port",
            str(self.port),
        ]
        command += ["-np", str(self.num_slots), "-c", str(self.num_slots * self.context)]
        command += ["--slot-save-path", f"{self.folder}/"]
        with open(self.log or self.folder.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._is_up, seconds=300)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def assert_alive(self) -> None:
        assert self.process is not None and self.process.poll() is None, "the server ended"

    def _is_up(self) -> bool:
        self.assert_alive()
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            time.sleep(0.2)
            return False


@contextmanager
def serving(real: Real) -> Iterator[Real]:
    real.folder.mkdir(mode=0o700, exist_ok=True)
    real.start()
    try:
        yield real
    finally:
        real.kill()


def settings_before(real: Real) -> dict[str, str | int | float]:
    return {
        "UPSTREAM": real.url,
        "UPSTREAM_SLOTS": str(real.folder),
        "MODEL": os.environ["LLAMA_SMOLLM2"] if real.model == SMOLLM2 else str(DEMO_MODEL),
        "MIN_CACHE_TOKENS": 32,
    }


@contextmanager
def engine_of(real: Real, **more: str | int | float) -> Iterator[Engine]:
    with running_engine("upstream", settings_before(real) | more) as engine:
        yield engine
