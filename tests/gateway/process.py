"""A gateway in a process of its own, where a test looks at the process."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.e2e.stack import free_port, run
from tests.gateway.serving import ADMIN_KEY, API_KEY

START_SECONDS = 90


@contextmanager
def gateway_process(
    data: Path, engine: str, log: Path, changes: Mapping[str, str] | None = None
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Start `python -m gateway serve`, wait until an engine is ready, end it whatever happens.

    What it writes goes to `log`; `changes` are further settings.
    """
    port = free_port()
    settings = {
        "HOLDFAST_PORT": str(port),
        "HOLDFAST_DATA": str(data),
        "HOLDFAST_ENGINES": engine,
        "HOLDFAST_API_KEY": API_KEY,
        "HOLDFAST_ADMIN_KEY": ADMIN_KEY,
        "HOLDFAST_ENGINE_SECRET": "engine-secret",
        "HOLDFAST_MASTER_SECRET": "master",
        **(changes or {}),
    }
    command = [sys.executable, "-m", "gateway"]
    run([*command, "migrate"], settings)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "serve"],
            env={**os.environ, **settings},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the gateway did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield url, process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
