"""Tasks that outlive the request that started them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from gateway.base.errors import GatewayError
from gateway.base.logs import get_logger


async def pause(stopping: asyncio.Event, seconds: float) -> None:
    """Sleep until the time is over or `stopping` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stopping.wait()


async def repeat(
    stopping: asyncio.Event, seconds: float, work: Callable[[], Awaitable[object]], failed: str
) -> None:
    """Do the work again and again, with pauses of this many seconds. A failure is logged as the
    event `failed`."""
    while not stopping.is_set():
        try:
            await work()
        except GatewayError as error:
            get_logger("gateway").warning(failed, error=str(error))
        await pause(stopping, seconds)


class Background:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start `work`. This never awaits, so it is safe while a stream is being cancelled."""

        def done(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                get_logger("background").error("task_failed", task=name, error=repr(error))

        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(done)
        return task

    async def close(self, deadline_seconds: float) -> None:
        """Let running tasks end. Cancel those that still run at the deadline."""
        running = set(self._tasks)
        if running:
            await asyncio.wait(running, timeout=deadline_seconds)
        late = set(self._tasks)
        if late:
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=1.0)
