"""What the gateways that are started in one process share: each start takes half of the CPU time.

A new SQLite ledger is a copy of one that was migrated, since all revisions take 0.15 s. A ledger
that is there already, one of PostgreSQL, and one that `python -m gateway migrate` makes in a
process of its own take every revision.

The API's description is made once for equal operations. It takes 0.05 s.
"""

import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from gateway.admin.openapi import controller
from gateway.admin.openapi.operation import Operation
from gateway.base.settings import DatabaseSettings
from gateway.cli import migrate


@contextmanager
def migrated_once() -> Iterator[None]:
    """Until the end of the block, `gateway.cli.migrate` copies where there is nothing yet."""
    upgrade, mutex = migrate.upgrade, threading.Lock()
    with TemporaryDirectory(prefix="ledger-") as folder, pytest.MonkeyPatch.context() as patch:
        migrated = DatabaseSettings(data=Path(folder))

        def copy_or_upgrade(settings: DatabaseSettings) -> None:
            path, source = settings.sqlite_path, migrated.sqlite_path
            if path is None or path.exists():
                upgrade(settings)
                return
            assert source is not None
            with mutex:
                if not source.exists():
                    upgrade(migrated)
            shutil.copy(source, path)

        patch.setattr(migrate, "upgrade", copy_or_upgrade)
        yield


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
