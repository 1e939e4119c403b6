"""What the loops over vLLM and over a server share: they step by themselves, and we only listen."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.clock import Clock
from engine.schedule.lifecycle import Lifecycle
from engine.supervisor import Supervisor

T = TypeVar("T")

MAX_IDLE_SECONDS = 1.0


class ExternalLoop:
    """The counterpart of `engine.schedule.loop.EngineLoop`; `call` may be used from any thread.

    Everything else runs on the event loop's thread. An error of a task is a crash.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        clock: Clock,
        event_loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
    ) -> None:
        self.lifecycle = lifecycle
        self._clock = clock
        self._event_loop = event_loop
        self._supervisor = supervisor
        self._on_crash: Callable[[BaseException], None] = lambda error: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def start(self, on_crash: Callable[[BaseException], None]) -> None:
        """`on_crash` hears of an error that nothing can go on after."""
        self._on_crash = on_crash
        self._event_loop.call_soon_threadsafe(self._watch)

    def stop(self) -> None:
        """End our tasks; what runs is not finished.

        Called from another thread, while the event loop runs or after it has ended.
        """
        self._is_stopped = True
        if self._event_loop.is_running():
            asyncio.run_coroutine_threadsafe(self._cancel_tasks(), self._event_loop).result()

    def call(self, function: Callable[[], T], *, is_urgent: bool = False) -> "Future[T]":
        """Run a function between two outputs; what it ended is told. None waits for a step."""

        async def run() -> T:
            result = function()
            self._tell()
            return result

        return asyncio.run_coroutine_threadsafe(run(), self._event_loop)

    def _tell(self) -> None:
        """Publish what happened."""
        self.lifecycle.publish()

    def _watch(self) -> None:
        self._supervisor.start("expiry", self._watch_time)

    async def _watch_time(self) -> None:
        """Announce expiry, also when nothing runs."""
        while not self._is_stopped:
            due = self.lifecycle.seconds_to_expiry(self._clock.now())
            await asyncio.sleep(min(due, MAX_IDLE_SECONDS))
            self.lifecycle.expire(self._clock.now())
            self._tell()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._event_loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._is_stopped:
            self._on_crash(error)

    async def _cancel_tasks(self) -> None:
        """Cancel all but the caller's own, and wait for their ends."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
