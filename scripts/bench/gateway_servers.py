"""The servers that `bench_gateway.py` starts: the stub of an engine, our gateway and its peers."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
KEY = "hf-a-key-for-benchmarks-only"
SERVER_CORE, OTHER_CORE = 0, 1
_START_SECONDS = 400.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running process; `headers` go with every request to it."""

    pid: int
    port: int
    headers: dict[str, str] = field(default_factory=dict)

    def backlog(self) -> int:
        """Turns that our gateway has not copied to its ledger yet."""
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", trust_env=False).text
        found = re.search(r"^holdfast_gateway_journal_backlog (\S+)$", text, re.MULTILINE)
        return int(float(found[1])) if found else 0


@contextmanager
def engine_stub() -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "scripts.bench.gateway_engine", str(port)]
    with running(command, port, "/readyz", OTHER_CORE) as pid:
        yield Server(pid, port)


@contextmanager
def our_gateway(engine: Server, data: Path) -> Iterator[Server]:
    """As shipped: SQLite for journal and ledger, a key, metrics, log level info."""
    port = free_port()
    settings = {
        "HOLDFAST_DATA": str(data),
        "HOLDFAST_ENGINES": f"http://127.0.0.1:{engine.port}",
        "HOLDFAST_ENGINE_SECRET": "a-secret-for-benchmarks",
        "HOLDFAST_MASTER_SECRET": "another-secret-for-benchmarks",
        "HOLDFAST_API_KEY": KEY,
        "HOLDFAST_PORT": str(port),
    }
    subprocess.run(
        [sys.executable, "-m", "gateway", "migrate"],
        env=os.environ | settings,
        cwd=ROOT,
        check=True,
    )
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    command = [sys.executable, "-m", "gateway", "serve"]
    with running(command, port, "/readyz", SERVER_CORE, settings) as pid:
        yield Server(pid, port, headers)


@contextmanager
def libraries(engine: Server) -> Iterator[Server]:
    """Litestar and aiohttp alone (`bench_gateway_floor.py`)."""
    port = free_port()
    command = [sys.executable, "-m", "scripts.bench.gateway_floor", str(port)]
    command.append(f"http://127.0.0.1:{engine.port}")
    with running(command, port, "/readyz", SERVER_CORE) as pid:
        yield Server(pid, port)


@contextmanager
def litellm(engine: Server, peers: Path, data: Path) -> Iterator[Server]:
    """One worker, a master key, nothing stored: it has no database here."""
    port, config = free_port(), data / "litellm.yaml"
    config.write_text(
        "model_list:\n"
        "  - model_name: holdfast-demo\n"
        "    litellm_params:\n"
        "      model: openai/holdfast-demo\n"
        f"      api_base: http://127.0.0.1:{engine.port}/v1\n"
        "      api_key: none\n"
        f"general_settings:\n  master_key: sk-{KEY}\n"
    )
    command = [str(peers / "bin" / "litellm"), "--config", str(config), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--telemetry", "False"]
    settings = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with running(command, port, "/health/liveliness", SERVER_CORE, settings) as pid:
        yield Server(pid, port, {"authorization": f"Bearer sk-{KEY}"})


@contextmanager
def rust_router(name: str, engine: Server, peers: Path) -> Iterator[Server]:
    """`vllm-router` or `sglang-router`, routing by prefix."""
    port, metrics = free_port(), free_port()
    program = str(peers / "bin" / name)
    command = [program, "launch"] if name == "sglang-router" else [program]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
    command += ["--worker-urls", f"http://127.0.0.1:{engine.port}"]
    command += ["--prometheus-port", str(metrics), "--log-level", "error"]
    with running(command, port, "/health", SERVER_CORE) as pid:
        yield Server(pid, port)


@contextmanager
def running(
    command: Sequence[str], port: int, ready: str, core: int, settings: dict[str, str] | None = None
) -> Iterator[int]:
    """A process on one core, from when it is ready. Raise RuntimeError where it never is."""
    pinned = ["taskset", "-c", str(core), *command]
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    process = subprocess.Popen(
        pinned,
        env=environment | (settings or {}),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=sys.stderr if os.environ.get("BENCH_SHOW") else subprocess.DEVNULL,
    )
    try:
        _wait(process, f"http://127.0.0.1:{port}{ready}")
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, trust_env=False, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{process.args!r} did not start")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
