"""What `scripts/run` was asked for. The standard library is enough to import this module."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from scripts.stack import ROOT, url_of

GATEWAY_PORT = 8080
ENGINES_ABOVE = 20
DASHBOARD_ABOVE = 421
MAX_GATEWAYS = ENGINES_ABOVE
MAX_ENGINES = DASHBOARD_ABOVE - ENGINES_ABOVE
MAX_WORKERS = 64
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
    """`data` is absolute. `workers` are of each gateway; None is what HOLDFAST_WORKERS says.

    With `sample` no engine is started, since sample data serves no turn.
    """

    engine: str = "native"
    engines: int = 1
    gateways: int = 1
    workers: int | None = None
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
    if given.workers is not None and not 1 <= given.workers <= MAX_WORKERS:
        raise UsageError(f"`--workers` must be between 1 and {MAX_WORKERS}: {given.workers}")
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
        workers=given.workers,
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
        "--workers", type=int, metavar="N", help="processes of each gateway; default: 1"
    )
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
