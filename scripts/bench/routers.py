"""Other people's routers and proxies, for the benchmarks that measure ours beside them."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
    """How one is started. `key` is what clients send, `ready` the path of its probe."""

    command: list[str]
    port: int
    key: str
    ready: str
    environment: Mapping[str, str] = field(default_factory=dict)


def rust_router(
    name: str, engines: Sequence[str], policy: str = "cache_aware", *, venv: Path = VENV, key: str
) -> Router:
    """One of MODULES: all three descend from one command line. `key` is the engines' too."""
    port = free_port()
    program = [str(venv / "bin" / "python"), "-m", *MODULES[name].split()]
    listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    workers = ["--worker-urls", *engines, *(["--api-key", key] if key else [])]
    command = [*program, *listen, *workers, "--policy", policy, "--log-level", "error"]
    return Router(command, port, key, "/health")


def litellm(model: str, engine: str, folder: Path, *, venv: Path) -> Router:
    """LiteLLM's proxy with one worker, a master key, and nothing stored: it has no database here.

    `folder` gets its configuration.
    """
    port, path = free_port(), folder / "litellm.yaml"  # which JSON is
    parameters = {"model": f"openai/{model}", "api_key": "none", "api_base": f"{engine}/v1"}
    listed = [{"model_name": model, "litellm_params": parameters}]
    path.write_text(json.dumps({"model_list": listed}))
    command = [str(venv / "bin" / "litellm"), "--config", str(path), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--num_workers", "1", "--telemetry", "False"]
    environment = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MASTER_KEY": LITELLM_KEY,
    }
    return Router(command, port, LITELLM_KEY, "/health/liveliness", environment)


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
