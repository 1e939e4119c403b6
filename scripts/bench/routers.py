"""Other people's routers, as their own documentation starts them for plain OpenAI workers.

They come from PyPI (dependency group `peers` of pyproject.toml) and run in `.venv-peers`, or in
another virtual environment. What is set besides addresses stands here; everything else is the
default of that version.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.stack import ROOT, free_port

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
