"""Purges that engines still have to do, because they were away when an operator asked for them.

An engine that comes back does them before it gets turns, since its store and its host's memory may
have the content. All gateways of one database know the purges. The gateway that sees the engine
first has it do them. A purge that two gateways ask for removes the same as one.

While the database does not answer, a gateway uses what it read last.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Protocol

from gateway.base.background import pause
from gateway.base.errors import GatewayError
from gateway.base.logs import get_logger
from gateway.structs.fleet import PendingPurge

LOOK_SECONDS = 2.0
"""The longest time that an engine that comes back waits for the database."""
FRESH_SECONDS = 0.2
"""A read of the table counts for this long, so that engines that come back together share it."""
READ_SECONDS = 5.0
"""The longest time until a purge that another gateway keeps is known here."""


class Table(Protocol):
    """Where purges are kept, as `ledger/pending_purges.py` does it. Calls raise GatewayError."""

    async def all(self) -> list[PendingPurge]: ...
    async def add(self, purge: PendingPurge) -> None: ...
    async def remove(self, purge: PendingPurge) -> None: ...


class PendingPurges:
    """The pending purges, as this gateway knows them."""

    def __init__(self, table: Table | None) -> None:
        """Without a table they are known as long as this object lives."""
        self._table = table
        self._purges: list[PendingPurge] = []
        self._looked_at = -math.inf
        self._looking = asyncio.Lock()

    def of(self, engine: str) -> Sequence[PendingPurge]:
        """The purges that the engine still has to do, the oldest first."""
        return [purge for purge in self._purges if purge.engine == engine]

    async def add(self, purge: PendingPurge) -> None:
        """Keep a purge for an engine that is away. Raise the errors of the table."""
        if self._table is not None:
            await self._table.add(purge)
        same = (purge.engine, purge.scope)
        others = [entry for entry in self._purges if (entry.engine, entry.scope) != same]
        self._purges = [*others, purge]

    async def done(self, purge: PendingPurge) -> None:
        """Remove a purge that an engine has done. If the database does not answer, the purge comes
        back from there and the engine repeats it. Then what the workspace cached since is lost."""
        self._purges = [entry for entry in self._purges if entry != purge]
        if self._table is None:
            return
        try:
            await self._table.remove(purge)
        except GatewayError as error:
            get_logger("purges").warning("pending_purge_not_removed", error=str(error))

    async def refresh(self) -> None:
        """Take in what the table has. Raise its errors."""
        if self._table is not None:
            self._purges = await self._table.all()

    async def look(self) -> None:
        """Take in what the table has, unless it was read a moment ago. What is known stays if the
        table does not answer soon."""
        loop = asyncio.get_running_loop()
        async with self._looking:
            if loop.time() - self._looked_at < FRESH_SECONDS:
                return
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self.refresh()
                self._looked_at = loop.time()
            except TimeoutError:
                _log_unread("the database did not answer in time")
            except GatewayError as error:
                _log_unread(str(error))

    async def run(self, stopping: asyncio.Event) -> None:
        """Follow the table until the gateway stops."""
        while not stopping.is_set():
            await pause(stopping, READ_SECONDS)
            await self.look()


def _log_unread(error: str) -> None:
    get_logger("purges").warning("pending_purges_not_read", error=error)
