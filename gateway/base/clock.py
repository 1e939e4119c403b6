"""The injected clock: wall time for display and ledger, monotonic time for every duration."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Clock:
    wall: Callable[[], datetime] = lambda: datetime.now(UTC)
    monotonic: Callable[[], float] = time.monotonic

    def wall_ms(self) -> int:
        """Milliseconds since 1970."""
        return int(self.wall().timestamp() * 1000)
