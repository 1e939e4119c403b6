"""Who is measured by bench_routing.py: our gateway in its modes, and other people's routers.

Those come from PyPI (dependency group `peers` of pyproject.toml) and run in `.venv-peers`, each as
its own documentation starts it for plain OpenAI workers. What is set besides addresses stands in
`SUBJECTS`; everything else is the default of that version.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from scripts.bench.routing_load import Marks
from tests.e2e.stack import (
    API_KEY,
    ENGINE_SECRET,
    MASTER_SECRET,
    free_port,
    python,
    run,
    start,
    wait_until_ready,
)

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-peers"
PEERS_PYTHON = VENV / "bin" / "python"
START_SECONDS = 120.0
# LiteLLM pins releases of these that are as new as itself, which not every index has yet.
OVERRIDES = ("certifi", "litellm-enterprise", "litellm-proxy-extras")

Process = subprocess.Popen[bytes]
Command = Callable[[int, Sequence[str], Path], list[str]]
"""From a port, the engines' URLs and a folder of its own."""


@dataclass(frozen=True, slots=True)
class Started:
    """`urls` are asked in turn, with `key`; `processes` are what was started."""

    urls: list[str]
    key: str
    processes: list[Process]


@dataclass(frozen=True, slots=True)
class Ours:
    """`marks` are what the client sends, `events` whether routing follows the engines' events."""

    marks: Marks
    events: bool = True
    gateways: int = 1
    is_ours: bool = True

    @contextmanager
    def running(self, engines: Sequence[str], folder: Path) -> Iterator[Started]:
        with ExitStack() as stack:
            urls, processes = [], []
            for number in range(self.gateways):
                port = free_port()
                environment = {
                    "HOLDFAST_PORT": str(port),
                    "HOLDFAST_DATA": str(folder / f"data-{number}"),
                    "HOLDFAST_ENGINES": ",".join(engines),
                    "HOLDFAST_API_KEY": API_KEY,
                    "HOLDFAST_ENGINE_SECRET": ENGINE_SECRET,
                    "HOLDFAST_MASTER_SECRET": MASTER_SECRET,
                    "HOLDFAST_ROUTING_EVENTS": str(self.events).lower(),
                    "HOLDFAST_LOG_LEVEL": "warning",
                }
                (folder / f"data-{number}").mkdir()
                run([*python("gateway"), "migrate"], environment)
                log = folder / f"gateway-{number}.log"
                process = start([*python("gateway"), "serve"], environment, log)
                stack.callback(stop, process)
                urls.append(f"http://127.0.0.1:{port}")
                processes.append(process)
            for url, process in zip(urls, processes, strict=True):
                wait_until_ready(url, process)
            yield Started(urls, API_KEY, processes)


@dataclass(frozen=True, slots=True)
class Peer:
    command: Command
    marks: Marks = "none"
    is_ours: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    key: str = ENGINE_SECRET

    @contextmanager
    def running(self, engines: Sequence[str], folder: Path) -> Iterator[Started]:
        """Raise RuntimeError where it ends, TimeoutError where it does not get ready."""
        port = free_port()
        log = folder / "peer.log"
        process = start(self.command(port, engines, folder), self.environment, log)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for_answer(url, self.key, process, log)
            yield Started([url], self.key, [process])
        finally:
            stop(process)


def _wait_for_answer(url: str, key: str, process: Process, log: Path) -> None:
    """Until it passes a request on: some listen before they know their workers."""
    deadline = time.monotonic() + START_SECONDS
    body = {"model": "synthetic", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {key}"}
    reply = "nothing"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"it ended: {log.read_text(errors='replace')[-2000:]}")
        try:
            answer = httpx.post(
                f"{url}/v1/chat/completions", json=body, headers=headers, timeout=20
            )
            if answer.status_code == 200:
                return
            reply = answer.text
        except httpx.TransportError as error:
            reply = repr(error)
        time.sleep(0.2)
    raise TimeoutError(f"not ready: {reply[:500]}: {log.read_text(errors='replace')[-2000:]}")


