"""The schema of a gateway that a test or a benchmark starts."""

from collections.abc import Mapping


def migrate(environment: Mapping[str, str]) -> None:
    """Bring a gateway's database up to date, in this process: another Python takes a second.

    Not for callers inside an event loop, since a migration runs one of its own.
    """
    # Not installed yet where `scripts/run` imports this module.
    from gateway.base.settings import load_database
    from gateway.cli.migrate import migrate

    migrate(load_database(environment))
