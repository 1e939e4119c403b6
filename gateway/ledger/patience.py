"""A deadline that counts only the time in which this process ran.

A process that gets no processor sees no answer, however fast the database was. So a late tick
counts as two ticks at most. The wait is extended by the time in which the process stood still.
"""

import asyncio
from collections.abc import Callable

_TICK_SECONDS = 0.25


class PatientTimer:
    """Calls `act` once, on the event loop, after `seconds` in which the loop ran."""

    def __init__(self, seconds: float, act: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._left = seconds
        self._act = act
        self._at = self._loop.time()
        self._arm()

    def cancel(self) -> None:
        self._handle.cancel()

    def _arm(self) -> None:
        self._handle = self._loop.call_later(min(self._left, _TICK_SECONDS), self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        self._left -= min(now - self._at, 2 * _TICK_SECONDS)
        self._at = now
        if self._left > 0:
            self._arm()
        else:
            self._act()
