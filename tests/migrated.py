"""Ledgers of tests: an empty SQLite file is a copy of one that the revisions have made.

Making one takes a third of a second of CPU time, and hundreds are needed.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from gateway.base.settings import DatabaseSettings
from gateway.cli.migrate import migrate as run_revisions


def migrate(settings: DatabaseSettings) -> None:
    """As `gateway.cli.migrate.migrate`, which does it where there is a database already."""
    path = settings.sqlite_path
    if path is None or path.exists():
        run_revisions(settings)
        return
    settings.data.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(_newest())


@cache
def _newest() -> bytes:
    """The file of a ledger without turns."""
    with TemporaryDirectory() as folder:
        settings = DatabaseSettings(data=Path(folder))
        run_revisions(settings)
        path = settings.sqlite_path
        assert path is not None
        assert {entry.name for entry in path.parent.iterdir()} <= {path.name, f"{path.stem}.lock"}
        return path.read_bytes()
