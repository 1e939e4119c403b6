"""How full the engines' memory was and how many requests waited, minute by minute, for a day.

It is kept in memory, from this gateway's start on.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from engine.protocol.reports import Stats
from gateway.base.background import pause
from gateway.base.rounding import ceil_div
from gateway.routing.engine import Engine
from gateway.structs.fleet import LoadPoint

_LOOK_SECONDS = 1.0
_MINUTE_MS = 60_000
MAX_MINUTES = 1440
MAX_ENGINE_MINUTES = 100_000
"""The most minutes of single engines. With more than 69 engines a day does not fit."""
MAX_POINTS = 120


@dataclass(slots=True)
class _Sums:
    """One minute of one engine, or of all together."""

    # Sums of blocks over all samples.
    total: int = 0
    active: int = 0
    leased: int = 0
    # The most requests of a sample.
    running: int = 0
    waiting: int = 0


@dataclass(slots=True)
class _Minute:
    start_ms: int
    queued: int = 0
    sums: dict[str | None, _Sums] = field(default_factory=dict)
    """By engine; None is all together, so that no report adds up engines."""


@dataclass(frozen=True, slots=True)
class LoadHistory:
    """`num_queued` counts the turns that wait at the gateway."""

    engines: Sequence[Engine]
    num_queued: Callable[[], int]
    wall: Callable[[], datetime]
    minutes: deque[_Minute] = field(default_factory=lambda: deque(maxlen=MAX_MINUTES))

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            self.look()
            await pause(stopping, _LOOK_SECONDS)

    def look(self) -> None:
        start_ms = int(self.wall().timestamp() * 1000) // _MINUTE_MS * _MINUTE_MS
        if not self.minutes or self.minutes[-1].start_ms != start_ms:
            self.minutes.append(_Minute(start_ms))
            most = max(MAX_ENGINE_MINUTES // max(len(self.engines), 1), 1)
            while len(self.minutes) > most:
                self.minutes.popleft()
        minute = self.minutes[-1]
        minute.queued = max(minute.queued, self.num_queued())
        newest = {
            engine.name: engine.last_stats
            for engine in self.engines
            if engine.is_ready and engine.last_stats
        }
        samples: dict[str | None, list[Stats]] = {name: [stats] for name, stats in newest.items()}
        if newest:
            samples[None] = list(newest.values())
        for name, sample in samples.items():
            sums = minute.sums.setdefault(name, _Sums())
            sums.total += sum(stats.blocks.total for stats in sample)
            sums.active += sum(stats.blocks.active for stats in sample)
            sums.leased += sum(stats.blocks.leased for stats in sample)
            sums.running = max(sums.running, sum(stats.running for stats in sample))
            sums.waiting = max(sums.waiting, sum(stats.waiting for stats in sample))

    def between(self, since_ms: int, until_ms: int, engine: str | None) -> list[LoadPoint]:
        """At most MAX_POINTS + 1 points of one engine or of all together, in the order of time."""
        minutes = ceil_div(until_ms - since_ms, MAX_POINTS * _MINUTE_MS)
        width_ms = max(minutes, 1) * _MINUTE_MS
        parts: dict[int, list[_Minute]] = {}
        for minute in self.minutes:
            if since_ms < minute.start_ms + _MINUTE_MS and minute.start_ms < until_ms:
                parts.setdefault(minute.start_ms // width_ms * width_ms, []).append(minute)
        points = []
        for start_ms, part in sorted(parts.items()):
            samples = [minute.sums[engine] for minute in part if engine in minute.sums]
            total = sum(sums.total for sums in samples)
            leased = sum(sums.leased for sums in samples)
            in_use = leased + sum(sums.active for sums in samples)
            points.append(
                LoadPoint(
                    start_ms=start_ms,
                    in_use=in_use / total if total else None,
                    leased=leased / total if total else None,
                    running=max((sums.running for sums in samples), default=0),
                    waiting=max((sums.waiting for sums in samples), default=0),
                    queued=max(minute.queued for minute in part),
                    width_ms=width_ms,
                )
            )
        return points
