"""Threads for work that a request asks of the engine's own process, one at a time for each scope.

A scope with many requests leaves the other threads to others, and its further work waits behind its
own.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


class ScopeThreads:
    """Used from one event loop. `begin` is called once in each thread."""

    def __init__(self, num_threads: int, name: str, begin: Callable[[], None]) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name, initializer=begin)
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    async def run(self, scope: str, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread when the scope's earlier work has ended; raise its error.

        Work that a thread has begun keeps the scope's turn until its end, also where its client
        has left.
        """
        loop, lock = asyncio.get_running_loop(), self._locks.setdefault(scope, asyncio.Lock())
        self._users[scope] += 1
        try:
            await lock.acquire()
        except asyncio.CancelledError:
            self._leave(scope)
            raise

        def release() -> None:
            lock.release()
            self._leave(scope)

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the event loop has ended before
                loop.call_soon_threadsafe(release)

        try:
            running = self._threads.submit(work)
        except RuntimeError:  # it is closed
            release()
            raise
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _leave(self, scope: str) -> None:
        self._users[scope] -= 1
        if not self._users[scope]:
            del self._users[scope], self._locks[scope]
