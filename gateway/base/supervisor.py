"""Runs the loops that live as long as the process, and restarts a loop that raised an exception.

An unexpected exception is logged with its traceback and counted, and the loop is started again
after a pause that doubles each time. A loop is *failing* from its third end in a row on, and while
it has been down for DOWN_SECONDS. It is well again after it has run for STEADY_SECONDS.
"""

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.base.background import pause
from gateway.base.logs import get_logger

_MAX_PAUSE_SECONDS = 15.0
DOWN_SECONDS = 5.0
STEADY_SECONDS = 10.0
_FAILING_ENDS = 3
_STOP_SECONDS = 6.0

Loop = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""A loop runs until the event is set."""
CountEnds = Callable[[str, int], None]
"""Counts so many unexpected ends, by the loop's kind. A loop that starts has had none."""


class LoopHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One loop that is failing. `error` is the class of the exception that ended it last."""

    loop: str
    ends: int
    is_running: bool
    error: str


@dataclass(slots=True)
class Watched:
    """How one loop fares: since when it runs or is down, and how many times in a row it ended."""

    name: str
    kind: str
    monotonic: Callable[[], float]
    since: float = 0.0
    is_running: bool = False
    num_ends: int = 0
    error: str = ""

    def started(self) -> None:
        self.since, self.is_running = self.monotonic(), True

    def ended(self, error: BaseException) -> float:
        """Note the end. Return the pause before the next start, in seconds."""
        now = self.monotonic()
        if self.is_running and now - self.since >= STEADY_SECONDS:
            self.num_ends = 0
        self.num_ends += 1
        self.since, self.is_running, self.error = now, False, type(error).__name__
        return float(min(0.1 * 2 ** (self.num_ends - 1), _MAX_PAUSE_SECONDS))

    @property
    def is_failing(self) -> bool:
        seconds, often = self.monotonic() - self.since, self.num_ends >= _FAILING_ENDS
        if self.is_running:
            return often and seconds < STEADY_SECONDS
        return self.num_ends > 0 and (often or seconds >= DOWN_SECONDS)


class Supervisor:
    """All loops of the process, by name. Only `guard` may be called from other threads."""

    def __init__(self, monotonic: Callable[[], float], count_ends: CountEnds) -> None:
        self._monotonic = monotonic
        self._count_ends = count_ends
        self._watched: dict[str, Watched] = {}
        self._tasks: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}

    @property
    def failing(self) -> list[LoopHealth]:
        return [
            LoopHealth(loop=w.name, ends=w.num_ends, is_running=w.is_running, error=w.error)
            for w in list(self._watched.values())
            if w.is_failing
        ]

    def start(self, name: str, loop: Loop, kind: str | None = None) -> None:
        """Run `loop` until `stop`. The loop may return earlier if its work is done for good.

        `kind` is the metric's label. Loops that do the same work, each for one engine, share it.
        """
        watched = self._watched[name] = Watched(name, kind or name, self._monotonic)
        self._count_ends(watched.kind, 0)
        stopping = asyncio.Event()
        task = asyncio.create_task(self._keep(watched, loop, stopping), name=name)
        self._tasks[name] = task, stopping

    async def stop(self, name: str, wait_seconds: float = _STOP_SECONDS) -> None:
        """Let a loop end between two rounds. Cancel it if that takes longer than `wait_seconds`."""
        self._watched.pop(name, None)
        if (running := self._tasks.pop(name, None)) is None:
            return
        task, stopping = running
        stopping.set()
        if wait_seconds:
            await asyncio.wait({task}, timeout=wait_seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def guard(self, name: str, work: Callable[[], None]) -> None:
        """Run `work`, one round of a thread that lives as long as the process.

        An exception is noted like the end of a loop, and then the thread pauses.
        """
        watched = self._watched.setdefault(name, Watched(name, name, self._monotonic))
        if not watched.is_running:  # the first round after an end is a new start
            watched.started()
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: it goes on
            time.sleep(self._ended(watched, error))

    async def _keep(self, watched: Watched, loop: Loop, stopping: asyncio.Event) -> None:
        while True:
            watched.started()
            try:
                await loop(stopping)
                return
            except Exception as error:  # noqa: BLE001 - the edge of a loop: it is started again
                seconds = self._ended(watched, error)
            if stopping.is_set():
                return
            await pause(stopping, seconds)

    def _ended(self, watched: Watched, error: Exception) -> float:
        seconds = watched.ended(error)
        self._count_ends(watched.kind, 1)
        # The traceback is logged as text: other renderers may show the values of variables.
        trace = "".join(traceback.format_exception(error))
        log = get_logger("supervisor")
        log.error("loop_ended", loop=watched.name, retry_seconds=seconds, trace=trace)
        return seconds
