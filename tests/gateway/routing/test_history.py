"""Memory and queue over time: a day of minutes, of which a range shows at most 120 points."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import msgspec

from engine.protocol.reports import BlockStats, Stats
from gateway.routing.history import LoadHistory
from tests.dashboard.live_answers import made, stats

START = datetime(2026, 11, 26, 12, tzinfo=UTC)
START_MS = int(START.timestamp() * 1000)


class Seen:
    """Two engines on a clock that the test moves."""

    def __init__(self) -> None:
        self.now, self.queued = START, 0
        self.engines: list[Any] = [
            SimpleNamespace(name=name, is_ready=True, last_stats=told(100)) for name in "ab"
        ]
        self.history = LoadHistory(self.engines, lambda: self.queued, lambda: self.now)

    def look(self, after_seconds: float = 0.0) -> None:
        self.now += timedelta(seconds=after_seconds)
        self.history.look()

    def told(self, engine: str | None = None, hours: float = 1.0) -> Any:
        until_ms = int(self.now.timestamp() * 1000) + 1
        return self.history.between(until_ms - int(hours * 3_600_000), until_ms, engine)


def told(total: int, **changes: Any) -> Stats:
    return msgspec.convert(stats(total) | changes, Stats)


def test_a_minute_has_the_mean_of_memory_and_the_most_that_waited() -> None:
    seen = Seen()
    seen.look()
    blocks = {"total": 100, "active": 100, "leased": 0}
    seen.engines[0].last_stats = told(100, blocks=made_blocks(**blocks), waiting=7)
    seen.queued = 3
    seen.look(30)
    seen.queued = 0
    seen.engines[0].last_stats = told(100)
    seen.look(20)
    (point,) = seen.told()
    assert (point.start_ms, point.waiting, point.queued) == (START_MS, 7, 3)
    # stats(): half is leased, nothing is active; one of the six looks saw all of it active.
    assert point.in_use == (5 * 50 + 100) / 600 and point.leased == 5 * 50 / 600
    (alone,) = seen.told("b")
    assert (alone.in_use, alone.waiting) == (0.5, 0)


def made_blocks(**values: int) -> Any:
    return made(BlockStats, **values)
