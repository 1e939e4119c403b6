"""How many reads of the admin API one key may have at once. Further reads of the key wait.

The calls of batches and cached contents are bounded so for each workspace, and plans for all keys
together.

These reads have database connections of their own (`app.py`). One key could occupy all of them.
They share the event loop with the turns. So a place rests after each read, in proportion to its
time, and a key that reads all the time leaves most of the loop to others. An answer waits for a
place only if all places of its key read or rest.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Literal
from weakref import WeakValueDictionary

from gateway.base.errors import RateLimited

ReadKind = Literal["read", "export", "plan", "planner", "store"]
"""`plan` is a key's request for a plan, `planner` a process that makes one."""
READS_PER_KEY = 6
EXPORTS_PER_KEY = 1
PLANS_PER_KEY = 1
PLANNERS = 2
READ_REST = 2.0
EXPORT_REST = 6.0
"""How many times the time of a read its place rests."""
STORE_CALLS_PER_WORKSPACE = 3
STORE_REST = 1.0
MAX_REST_SECONDS = 1.0
WAIT_SECONDS = 10.0
PLANNER_WAIT_SECONDS = 60.0


class ReadLimit:
    """`rest` times the time that a read took, its place is not given to another one."""

    def __init__(
        self,
        per_key: int = READS_PER_KEY,
        rest: float = READ_REST,
        what: str = "reads at once",
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """`what` is bounded, for the refusal."""
        self.wait_seconds = wait_seconds
        self._per_key = per_key
        self._rest = rest
        self._what = what
        # A key's semaphore lives while a read holds it, waits for it, or rests.
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def taken(self, key: str) -> AsyncIterator[None]:
        """Hold one of the key's places. Raise RateLimited if none is free in time."""
        free = self._places.setdefault(key, asyncio.Semaphore(self._per_key))
        try:
            async with asyncio.timeout(self.wait_seconds):
                await free.acquire()
        except TimeoutError:
            raise RateLimited(self._what, self._per_key, 5) from None
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            yield
        finally:
            rest = min(self._rest * (loop.time() - begun), MAX_REST_SECONDS)
            loop.call_later(rest, free.release)


def read_limits() -> Mapping[ReadKind, ReadLimit]:
    """The limits of one gateway."""
    return {
        "read": ReadLimit(),
        "export": ReadLimit(EXPORTS_PER_KEY, EXPORT_REST),
        "plan": ReadLimit(PLANS_PER_KEY),
        "planner": ReadLimit(PLANNERS, 0.0, "plans at once", PLANNER_WAIT_SECONDS),
        "store": ReadLimit(
            STORE_CALLS_PER_WORKSPACE, STORE_REST, "calls of batches and cached contents at once"
        ),
    }
