"""Records in the ledger what engines did with their leases, and how long their steps took.

An engine's counters end with its process, so they are recorded as they come. The ledger then knows
which leases an engine lost: those of its epoch that were granted and whose end was never reported
(`ledger/reads/leases.py`).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from engine.protocol.reports import Description, Stats
from gateway.base.background import pause
from gateway.base.epochs import EpochReport, ended_of, kind_of
from gateway.base.errors import GatewayError, SampleData
from gateway.base.logs import get_logger

RECORD_SECONDS = 1.0
HEARD_SECONDS = 15.0
"""The time between two reports of an engine whose counters do not change."""
MAX_ENDED = 16


@dataclass(slots=True)
class EpochSeen:
    """One epoch of an engine. Moments are on the gateway's monotonic clock."""

    epoch: str
    model: str
    device: str
    kind: str
    first_at: float
    heard_at: float
    silent_at: float | None = None
    # The leases that were granted, as responses reported them. They are ahead of `stats`.
    granted: int = 0
    stats: Stats | None = None

    @property
    def num_granted(self) -> int:
        return max(self.granted, self.stats.counters.leases_granted if self.stats else 0)

    @property
    def num_held(self) -> int:
        """The leases of which no end is known."""
        ends = ended_of(self.stats.counters) if self.stats else {}
        return max(self.num_granted - sum(ends.values()), 0)


@dataclass(slots=True)
class EpochsSeen:
    """The epochs of one engine."""

    # The latest one.
    now: EpochSeen | None = None
    # Those before it that are not in the ledger yet.
    before: deque[EpochSeen] = field(default_factory=lambda: deque(maxlen=MAX_ENDED))

    def answered(self, about: Description, at: float) -> None:
        if self.now is None or self.now.epoch != about.epoch:
            if self.now is not None:
                self.before.append(self.now)
            self.now = EpochSeen(
                epoch=about.epoch,
                model=about.model,
                device=about.device,
                kind=kind_of(about),
                first_at=at,
                heard_at=at,
            )
        self.now.heard_at = at
        self.now.silent_at = None

    def missed(self, at: float) -> None:
        """Note that the engine did not answer, or that a new process is not ready yet."""
        if self.now is not None and self.now.silent_at is None:
            self.now.silent_at = at

    def counted(self, stats: Stats) -> None:
        if self.now is not None and self.now.epoch == stats.epoch:
            self.now.stats = stats

    def granted(self, epoch: str, leases: int) -> None:
        """Note how many leases an epoch has granted, by a response."""
        if self.now is not None and self.now.epoch == epoch:
            self.now.granted = max(self.now.granted, leases)


@dataclass(slots=True)
class EpochRecorder:
    """Writes what engines report of their epochs."""

    # Gives each engine's name and epochs.
    engines: Callable[[], Sequence[tuple[str, EpochsSeen]]]
    # Writes to the ledger. A report that it could not take is made again.
    record: Callable[[Sequence[EpochReport]], Awaitable[None]]
    monotonic: Callable[[], float]
    wall: Callable[[], datetime]
    _told: dict[str, EpochReport] = field(default_factory=dict)

    async def run(self, stopping: asyncio.Event) -> None:
        """Run until stopping, and then once more. On sample data there is nothing to record."""
        is_last = False
        while not is_last:
            is_last = stopping.is_set()
            try:
                await self.step()
            except SampleData:
                return
            except GatewayError as error:
                get_logger("epochs").warning("epochs_not_recorded", error=str(error))
            await pause(stopping, RECORD_SECONDS)

    async def step(self) -> None:
        """Record what is new."""
        engines = self.engines()
        earlier = [(name, epoch) for name, epochs in engines for epoch in epochs.before]
        reports = [self._report(name, epoch) for name, epoch in earlier]
        live = [self._report(name, epochs.now) for name, epochs in engines if epochs.now]
        reports += [report for report in live if self._is_new(report)]
        if reports:
            await self.record(reports)
        for name, epochs in engines:
            while epochs.before and (name, epochs.before[0]) in earlier:
                epochs.before.popleft()
        new = {report.engine: report for report in reports}
        self._told = {
            report.engine: new.get(report.engine) or self._told[report.engine] for report in live
        }

    def _is_new(self, report: EpochReport) -> bool:
        last = self._told.get(report.engine)
        if last is None or last.epoch != report.epoch or last.counts != report.counts:
            return True
        return report.heard_ms - last.heard_ms >= HEARD_SECONDS * 1000

    def _report(self, name: str, seen: EpochSeen) -> EpochReport:
        to_wall = self.wall().timestamp() - self.monotonic()
        stats = seen.stats
        store = stats.store if stats else None
        return EpochReport(
            engine=name,
            epoch=seen.epoch,
            model=seen.model,
            device=seen.device,
            kind=seen.kind,
            first_ms=int((seen.first_at + to_wall) * 1000),
            heard_ms=int((seen.heard_at + to_wall) * 1000),
            silent_ms=None if seen.silent_at is None else int((seen.silent_at + to_wall) * 1000),
            granted=seen.num_granted,
            ended=ended_of(stats.counters) if stats else {},
            restored_leases=store.restored_leases if store else 0,
            lost_leases=store.lost_leases if store else 0,
            prefill_times=stats.prefill_times if stats else None,
        )
