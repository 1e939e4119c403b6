"""Threads for work that a request asks of the engine's own process, one at a time for each scope.

A scope with many requests leaves the other threads to others, and its further work waits behind its
own.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(slots=True)
class _Line:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0


class ScopeThreads:
    """Used from one event loop. `begin` is called once in each thread."""

    def __init__(self, num_threads: int, name: str, begin: Callable[[], None]) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name, initializer=begin)
        self._lines: dict[str, _Line] = {}

    async def run(self, scope: str, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread when the scope's earlier work has ended; raise its error.

        Work that a thread has begun keeps the scope's turn until its end, also where its client
        has left.
        """
        loop = asyncio.get_running_loop()
        line = self._lines.setdefault(scope, _Line())
        line.num_users += 1
        try:
            await line.lock.acquire()
        except asyncio.CancelledError:
            self._leave(scope, line)
            raise

        def left() -> None:
            line.lock.release()
            self._leave(scope, line)

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the event loop has ended before
                loop.call_soon_threadsafe(left)

        try:
            running = self._threads.submit(work)
        except RuntimeError:  # it is closed
            left()
            raise
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _leave(self, scope: str, line: _Line) -> None:
        line.num_users -= 1
        if not line.num_users:
            self._lines.pop(scope, None)
