"""The load of `gateway.py`: HTTP/1.1 over raw sockets, which leave the CPU to what is measured.

Every answer is checked: a status other than 200, or a text that is not the stub's, ends the
measurement.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gateway.journal.store import ASIDE, rows_in
from scripts import stack
from scripts.bench.load import Measured, closed_loop
from scripts.stack import API_HEADERS, ROOT, free_port, gateway_environment, python, run, url_of


@dataclass(frozen=True, slots=True)
class RawRequest:
    """Ready to be sent; `mark` must be in the answer `num_marks` times."""

    data: bytes
    mark: bytes
    num_marks: int


class RawConnection(asyncio.Protocol):
    """One connection; `ask` is one request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parts: list[bytes] = []
        self._left: int | None = None
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the connection was lost"))

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if self._left is None:
            head, end, body = b"".join(self._parts).partition(b"\r\n\r\n")
            if not end:
                return
            self._left = _content_length(head)
            data = body
        if self._left >= 0:
            self._left -= len(data)
            is_over = self._left <= 0
        else:
            tail = data if len(data) >= 5 else b"".join(self._parts[-5:])
            is_over = tail.endswith(b"0\r\n\r\n")
        if is_over and self._answer is not None and not self._answer.done():
            self._answer.set_result(b"".join(self._parts))

    async def ask(self, request: RawRequest) -> None:
        """Raise RuntimeError for any other answer than the stub's."""
        self._parts, self._left = [], None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request.data)
        answer = await asyncio.wait_for(self._answer, 60)
        is_whole = answer.count(request.mark) == request.num_marks
        if not answer.startswith(b"HTTP/1.1 200 ") or not is_whole:
            raise RuntimeError(f"not the stub's answer: {answer[:2000]!r}")

    def close(self) -> None:
        self._transport.close()


async def drive(
    port: int, requests: Sequence[RawRequest], num_connections: int, num_requests: int
) -> Measured:
    """Ask so many times over so many connections; connection n begins with request n."""
    loop, connections = asyncio.get_running_loop(), []
    try:
        for _ in range(num_connections):
            pair = await loop.create_connection(RawConnection, "127.0.0.1", port)
            connections.append(pair[1])
        return await closed_loop(
            connections, num_requests, lambda one, number: one.ask(requests[number % len(requests)])
        )
    finally:
        for connection in connections:
            connection.close()


def post(
    path: str, headers: dict[str, str], body: bytes, mark: bytes, num_marks: int
) -> RawRequest:
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return RawRequest("\r\n".join([*lines, "", ""]).encode() + body, mark, num_marks)


def _content_length(head: bytes) -> int:
    """-1 where the body is chunked."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return -1


VENV = ROOT / ".venv-peers"
PEERS_PYTHON = VENV / "bin" / "python"
# LiteLLM pins releases of these that are as new as itself, which not every index has yet.
OVERRIDES = ("certifi", "litellm-enterprise", "litellm-proxy-extras")
LITELLM_KEY = "sk-a-key-for-benchmarks-only"
MODULES = {
    "sglang-router": "sglang_router.launch_router",
    "vllm-router": "vllm_router.launch_router",
    "smg": "smg launch",
}


@dataclass(frozen=True, slots=True)
class Router:
    """Somebody else's router. `key` is what clients send, `ready` the path of its probe.

    `command` takes its port, the engines' URLs and a folder of its own.
    """

    command: Callable[[int, Sequence[str], Path], list[str]]
    key: str
    ready: str
    environment: Mapping[str, str] = field(default_factory=dict)


def rust_router(name: str, policy: str = "cache_aware", *, venv: Path = VENV, key: str) -> Router:
    """One of MODULES: all three descend from one command line. `key` is the engines' too."""

    def command(port: int, engines: Sequence[str], _folder: Path) -> list[str]:
        program = [str(venv / "bin" / "python"), "-m", *MODULES[name].split()]
        listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        workers = ["--worker-urls", *engines, *(["--api-key", key] if key else [])]
        return [*program, *listen, *workers, "--policy", policy, "--log-level", "error"]

    return Router(command, key, "/health")


