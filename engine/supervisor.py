"""Runs the asyncio loops that live as long as the process, and restarts one that raised an error.

Each end is logged and counted. An end by `Expected` is logged in one line, without a traceback, and
again only where its reason is another. The loop is started again after a pause that doubles each
time. A loop is *failing* from its third end in a row on, until it has run for STEADY_SECONDS. The
engine is not ready while a loop is failing. Where nothing can go on after an error, the process
ends instead: see `ServedEngine.crash`.

Nothing that is logged here may hold what a request said: `trace_of` has its rule.
"""

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 15.0
STEADY_SECONDS = 10.0
FAILING_ENDS = 3
CALLBACKS = "callbacks"
"""The name under which errors are counted that no caller of the event loop's work took."""


class Expected(Exception):
    """Why a loop can't run now, such as a server that is away. The message quotes no request."""


Loop = Callable[[], Coroutine[Any, Any, None]]
log = structlog.get_logger()


@dataclass(slots=True)
class _Watched:
    """`since` is the last start or end. `num_ends` counts ends in a row.

    `said` is the reason that was logged last.
    """

    since: float
    is_running: bool = True
    num_ends: int = 0
    said: str = ""

    def is_failing(self, now: float) -> bool:
        is_steady = self.is_running and now - self.since >= STEADY_SECONDS
        return self.num_ends >= FAILING_ENDS and not is_steady


class Supervisor:
    """Lives on the event loop's thread. `monotonic` returns seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.ends: Counter[str] = Counter({CALLBACKS: 0})
        """Ends by an error, by the loop's name, since the process began."""
        self._monotonic = monotonic
        self._watched: dict[str, _Watched] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def failing(self) -> list[str]:
        """The names of the loops that end again and again."""
        now = self._monotonic()
        return [name for name, watched in self._watched.items() if watched.is_failing(now)]

    def start(self, name: str, loop: Loop) -> None:
        """Run `loop` until `stop`."""
        self.ends[name] += 0
        watched = self._watched[name] = _Watched(self._monotonic())
        task = asyncio.create_task(self._keep(name, loop, watched), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        tasks = list(self._tasks)
        self._watched.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def note_unhandled(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's exception handler. asyncio's own would log what objects hold."""
        self.ends[CALLBACKS] += 1
        error = context.get("exception")
        log.error("unhandled", what=context["message"], trace=trace_of(error) if error else None)

    async def _keep(self, name: str, loop: Loop, watched: _Watched) -> None:
        while True:
            watched.since, watched.is_running = self._monotonic(), True
            try:
                await loop()
                return
            except Exception as error:  # noqa: BLE001 - the edge of a loop: it is started again
                seconds = self._ended(name, watched, error)
            await asyncio.sleep(seconds)

    def _ended(self, name: str, watched: _Watched, error: Exception) -> float:
        """Note the end. Return the pause before the next start, in seconds."""
        now = self._monotonic()
        if now - watched.since >= STEADY_SECONDS:
            watched.num_ends = 0
        watched.num_ends += 1
        watched.since, watched.is_running = now, False
        self.ends[name] += 1
        seconds = float(min(FIRST_PAUSE_SECONDS * 2 ** (watched.num_ends - 1), MAX_PAUSE_SECONDS))
        if not isinstance(error, Expected):
            log.error("loop ended", loop=name, retry_seconds=seconds, trace=trace_of(error))
            watched.said = ""
        elif watched.said != str(error):
            watched.said = str(error)
            log.warning("loop waits", loop=name, why=watched.said)
        return seconds


def trace_of(error: BaseException) -> str:
    """The traceback as text, without the values of variables, causes first.

    The message is left out, since it may quote a request (`KeyError: 'what the user said'`). Errors
    of the machine, of torch and of vLLM keep theirs: OSError, MemoryError and RuntimeError.
    """
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < 10:
        said = f": {current}" if isinstance(current, OSError | MemoryError | RuntimeError) else ""
        frames = "".join(traceback.format_tb(current.__traceback__))
        parts.append(f"{frames}{type(current).__qualname__}{said}\n")
        current = current.__cause__ or current.__context__
    return "\n".join(reversed(parts))
