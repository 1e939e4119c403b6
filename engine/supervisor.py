"""Runs the loops that live as long as a process, the engine's or the gateway's, and restarts one
that raised an error.

Each end is logged with its traceback and counted. An end by `Expected` is logged in one line, and
again only where its reason is another. The loop is started again after a pause that doubles each
time. A loop is *failing* from its third end in a row on, until it has run for STEADY_SECONDS. The
process is not ready while a loop is failing. Where an engine can't go on after an error, its
process ends instead: see `ServedEngine.crash`.

Nothing that an engine logs here may quote a request. `trace_of` has the rule for that.
"""

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

MAX_PAUSE_SECONDS = 15.0
STEADY_SECONDS = 10.0
FAILING_ENDS = 3
STOP_SECONDS = 6.0
MAX_CAUSES = 10
"""How many of an error's causes are looked at."""
CALLBACKS = "callbacks"
"""The name under which the event loop's unhandled errors are counted."""


class Expected(Exception):
    """Why a loop can't run now, such as a server that is away. The message quotes no request."""


Loop = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""A loop runs until the event is set, or until it is cancelled."""
CountEnds = Callable[[str, int], None]
"""Counts so many ends, by the loop's kind. A loop that starts has had none."""
log = structlog.get_logger(part="supervisor")


class LoopHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One loop that is failing."""

    loop: str
    ends: int
    is_running: bool
    # The class of the exception that ended it last.
    error: str


@dataclass(slots=True)
class _Watched:
    """The state of one loop."""

    name: str
    kind: str
    # When it began to run, or ended.
    since: float = 0.0
    is_running: bool = False
    # How many times in a row it ended.
    num_ends: int = 0
    error: str = ""
    # The reason that was logged last.
    said: str = ""

    def is_steady(self, now: float) -> bool:
        return self.is_running and now - self.since >= STEADY_SECONDS


class Supervisor:
    """All loops of the process, by name. Only `guard` may be called from other threads.

    `ends` are the ends by an error since the process began, by the loop's kind. `has_messages`:
    tracebacks are logged with the messages of their exceptions.
    """

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        count_ends: CountEnds = lambda _kind, _amount: None,
        *,
        has_messages: bool = False,
    ) -> None:
        self.ends: Counter[str] = Counter({CALLBACKS: 0})
        self._monotonic = monotonic
        self._count_ends = count_ends
        self._has_messages = has_messages
        self._watched: dict[str, _Watched] = {}
        self._tasks: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}

    @property
    def failing(self) -> list[LoopHealth]:
        """The loops that end again and again."""
        return [
            LoopHealth(loop=w.name, ends=w.num_ends, is_running=w.is_running, error=w.error)
            for w in list(self._watched.values())
            if w.num_ends >= FAILING_ENDS and not w.is_steady(self._monotonic())
        ]

    def start(self, name: str, loop: Loop, kind: str | None = None) -> None:
        """Run `loop` until `stop`. The loop may return earlier if its work is done for good.

        `kind` is the metric's label. Loops that do the same work, each for one engine, share it.
        """
        watched = self._watched[name] = _Watched(name, kind or name)
        self._count(watched.kind, 0)
        stopping = asyncio.Event()
        task = asyncio.create_task(self._keep(watched, loop, stopping), name=name)
        self._tasks[name] = task, stopping

    async def stop(self, name: str, wait_seconds: float = STOP_SECONDS) -> None:
        """Let a loop end between two rounds. Cancel it if that takes longer than `wait_seconds`."""
        self._watched.pop(name, None)
        running = self._tasks.pop(name, None)
        if running is None:
            return
        task, stopping = running
        stopping.set()
        if wait_seconds:
            await asyncio.wait({task}, timeout=wait_seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """Cancel all loops."""
        await asyncio.gather(*(self.stop(name, 0) for name in list(self._tasks)))

    def guard(self, name: str, work: Callable[[], None]) -> None:
        """Run `work`, one round of a thread that lives as long as the process.

        An exception is noted like the end of a loop, and then the thread pauses.
        """
        watched = self._watched.setdefault(name, _Watched(name, name))
        if not watched.is_running:  # the first round after an end is a new start
            watched.since = self._monotonic()
            watched.is_running = True
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: it goes on
            time.sleep(self._ended(watched, error))

    def note_unhandled(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's exception handler. asyncio's own would log the contents of objects."""
        self._count(CALLBACKS, 1)
        error = context.get("exception")
        log.error("unhandled", what=context["message"], trace=trace_of(error) if error else None)

    async def _keep(self, watched: _Watched, loop: Loop, stopping: asyncio.Event) -> None:
        while True:
            watched.since = self._monotonic()
            watched.is_running = True
            try:
                await loop(stopping)
                return
            except Exception as error:  # noqa: BLE001 - the edge of a loop: it is started again
                seconds = self._ended(watched, error)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await stopping.wait()
                return

    def _ended(self, watched: _Watched, error: Exception) -> float:
        """Note the end. Return the pause before the next start, in seconds."""
        now = self._monotonic()
        watched.num_ends = 1 if watched.is_steady(now) else watched.num_ends + 1
        watched.since = now
        watched.is_running = False
        watched.error = type(error).__name__
        seconds = float(min(0.1 * 2 ** (watched.num_ends - 1), MAX_PAUSE_SECONDS))
        self._count(watched.kind, 1)
        if not isinstance(error, Expected):
            # As text: other renderers may show the values of variables.
            whole = "".join(traceback.format_exception(error)) if self._has_messages else None
            trace = whole or trace_of(error)
            log.error("loop_ended", loop=watched.name, retry_seconds=seconds, trace=trace)
            watched.said = ""
        elif watched.said != str(error):
            watched.said = str(error)
            log.warning("loop_waits", loop=watched.name, why=watched.said)
        return seconds

    def _count(self, kind: str, amount: int) -> None:
        self.ends[kind] += amount
        self._count_ends(kind, amount)


def trace_of(error: BaseException) -> str:
    """The traceback as text, without the values of variables, causes first.

    The message is left out, since it may quote a request (`KeyError: 'what the user said'`). Errors
    of the machine, of torch and of vLLM keep theirs: OSError, MemoryError and RuntimeError.
    """
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < MAX_CAUSES:
        said = f": {current}" if isinstance(current, OSError | MemoryError | RuntimeError) else ""
        frames = "".join(traceback.format_tb(current.__traceback__))
        parts.append(f"{frames}{type(current).__qualname__}{said}\n")
        current = current.__cause__ or current.__context__
    return "\n".join(reversed(parts))
