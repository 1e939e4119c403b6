"""A whole Holdfast on free loopback ports: real engine and gateway processes, temporary data."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ENGINE_SECRET = "engine-secret-for-tests"
API_KEY = "hf-key-for-tests-0000000000000000"
ADMIN_KEY = "hf-admin-for-tests-00000000000000"
MASTER_SECRET = "master-secret-for-tests-0000000000"
START_SECONDS = 90


@dataclass(frozen=True)
class Stack:
    gateway: str
    engine: str
    engine_process: "subprocess.Popen[bytes]"
    gateway_process: "subprocess.Popen[bytes]"

    def engine_client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.engine, headers={"authorization": f"Bearer {ENGINE_SECRET}"}, timeout=30
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_stack(
    data: Path,
    backend: str = "native",
    engine_settings: Mapping[str, str] | None = None,
    gateway_settings: Mapping[str, str] | None = None,
    logs: Path | None = None,
) -> Iterator[Stack]:
    """Start both programs, wait until they serve, and end them whatever happens.

    With `logs`, a folder, what they write goes to `engine.log` and `gateway.log` there.
    """
    engine_port, gateway_port = free_port(), free_port()
    engine, gateway = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{gateway_port}"
    engine_environment = {
        "ENGINE_SECRET": ENGINE_SECRET,
        "ENGINE_PORT": str(engine_port),
        # More threads than free cores make torch slower, not faster.
        "ENGINE_THREADS": "1",
        **(engine_settings or {}),
    }
    gateway_environment = {
        "HOLDFAST_PORT": str(gateway_port),
        "HOLDFAST_DATA": str(data),
        "HOLDFAST_ENGINES": engine,
        "HOLDFAST_API_KEY": API_KEY,
        "HOLDFAST_ADMIN_KEY": ADMIN_KEY,
        "HOLDFAST_ENGINE_SECRET": ENGINE_SECRET,
        "HOLDFAST_MASTER_SECRET": MASTER_SECRET,
        **(gateway_settings or {}),
    }
    run([*python("gateway"), "migrate"], gateway_environment)
    started: list[subprocess.Popen[bytes]] = []
    try:
        command = [*python("engine"), "--backend", backend]
        started.append(start(command, engine_environment, logs and logs / "engine.log"))
        command = [*python("gateway"), "serve"]
        started.append(start(command, gateway_environment, logs and logs / "gateway.log"))
        for url, process in zip((engine, gateway), started, strict=True):
            wait_until_ready(url, process)
        yield Stack(gateway, engine, *started)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def run(command: list[str], environment: Mapping[str, str]) -> None:
    subprocess.run(command, env={**os.environ, **environment}, check=True)


def start(
    command: list[str], environment: Mapping[str, str], log: Path | None = None
) -> "subprocess.Popen[bytes]":
    if log is None:
        return subprocess.Popen(command, env={**os.environ, **environment})
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        try:
            if httpx.get(f"{url}/readyz", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"{url} is not ready after {START_SECONDS} s")
