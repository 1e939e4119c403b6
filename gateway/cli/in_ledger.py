"""Runs a command's work in the ledger that the settings name."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gateway.base.clock import Clock
from gateway.base.settings import load_database
from gateway.ledger.database import Ledger, with_ledger

Result = TypeVar("Result")


def run_in_ledger(work: Callable[[Ledger], Coroutine[Any, Any, Result]]) -> Result:
    """Run one piece of work with the deadlines of requests."""

    async def run() -> Result:
        ledger = Ledger(load_database().ledger_url)
        try:
            return await work(ledger)
        finally:
            await ledger.close()

    return asyncio.run(run())


def run_long_in_ledger(work: Callable[[Ledger], Coroutine[Any, Any, Result]]) -> Result:
    """Run one piece of work with the longer deadlines of commands."""
    return asyncio.run(with_ledger(load_database().ledger_url, work))


def now_ms() -> int:
    return int(Clock().wall().timestamp() * 1000)