def litellm(
    model: str, *, venv: Path = VENV, key: str, settings: Mapping[str, object] | None = None
) -> Router:
    """LiteLLM's proxy with one worker, a master key, and nothing stored: it has no database here.

    `key` is the engines', `settings` are those of its router.
    """

    def command(port: int, engines: Sequence[str], folder: Path) -> list[str]:
        parameters = {"model": f"openai/{model}", "api_key": key}
        configuration = {
            "model_list": [
                {"model_name": model, "litellm_params": parameters | {"api_base": f"{url}/v1"}}
                for url in engines
            ],
            "router_settings": dict(settings or {}),
        }
        path = folder / "litellm.yaml"  # which JSON is
        path.write_text(json.dumps(configuration))
        program = [str(venv / "bin" / "litellm"), "--config", str(path), "--host", "127.0.0.1"]
        return [*program, "--port", str(port), "--num_workers", "1", "--telemetry", "False"]

    environment = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MASTER_KEY": LITELLM_KEY,
    }
    return Router(command, LITELLM_KEY, "/health/liveliness", environment)


def install() -> None:
    """Make `.venv-peers`. uv, since pip can't set a requirement of a requirement aside."""
    if not PEERS_PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    subprocess.run([str(PEERS_PYTHON), "-m", "pip", "install", "--quiet", "uv"], check=True)
    overrides = VENV / "overrides.txt"
    overrides.write_text("\n".join(OVERRIDES) + "\n")
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PEERS_PYTHON)]
    options = ["--override", str(overrides), "--group", f"{ROOT / 'pyproject.toml'}:peers"]
    subprocess.run([*uv, *options], check=True)


SERVER_CORE, OTHER_CORE = 0, 1


@dataclass(frozen=True, slots=True)
class PinnedServer:
    """A running process; `headers` go with every request to it. `journal` is a gateway's folder."""

    pid: int
    port: int
    headers: dict[str, str] = field(default_factory=dict)
    journal: Path | None = None

    def backlog(self) -> int:
        """Turns that our gateway has not copied to its ledger yet.

        Its files tell, since a look at its metrics costs it as much CPU as five turns.
        """
        if self.journal is None:
            return 0
        return sum(row.state != ASIDE for row in rows_in(self.journal))


@contextmanager
def engine_stub() -> Iterator[PinnedServer]:
    port = free_port()
    command = [*python("scripts.bench.gateway_engine"), str(port)]
    with _serving(command, port, core=OTHER_CORE) as server:
        yield server


@contextmanager
def our_gateway(engine: PinnedServer, data: Path) -> Iterator[PinnedServer]:
    """As shipped: SQLite for journal and ledger, a key, metrics, log level info."""
    port = free_port()
    settings = gateway_environment(port, data, [url_of(engine.port)])
    run([*python("gateway"), "migrate"], settings)
    with _serving([*python("gateway"), "serve"], port, settings, API_HEADERS) as server:
        yield replace(server, journal=data / "journal")


@contextmanager
def libraries(engine: PinnedServer) -> Iterator[PinnedServer]:
    """Litestar and aiohttp alone (`gateway_floor.py`)."""
    port = free_port()
    command = [*python("scripts.bench.gateway_floor"), str(port), url_of(engine.port)]
    with _serving(command, port) as server:
        yield server


@contextmanager
def peer(router: Router, engine: PinnedServer, folder: Path) -> Iterator[PinnedServer]:
    port = free_port()
    command = router.command(port, [url_of(engine.port)], folder)
    headers = {"authorization": f"Bearer {router.key}"} if router.key else {}
    with _serving(command, port, router.environment, headers, ready=router.ready) as server:
        yield server


@contextmanager
def _serving(
    command: Sequence[str],
    port: int,
    settings: Mapping[str, str] | None = None,
    headers: dict[str, str] | None = None,
    *,
    core: int = SERVER_CORE,
    ready: str = "/readyz",
) -> Iterator[PinnedServer]:
    """A process on one core, once it is ready. Raises StartError where it never is."""
    pinned = ["taskset", "-c", str(core), *command]
    base = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with stack.serving(pinned, settings or {}, port, ready=ready, base=base, quiet=True) as server:
        yield PinnedServer(server.wait().pid, port, headers or {})
