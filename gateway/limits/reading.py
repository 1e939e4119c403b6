"""How many reads of the admin API one key may have at once. Further reads of the key wait.

The calls of batches and cached contents are bounded so for each workspace.

These reads have database connections of their own (`app.py`). One key could occupy all of them.
They share the event loop with the turns. So a place rests after each read, in proportion to its
time, and a key that reads all the time leaves most of the loop to others. An answer waits for a
place only if all places of its key read or rest.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.base.errors import RateLimited

READS_PER_KEY = 6
EXPORTS_PER_KEY = 1
PLANS_PER_KEY = 1
READ_REST = 2.0
EXPORT_REST = 6.0
"""How many times the time of a read its place rests."""
STORE_CALLS_PER_WORKSPACE = 3
STORE_REST = 1.0
MAX_REST_SECONDS = 1.0
WAIT_SECONDS = 10.0


@dataclass(slots=True)
class _Places:
    free: asyncio.Semaphore
    num_users: int = 0


class ReadLimit:
    """`rest` times the time that a read took, its place is not given to another one."""

    def __init__(
        self,
        per_key: int = READS_PER_KEY,
        rest: float = READ_REST,
        what: str = "reads at once",
    ) -> None:
        """`what` is bounded, for the refusal."""
        self._per_key = per_key
        self._rest = rest
        self._what = what
        self._places: dict[str, _Places] = {}

    @asynccontextmanager
    async def taken(self, key: str) -> AsyncIterator[None]:
        """Hold one of the key's places. Raise RateLimited if none is free in time."""
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = _Places(asyncio.Semaphore(self._per_key))
        places.num_users += 1
        loop, rest = asyncio.get_running_loop(), 0.0
        try:
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    await places.free.acquire()
            except TimeoutError:
                raise RateLimited(self._what, self._per_key, 5) from None
            begun = loop.time()
            try:
                yield
            finally:
                rest = min(self._rest * (loop.time() - begun), MAX_REST_SECONDS)
                loop.call_later(rest, places.free.release)
        finally:
            loop.call_later(rest, self._left, key, places)

    def _left(self, key: str, places: _Places) -> None:
        places.num_users -= 1
        if not places.num_users:
            self._places.pop(key, None)
