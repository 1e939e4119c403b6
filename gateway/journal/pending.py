"""Works of the journal on their way to the disk: a turn's opening, and how long each may take."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from gateway.base.errors import JournalFull, JournalUnavailable
from gateway.journal.book import Refused

FAILURES = (OSError, Refused, ValueError)
"""Why a change of the journal fails. A wait that is too long is a TimeoutError."""


class Outcome(Protocol):
    """What becomes of a work. A future is one. It is told on the event loop, once."""

    def done(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, error: Exception, /) -> None: ...


class PendingOpen:
    """The opening of one turn, which was handed over. Any number of tasks may wait for it.

    A future would wake them a round of the event loop later, and a cancelled task would cancel it
    for the others.
    """

    __slots__ = ("_error", "_has_room", "_is_done", "_waiters")

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._is_done = False
        self._error: Exception | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_decided(self) -> bool:
        return self._is_done

    @property
    def has_failed(self) -> bool:
        """Whether the write failed, or took too long. Then it may be on disk all the same."""
        return self._error is not None

    async def wait(self) -> None:
        """Return when the record is on disk.

        Raise JournalUnavailable where it is not; JournalFull where its disk is full.
        """
        if not self._is_done:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        if isinstance(self._error, FAILURES):
            # Full disks have more than one error.
            raise (JournalUnavailable if self._has_room() else JournalFull) from None
        if self._error is not None:
            raise self._error

    # It is an Outcome for the journal.

    def done(self) -> bool:
        return self._is_done

    def set_result(self, _result: Any, /) -> None:
        self._end()

    def set_exception(self, error: Exception, /) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._is_done = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()


class Deadlines:
    """Fails what has no outcome after so many seconds.

    One timer serves all: a timer for each would be two a turn.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: deque[tuple[float, Outcome]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_armed = False

    def watch(self, outcome: Outcome) -> None:
        """Call it on the event loop on which the outcome is told."""
        loop, waiting = asyncio.get_running_loop(), self._waiting
        if loop is not self._loop:
            # What an ended loop left here has nobody to tell.
            waiting.clear()
            self._loop, self._is_armed = loop, False
        while waiting and waiting[0][1].done():
            waiting.popleft()
        waiting.append((loop.time() + self._seconds, outcome))
        if not self._is_armed:
            self._is_armed = True
            loop.call_later(self._seconds, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now, waiting = loop.time(), self._waiting
        while waiting and (waiting[0][1].done() or waiting[0][0] <= now):
            _, outcome = waiting.popleft()
            if not outcome.done():
                outcome.set_exception(TimeoutError())
        self._is_armed = bool(waiting)
        if waiting:
            loop.call_at(waiting[0][0], self._tick, loop)
