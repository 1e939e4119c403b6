"""Time as the engine sees it: seconds from an arbitrary start, never going back."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float: ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock for tests of lifetimes. It stands still until `advance`."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Raises ValueError for a negative step."""
        if not seconds >= 0:
            raise ValueError("time does not go back")
        self._now += seconds
