"""What the gateways that are started in one process share: each start takes half of the CPU time.

A new ledger is a copy of one that was migrated, since all revisions take 0.15 s, and more on
PostgreSQL. A ledger that is there already, and one that `python -m gateway migrate` makes in a
process of its own, take every revision.

The API's description is made once for equal operations. It takes 0.05 s.
"""

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import pytest

from gateway.admin.openapi import controller
from gateway.admin.openapi.operation import Operation
from gateway.base.settings import DatabaseSettings
from gateway.cli import migrate

Upgrade = Callable[[DatabaseSettings], None]


@contextmanager
def migrated_once() -> Iterator[None]:
    """Until the end of the block, `gateway.cli.migrate` copies where there is nothing yet."""
    upgrade, mutex = migrate.upgrade, threading.Lock()
    with TemporaryDirectory(prefix="ledger-") as folder, pytest.MonkeyPatch.context() as patch:
        data = Path(folder)

        def copy_or_upgrade(settings: DatabaseSettings) -> None:
            with mutex:
                is_copied = _copy(settings, data, upgrade)
            if not is_copied:
                upgrade(settings)

        patch.setattr(migrate, "upgrade", copy_or_upgrade)
        yield


def _copy(settings: DatabaseSettings, data: Path, upgrade: Upgrade) -> bool:
    """False where there is something already. `data` is for the ledger that is copied."""
    path = settings.sqlite_path
    if path is None:
        return _copy_on_server(settings, data, upgrade)
    if path.exists():
        return False
    migrated = DatabaseSettings(data=data)
    assert migrated.sqlite_path is not None
    if not migrated.sqlite_path.exists():
        upgrade(migrated)
    shutil.copy(migrated.sqlite_path, path)
    return True


def _copy_on_server(settings: DatabaseSettings, data: Path, upgrade: Upgrade) -> bool:
    server, _, name = settings.database_url.rpartition("/")
    plain = server.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(f"{plain}/{name}", autocommit=True) as connection:
        if connection.execute("SELECT 1 FROM pg_tables WHERE schemaname = 'public'").fetchone():
            return False
    with psycopg.connect(f"{plain}/postgres", autocommit=True) as connection:
        query = "SELECT 1 FROM pg_database WHERE datname = 'migrated'"
        if not connection.execute(query).fetchone():
            connection.execute("CREATE DATABASE migrated")
            upgrade(DatabaseSettings(data=data, database_url=f"{server}/migrated"))
        try:
            connection.execute(f'DROP DATABASE "{name}"'.encode())
        except psycopg.errors.ObjectInUse:
            return False
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE migrated'.encode())
    return True


@contextmanager
def described_once() -> Iterator[None]:
    """Until the end of the block, `describe` of equal operations is the same object."""
    describe, made = controller.describe, dict[str, dict[str, Any]]()

    def described(operations: Iterable[Operation]) -> dict[str, Any]:
        listed = list(operations)
        key = repr(listed)
        if key not in made:
            made[key] = describe(listed)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "describe", described)
        yield
