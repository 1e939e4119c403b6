"""Runs a command's work in the ledger that the settings name."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gateway.base.clock import Clock
from gateway.base.errors import LedgerNotMigrated
from gateway.base.settings import load_database
from gateway.ledger.database import Ledger, with_ledger

Result = TypeVar("Result")


def run_in_ledger(work: Callable[[Ledger], Coroutine[Any, Any, Result]]) -> Result:
    """Run one piece of work with the deadlines of requests."""

    async def run() -> Result:
        ledger = Ledger(_ledger_url())
        try:
            return await work(ledger)
        finally:
            await ledger.close()

    return asyncio.run(run())


def run_long_in_ledger(work: Callable[[Ledger], Coroutine[Any, Any, Result]]) -> Result:
    """Run one piece of work with the longer deadlines of commands."""
    return asyncio.run(with_ledger(_ledger_url(), work))


def _ledger_url() -> str:
    """Raise LedgerNotMigrated where the settings name a file that is not there."""
    settings = load_database()
    path = settings.sqlite_path
    # A URL may also have options behind the path, or be SQLite's own `file:`.
    if path is not None and not {"?", ":"} & set(str(path)) and not path.exists():
        raise LedgerNotMigrated(
            f"there is no database at `{path}`: run `python -m gateway migrate` with the settings"
            " of `serve`"
        )
    return settings.ledger_url


def now_ms() -> int:
    return int(Clock().wall().timestamp() * 1000)
