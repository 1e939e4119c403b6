"""python -m gateway serve | migrate | recover | keys create|list|revoke"""

import argparse
import asyncio
import fcntl
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from alembic import command
from alembic.config import Config

from gateway.app import create_app
from gateway.catalogue import CatalogueError
from gateway.cli_recover import add_parser as add_recover
from gateway.clock import Clock
from gateway.errors import GatewayError
from gateway.ledger.database import Ledger
from gateway.ledger.keys import Keys, new_key
from gateway.logs import configure
from gateway.settings import DatabaseSettings, SettingsError, load, load_database

ROOT = Path(__file__).resolve().parent.parent
_GRACE_SECONDS = 30

Result = TypeVar("Result")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (SettingsError, CatalogueError) as error:
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
    keys = commands.add_parser("keys", help="manage API keys").add_subparsers(
        required=True, metavar="action"
    )
    create = keys.add_parser("create", help="make a key and print it, this once")
    create.add_argument("--workspace", default="default")
    create.add_argument("--name", default="unnamed")
    create.set_defaults(run=_create_key)
    keys.add_parser("list", help="list keys, without their secrets").set_defaults(run=_list_keys)
    revoke = keys.add_parser("revoke", help="end a key")
    revoke.add_argument("id")
    revoke.set_defaults(run=_revoke_key)
    return parser


def _serve(_: argparse.Namespace) -> int:
    settings = load()
    configure(settings.log_level)
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    return 0


def _migrate(_: argparse.Namespace) -> int:
    migrate(load_database())
    return 0


def migrate(settings: DatabaseSettings) -> None:
    """Upgrade to the newest schema. A second migrator waits and then finds nothing to do."""
    config = Config(toml_file=ROOT / "pyproject.toml")
    config.set_main_option("script_location", str(ROOT / "migrations"))
    config.attributes["url"] = settings.ledger_url
    settings.data.mkdir(parents=True, exist_ok=True)
    with _lock(settings.sqlite_path or settings.data / "migrate"):
        command.upgrade(config, "head")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One migrator at a time on this machine; PostgreSQL has a lock of its own in `env.py`."""
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _create_key(options: argparse.Namespace) -> int:
    key = new_key()

    async def create(keys: Keys) -> str:
        return await keys.create(key, options.workspace, options.name, Clock().wall())

    print(_with_keys(create), key)
    return 0


def _list_keys(_: argparse.Namespace) -> int:
    for key in _with_keys(Keys.all):
        state = "revoked" if key.revoked_at else "active"
        print(key.id, key.workspace, key.name, state, key.created_at.isoformat())
    return 0


def _revoke_key(options: argparse.Namespace) -> int:
    async def revoke(keys: Keys) -> bool:
        return await keys.revoke(options.id, Clock().wall())

    if _with_keys(revoke):
        return 0
    print(f"no active key `{options.id}`", file=sys.stderr)
    return 1


def _with_keys(work: Callable[[Keys], Coroutine[Any, Any, Result]]) -> Result:
    async def run() -> Result:
        ledger = Ledger(load_database().ledger_url)
        try:
            return await work(Keys(ledger))
        finally:
            await ledger.close()

    return asyncio.run(run())
