"""Looks for damage in the ledger while the gateway runs: at its start, and then once a day.

What is found is logged once, counted in a metric and shown in `/readyz`. The gateway goes on:
turns can be served and recorded whatever an old row holds. It takes about a twentieth of one core.
"""

import asyncio
import threading
import time
from collections.abc import Callable

from gateway.base.background import pause
from gateway.base.errors import GatewayError, LedgerDamaged
from gateway.base.logs import get_logger
from gateway.ledger import watermark
from gateway.ledger.check import problems
from gateway.ledger.database import Ledger

MAX_FINDINGS = 100
_DAY_SECONDS = 86_400.0
_RETRY_SECONDS = 60.0
_SHARE = 20
_MAX_PAUSE_SECONDS = 5.0


class Inspection:
    """`findings` are those of the last look, at most MAX_FINDINGS; `is_over` after the first."""

    def __init__(
        self,
        ledger: Ledger,
        show: Callable[[int], None],
        every_seconds: float = _DAY_SECONDS,
    ) -> None:
        """`show` is told the number of findings."""
        self._ledger = ledger
        self._show = show
        self._every_seconds = every_seconds
        self._log = get_logger("ledger")
        self.findings: list[str] = []
        self.is_over = False

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            try:
                await self.look(stopping)
                seconds = self._every_seconds
            except LedgerDamaged as error:
                self._note([*self.findings, str(error)])
                self.is_over = True
                seconds = self._every_seconds
            except GatewayError as error:
                self._log.warning("ledger_not_inspected", error=str(error))
                seconds = _RETRY_SECONDS
            await pause(stopping, seconds)

    async def look(self, stopping: asyncio.Event) -> None:
        """One look through everything. Raise GatewayError where the ledger can't be read."""
        async with self._ledger.snapshot() as connection:
            if await watermark.is_sample(connection):
                self.is_over = True
                return
        found: list[str] = []
        over, began = threading.Event(), time.monotonic()

        async def rest() -> None:
            nonlocal began
            seconds = min((time.monotonic() - began) * _SHARE, _MAX_PAUSE_SECONDS)
            await pause(stopping, seconds)
            began = time.monotonic()

        watcher = asyncio.create_task(_tell(stopping, over))
        try:
            async for line in problems(self._ledger, rest, over):
                found.append(line)
                self._note(found)
                if stopping.is_set() or len(found) >= MAX_FINDINGS:
                    break
        finally:
            watcher.cancel()
        self._note(found)
        self.is_over = True

    def _note(self, found: list[str]) -> None:
        for line in found:
            if line not in self.findings:
                self._log.error("ledger_damage", found=line)
        self.findings = found[:MAX_FINDINGS]
        self._show(len(self.findings))


async def _tell(stopping: asyncio.Event, over: threading.Event) -> None:
    """Set `over`, which stops the work in a thread, once `stopping` is set or this is cancelled."""
    try:
        await stopping.wait()
    finally:
        over.set()
