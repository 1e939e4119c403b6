"""Threads for work that grows with a request, so that the event loop never waits for it.

A small body is read at once. A large one waits for a thread. A workspace has one thread at a time,
so workspaces take turns. Work with its own line has one thread for all workspaces. If a client
leaves, its waiting work is dropped, and its running work goes on to its end. Threads share the GIL,
which changes hands every `SWITCH_SECONDS`, a tenth of Python's default.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from gateway.base.errors import Overloaded

INLINE_BYTES = 16 * 1024
"""The densest body of this size has some 600 blocks and takes the loop 5 ms; most take a tenth."""
SWITCH_SECONDS = 0.0005
_NUM_THREADS = 4
_MAX_WAITING = 256
"""How many pieces of work of one workspace may wait."""

Result = TypeVar("Result")


class Workers:
    """Used from one event loop; `close` when nothing runs any more."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "worker")
        self._free = asyncio.Semaphore(_NUM_THREADS)
        self._turns: WeakValueDictionary[tuple[str, ...], asyncio.Semaphore] = WeakValueDictionary()
        self._waiting: Counter[str] = Counter()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def run(
        self,
        workspace: str,
        num_bytes: int,
        work: Callable[..., Result],
        *arguments: Any,
        line: str | None = None,
    ) -> Result:
        """Run `work` and return its result. Without a `line` it waits in its workspace's line.
        Raise the error of `work`, or Overloaded if too much of the workspace's work waits."""
        if num_bytes <= INLINE_BYTES:
            return work(*arguments)
        if self._waiting[workspace] >= _MAX_WAITING:
            raise Overloaded
        loop = asyncio.get_running_loop()
        places = list[asyncio.Semaphore]()

        def release() -> None:
            for place in places:
                place.release()

        # An admin key's workspace is empty, so the shared line has a name of three parts.
        names = [(workspace,)] if line is None else [(workspace, line), ("of all", "", line)]
        turns = [self._turns.setdefault(name, asyncio.Semaphore()) for name in names]
        self._waiting[workspace] += 1
        running = None
        try:
            for place in (*turns, self._free):
                await place.acquire()
                places.append(place)
            running = self._threads.submit(work, *arguments)
        finally:
            if running is None:
                release()
            self._waiting[workspace] -= 1
            if not self._waiting[workspace]:
                del self._waiting[workspace]
        running.add_done_callback(
            lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(release)
        )
        return await asyncio.wrap_future(running)
