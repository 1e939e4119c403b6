"""How many reads of the admin API one key may have at once. Further reads of the key wait.

These reads have database connections of their own (`app.py`). One key could occupy all of them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.base.errors import RateLimited

READS_PER_KEY = 6
WAIT_SECONDS = 10.0


@dataclass(slots=True)
class _Places:
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READS_PER_KEY))
    num_users: int = 0


class ReadLimit:
    def __init__(self) -> None:
        self._places: dict[str, _Places] = {}

    @asynccontextmanager
    async def taken(self, key: str) -> AsyncIterator[None]:
        """Hold one of the key's places. Raise RateLimited if none is free in time."""
        places = self._places.setdefault(key, _Places())
        places.num_users += 1
        try:
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    await places.free.acquire()
            except TimeoutError:
                raise RateLimited("reads at once", READS_PER_KEY, 5) from None
            try:
                yield
            finally:
                places.free.release()
        finally:
            places.num_users -= 1
            if not places.num_users:
                self._places.pop(key, None)
