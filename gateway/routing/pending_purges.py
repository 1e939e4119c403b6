"""Purges that engines still have to do, because they were away when an operator asked for them.

An engine that comes back does them before it gets turns: its store and its host's memory may have
what was to be purged. All gateways of one database know the purges, and whichever sees the engine
first has it do them. A purge that two of them ask for removes the same as one.

While the database does not answer, a gateway goes by what it read last.
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
"""An engine that comes back waits no longer for the database."""
FRESH_SECONDS = 0.2
"""Engines that come back together go by one read."""
READ_SECONDS = 5.0
"""So soon a purge is known here that another gateway could not have done."""


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
        """What the engine still has to purge, the oldest first."""
        return [purge for purge in self._purges if purge.engine == engine]

    async def add(self, purge: PendingPurge) -> None:
        """Keep a purge for an engine that is away. Raise the errors of the table."""
        if self._table is not None:
            await self._table.add(purge)
        same = (purge.engine, purge.scope)
        others = [entry for entry in self._purges if (entry.engine, entry.scope) != same]
        self._purges = [*others, purge]

    async def done(self, purge: PendingPurge) -> None:
        """An engine has done a purge. Where the database does not answer, the purge comes back
        from there, and the engine does it once more: what the workspace cached since is lost."""
        self._purges = [entry for entry in self._purges if entry != purge]
        if self._table is None:
            return
        try:
            await self._table.remove(purge)
        except GatewayError as error:
            _log_unread(str(error))

    async def refresh(self) -> None:
        """Take in what the table has. Raise its errors."""
        if self._table is not None:
            self._purges = await self._table.all()

    async def look(self) -> None:
        """Take in what the table has, if that was not done a moment ago. What is known stays where
        the table does not answer soon."""
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
