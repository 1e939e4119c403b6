"""The injected clock: wall time for display and ledger, monotonic time for every duration."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Clock:
    wall: Callable[[], datetime] = _utc_now
    monotonic: Callable[[], float] = time.monotonic
