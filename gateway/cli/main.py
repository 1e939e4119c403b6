"""python -m gateway serve, migrate, recover, seed, keys, workspaces, prices, retain, …"""

import argparse
import asyncio
import fcntl
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from alembic import command
from alembic.config import Config
from uvicorn.config import STARTUP_FAILURE

from gateway.app import create_app
from gateway.base.catalogue import CatalogueError
from gateway.base.errors import GatewayError
from gateway.base.logs import configure
from gateway.base.settings import DatabaseSettings, SettingsError, load, load_database
from gateway.cli import access as access_cli
from gateway.cli import damage as damage_cli
from gateway.cli import money as ledger_cli
from gateway.cli import seed as sample_cli
from gateway.cli.recover import add_parser as add_recover
from gateway.http.admitted import raise_descriptor_limit
from gateway.http.server import Server
from gateway.ledger.database import translated, with_ledger
from gateway.ledger.upkeep import sum_once
from gateway.limits.workers import SWITCH_SECONDS
from gateway.prices.files import PriceError

ROOT = Path(__file__).resolve().parents[2]
# The collector walks what lives through a request again and again, and finds nothing: requests
# leave few cycles. How much more there is before it looks: new objects, then rounds of it.
_GC_THRESHOLDS = (20_000, 50, 50)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (SettingsError, CatalogueError, PriceError) as error:
        print(error, file=sys.stderr)
        return 2
    except GatewayError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gateway", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    commands.add_parser("serve", help="run the gateway").set_defaults(run=_serve)
    commands.add_parser("migrate", help="bring the database up to date").set_defaults(run=_migrate)
    add_recover(commands)
    access_cli.add_commands(commands)
    ledger_cli.add_commands(commands)
    sample_cli.add_commands(commands)
    damage_cli.add_commands(commands)
    return parser


def _serve(_: argparse.Namespace) -> int:
    settings = load()
    raise_descriptor_limit()
    configure(settings.log_level)
    app = create_app(settings)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server(app, settings)
    with suppress(KeyboardInterrupt):
        server.run()
    return 0 if server.started else STARTUP_FAILURE


def _migrate(_: argparse.Namespace) -> int:
    migrate(load_database())
    return 0


def migrate(settings: DatabaseSettings) -> None:
    """Upgrade to the newest schema. A second migrator waits and then finds nothing to do."""
    config = Config(toml_file=ROOT / "pyproject.toml")
    config.set_main_option("script_location", str(ROOT / "migrations"))
    config.attributes["url"] = settings.ledger_url
    settings.data.mkdir(parents=True, exist_ok=True)
    with _lock(settings.sqlite_path or settings.data / "migrate"), translated():
        command.upgrade(config, "head")
        if settings.sqlite_path is not None:
            settings.sqlite_path.chmod(0o600)
        asyncio.run(with_ledger(settings.ledger_url, sum_once))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One migrator at a time on this machine; PostgreSQL has a lock of its own in `env.py`."""
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