def stop(process: Process) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def running_engines(number: int, num_blocks: int, folder: Path) -> Iterator[list[str]]:
    """Fresh synthetic engines: the defaults but for the pool's size."""
    with ExitStack() as stack:
        urls, processes = [], []
        for index in range(number):
            port = free_port()
            environment = {
                "ENGINE_SECRET": ENGINE_SECRET,
                "ENGINE_PORT": str(port),
                "ENGINE_NUM_BLOCKS": str(num_blocks),
                "ENGINE_LOG_LEVEL": "warning",
            }
            log = folder / f"engine-{index}.log"
            process = start([*python("engine"), "--backend", "synthetic"], environment, log)
            stack.callback(stop, process)
            urls.append(f"http://127.0.0.1:{port}")
            processes.append(process)
        for url, process in zip(urls, processes, strict=True):
            wait_until_ready(url, process)
        yield urls


def _sglang(policy: str, *more: str) -> Command:
    return _router(["-m", "sglang_router.launch_router"], policy, *more)


def _smg(policy: str, *more: str) -> Command:
    return _router(["-m", "smg", "launch"], policy, *more)


def _vllm(policy: str, *more: str) -> Command:
    return _router(["-m", "vllm_router.launch_router"], policy, *more)


def _router(module: list[str], policy: str, *more: str) -> Command:
    """All three descend from one command line."""

    def command(port: int, engines: Sequence[str], _folder: Path) -> list[str]:
        listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        workers = ["--worker-urls", *engines, "--api-key", ENGINE_SECRET]
        return [str(PEERS_PYTHON), *module, *listen, *workers, "--policy", policy, *more]

    return command


def _litellm(**router_settings: object) -> Command:
    def command(port: int, engines: Sequence[str], folder: Path) -> list[str]:
        deployments = [
            {
                "model_name": "synthetic",
                "litellm_params": {
                    "model": "openai/synthetic",
                    "api_base": f"{url}/v1",
                    "api_key": ENGINE_SECRET,
                },
            }
            for url in engines
        ]
        settings = {"model_list": deployments, "router_settings": router_settings}
        path = folder / "litellm.yaml"  # which JSON is
        path.write_text(json.dumps(settings))
        program = [str(VENV / "bin" / "litellm"), "--config", str(path), "--host", "127.0.0.1"]
        return [*program, "--port", str(port), "--num_workers", "1", "--telemetry", "False"]

    return command


LITELLM_KEY = f"sk-{API_KEY}"
LITELLM_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MASTER_KEY": LITELLM_KEY,
}

SUBJECTS: dict[str, Ours | Peer] = {
    "ours, events": Ours("none"),
    "ours, events, marked": Ours("conversation"),
    "ours, learned": Ours("none", events=False),
    "ours, learned, marked": Ours("conversation", events=False),
    "sglang-router": Peer(_sglang("cache_aware")),
    "vllm-router": Peer(_vllm("cache_aware")),
    "smg": Peer(_smg("cache_aware")),
    "litellm": Peer(_litellm(), environment=LITELLM_ENVIRONMENT, key=LITELLM_KEY),
    "litellm, prompt_caching": Peer(
        _litellm(optional_pre_call_checks=["prompt_caching"]),
        marks="system",
        environment=LITELLM_ENVIRONMENT,
        key=LITELLM_KEY,
    ),
    "round robin": Peer(_sglang("round_robin")),
}
TWO_GATEWAYS: dict[str, Ours | Peer] = {
    "ours, events": Ours("none"),
    "ours, events, two gateways": Ours("none", gateways=2),
    "ours, events, marked": Ours("conversation"),
    "ours, events, marked, two gateways": Ours("conversation", gateways=2),
}


def install() -> None:
    """Make `.venv-peers`. uv, since pip can't set a requirement of a requirement aside."""
    if not PEERS_PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(PEERS_PYTHON), "-m", "pip", "install", "--quiet", "uv"]
    subprocess.run(pip, check=True)
    overrides = VENV / "overrides.txt"
    overrides.write_text("\n".join(OVERRIDES) + "\n")
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PEERS_PYTHON)]
    options = ["--override", str(overrides), "--group", f"{ROOT / 'pyproject.toml'}:peers"]
    subprocess.run([*uv, *options], check=True, env=dict(os.environ))
