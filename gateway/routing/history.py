"""How full the engines' memory was and how many requests waited, minute by minute, for a day.

It is kept in memory, from this gateway's start on.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from engine.protocol.reports import Stats
from gateway.admin.structs.fleet import LoadPoint
from gateway.base.background import pause
from gateway.routing.engine import Engine

_LOOK_SECONDS = 1.0
_MINUTE_MS = 60_000
MAX_MINUTES = 1440
MAX_KEPT = 100_000
"""The most minutes of single engines. With more than 69 engines a day does not fit."""
MAX_POINTS = 120


@dataclass(slots=True)
class _Seen:
    """One engine, or all together, in one minute: sums of blocks over all looks, and the most
    requests of a look."""

    total: int = 0
    active: int = 0
    leased: int = 0
    running: int = 0
    waiting: int = 0

    def note(self, found: Sequence[Stats]) -> None:
        self.total += sum(stats.blocks.total for stats in found)
        self.active += sum(stats.blocks.active for stats in found)
        self.leased += sum(stats.blocks.leased for stats in found)
        self.running = max(self.running, sum(stats.running for stats in found))
        self.waiting = max(self.waiting, sum(stats.waiting for stats in found))


@dataclass(slots=True)
class _Minute:
    start_ms: int
    queued: int = 0
    seen: dict[str | None, _Seen] = field(default_factory=dict)
    """By engine; None is all together, so that no report adds up engines."""


class LoadHistory:
    """`num_queued` counts the turns that wait at the gateway."""

    def __init__(
        self,
        engines: Sequence[Engine],
        num_queued: Callable[[], int],
        wall: Callable[[], datetime],
    ) -> None:
        self._engines = engines
        self._num_queued = num_queued
        self._wall = wall
        self._minutes: deque[_Minute] = deque(maxlen=MAX_MINUTES)

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            self.look()
            await pause(stopping, _LOOK_SECONDS)

    def look(self) -> None:
        start_ms = int(self._wall().timestamp() * 1000) // _MINUTE_MS * _MINUTE_MS
        if not self._minutes or self._minutes[-1].start_ms != start_ms:
            self._minutes.append(_Minute(start_ms))
            most = max(MAX_KEPT // max(len(self._engines), 1), 1)
            while len(self._minutes) > most:
                self._minutes.popleft()
        now = self._minutes[-1]
        now.queued = max(now.queued, self._num_queued())
        found = {e.name: e.last_stats for e in self._engines if e.is_ready and e.last_stats}
        for name, stats in found.items():
            now.seen.setdefault(name, _Seen()).note([stats])
        if found:
            now.seen.setdefault(None, _Seen()).note(list(found.values()))

    def between(self, since_ms: int, until_ms: int, engine: str | None) -> list[LoadPoint]:
        """At most MAX_POINTS points and one, of one engine or of all together, in order of time."""
        minutes = -(-(until_ms - since_ms) // (MAX_POINTS * _MINUTE_MS))
        width_ms = max(minutes, 1) * _MINUTE_MS
        parts: dict[int, list[_Minute]] = {}
        for minute in self._minutes:
            if since_ms < minute.start_ms + _MINUTE_MS and minute.start_ms < until_ms:
                parts.setdefault(minute.start_ms // width_ms * width_ms, []).append(minute)
        return [_point(start_ms, part, engine) for start_ms, part in sorted(parts.items())]


def _point(start_ms: int, minutes: Sequence[_Minute], engine: str | None) -> LoadPoint:
    found = [minute.seen[engine] for minute in minutes if engine in minute.seen]
    total = sum(seen.total for seen in found)
    leased = sum(seen.leased for seen in found)
    active = sum(seen.active for seen in found)
    return LoadPoint(
        start_ms=start_ms,
        in_use=(active + leased) / total if total else None,
        leased=leased / total if total else None,
        running=max((seen.running for seen in found), default=0),
        waiting=max((seen.waiting for seen in found), default=0),
        queued=max(minute.queued for minute in minutes),
    )
