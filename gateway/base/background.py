"""Tasks that outlive the request that started them, and answers that are made once and kept."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gateway.base.logs import get_logger


async def pause(stopping: asyncio.Event, seconds: float) -> None:
    """Sleep until the time is over or `stopping` is set."""
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        pass


class Background:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._log = get_logger("background")

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start `work`.

        This method never awaits, so it is safe while a stream is being cancelled.
        """
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("task_failed", task=task.get_name(), error=repr(error))

    async def close(self, deadline_seconds: float) -> None:
        """Let running tasks end. Cancel those that still run at the deadline."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=deadline_seconds)
        left = set(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)


Answer = TypeVar("Answer")
MAX_KEPT = 64


@dataclass(slots=True)
class _Place(Generic[Answer]):
    """`made` is the answer and when it was asked for."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    made: tuple[float, Answer] | None = None


class Kept(Generic[Answer]):
    """The newest answers by what they are about. Used from one event loop."""

    def __init__(self, seconds: float, max_kept: int = MAX_KEPT) -> None:
        self._seconds = seconds
        self._max_kept = max_kept
        self._places: OrderedDict[Hashable, _Place[Answer]] = OrderedDict()

    async def get(
        self, about: Hashable, now: float, make: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """The kept answer if it is young enough, else a new one.

        `now` is in seconds of a monotonic clock.
        One caller at a time makes it and the others wait. If that caller is cancelled or fails, the
        next one makes it.
        """
        place = self._places.setdefault(about, _Place())
        self._places.move_to_end(about)
        while len(self._places) > self._max_kept:
            self._places.popitem(last=False)
        async with place.lock:
            if place.made is not None and now - place.made[0] < self._seconds:
                return place.made[1]
            answer = await make()
            place.made = now, answer
            return answer
