"""python -m gateway migrate: brings the database up to date"""

import argparse
import fcntl
from pathlib import Path

from alembic import command
from alembic.config import Config

from gateway.base.settings import DatabaseSettings, load_database
from gateway.cli.arguments import Commands
from gateway.ledger.database import translated

ROOT = Path(__file__).resolve().parents[2]


def add_commands(commands: Commands) -> None:
    def run(_: argparse.Namespace) -> int:
        migrate(load_database())
        return 0

    commands.add_parser("migrate", help="bring the database up to date").set_defaults(run=run)


def migrate(settings: DatabaseSettings) -> None:
    """Upgrade to the newest schema. A second migrator waits and then finds nothing to do. Raise
    SchemaRefused for a database that can't be upgraded, LedgerUnavailable where it is away."""
    settings.data.mkdir(parents=True, exist_ok=True)
    # One migrator at a time on this machine; PostgreSQL has a lock of its own in `env.py`.
    path = (settings.sqlite_path or settings.data / "migrate").with_suffix(".lock")
    with path.open("w") as file, translated():
        fcntl.flock(file, fcntl.LOCK_EX)
        upgrade(settings)


def upgrade(settings: DatabaseSettings, revision: str = "head") -> None:
    """Upgrade to a revision. Nobody else may migrate meanwhile.

    Raise SchemaRefused for a database that can't be upgraded, and SQLAlchemyError or OSError where
    it can't be reached.
    """
    config = Config(toml_file=ROOT / "pyproject.toml")
    config.set_main_option("script_location", str(ROOT / "migrations"))
    config.attributes["url"] = settings.ledger_url
    command.upgrade(config, revision)
    if settings.sqlite_path is not None:
        settings.sqlite_path.chmod(0o600)
