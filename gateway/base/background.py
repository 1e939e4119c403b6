"""Tasks that outlive the request that started them, and answers that are made once and kept."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from gateway.base.logs import get_logger


async def pause(stopping: asyncio.Event, seconds: float) -> None:
    """Sleep until the time is over or `stopping` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stopping.wait()


class Background:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start `work`. This never awaits, so it is safe while a stream is being cancelled."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log = get_logger("background")
            log.error("task_failed", task=task.get_name(), error=repr(error))

    async def close(self, deadline_seconds: float) -> None:
        """Let running tasks end. Cancel those that still run at the deadline."""
        if running := set(self._tasks):
            await asyncio.wait(running, timeout=deadline_seconds)
        if left := set(self._tasks):
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=1.0)


Answer = TypeVar("Answer")


class Kept(Generic[Answer]):
    """The newest answers by what they are about. Used from one event loop."""

    def __init__(self, seconds: float, max_kept: int = 64) -> None:
        self._seconds = seconds
        self._max_kept = max_kept
        self._locks: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()
        self._made: OrderedDict[Hashable, tuple[float, Answer]] = OrderedDict()

    async def get(
        self, about: Hashable, now: float, make: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """The kept answer if it is young enough, else a new one, which one caller makes.

        `now` is in seconds of a monotonic clock. If the caller that makes it is cancelled or fails,
        the next one makes it.
        """
        async with self._locks.setdefault(about, asyncio.Lock()):
            made = self._made.get(about)
            if made is None or now - made[0] >= self._seconds:
                made = self._made[about] = now, await make()
            self._made.move_to_end(about)
            while len(self._made) > self._max_kept:
                self._made.popitem(last=False)
            return made[1]
