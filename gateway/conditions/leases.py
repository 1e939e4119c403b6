"""Which leases ended before their time, by the ledger, for `/metrics` and the conditions.

An engine's leases and its counters end with its process. So after a restart, which loses most
leases, the counters tell of none. The ledger's records remain.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from gateway.base.background import pause
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError
from gateway.base.logs import get_logger
from gateway.base.metrics import Metrics
from gateway.conditions.kinds import LULL_SECONDS, RECENT_SECONDS, Finding
from gateway.ledger.reads.leases import LeaseFates
from gateway.ledger.reads.sums import Range
from gateway.structs.fleet import ENDED_EARLY

LOOK_SECONDS = 5.0
_AHEAD_MS = 3_600_000
"""How far ahead the clocks of other gateways may be."""
_METRIC = "leases_ended"
# This end is no loss: an operator wanted it.
_WANTED = "dropped"
FatesOf = Callable[[Range], Awaitable[Mapping[str, LeaseFates]]]


@dataclass(slots=True)
class _Losses:
    """Losses of one engine's leases that were found close together, less than RECENT_SECONDS
    apart."""

    # When the first loss was found, in monotonic seconds.
    first: float
    # When the last loss was found, in monotonic seconds.
    last: float
    # The number of leases, by how they ended.
    reasons: Counter[str] = field(default_factory=Counter)


class LeaseEnds:
    """Follows the ledger's sums of ended leases. `fates_of` gives them for a range, by engine."""

    def __init__(self, fates_of: FatesOf, metrics: Metrics, clock: Clock) -> None:
        self._fates_of = fates_of
        self._metrics = metrics
        self._clock = clock
        self._ended: Counter[tuple[str, str]] | None = None
        self._losses: dict[str, _Losses] = {}
        metrics.set("leases_not_known", math.nan)

    async def run(self, stopping: asyncio.Event) -> None:
        """Look until the gateway stops. While the ledger does not answer, the metric is NaN."""
        while not stopping.is_set():
            # The pause before the first look lets discovery add its engines. The leases of an
            # engine outside the fleet would count as lost.
            await pause(stopping, LOOK_SECONDS)
            try:
                await self.look()
            except GatewayError as error:
                self._metrics.set("leases_not_known", math.nan)
                get_logger("leases").warning("lease_ends_not_read", error=str(error))

    async def look(self) -> None:
        """Take in what the ledger has now.

        What ended in the RECENT_SECONDS before the first look counts as recent too: a gateway may
        have started together with the engine that lost its leases. Raise GatewayError where the
        ledger does not answer.
        """
        wall_ms = self._clock.wall_ms()
        before = self._ended
        if before is None:
            long_ago = wall_ms - round(RECENT_SECONDS * 1000)
            before = _ended_of(await self._fates_of(Range(since_ms=0, until_ms=long_ago)))
        fates = await self._fates_of(Range(since_ms=0, until_ms=wall_ms + _AHEAD_MS))
        ended = _ended_of(fates)
        self._count(ended)
        now = self._clock.monotonic()
        self._forget(now)
        for (engine, reason), leases in ended.items():
            grown = leases - before[engine, reason]
            if grown > 0 and reason in ENDED_EARLY and reason != _WANTED:
                losses = self._losses.setdefault(engine, _Losses(now, now))
                losses.last = now
                losses.reasons[reason] += grown
        self._ended = ended
        self._metrics.set("leases_not_known", sum(fate.not_known for fate in fates.values()))

    def _count(self, ended: Counter[tuple[str, str]]) -> None:
        """Add what the ledger's sums have grown by to the counters. A sum gets smaller when old
        rows are deleted or when an engine comes back. A counter never does."""
        before = self._ended or Counter()
        grown = Counter[str]()
        for (engine, reason), leases in ended.items():
            grown[reason] += max(leases - before[engine, reason], 0)
        for reason in ("expired", "released", *ENDED_EARLY):
            self._metrics.count(_METRIC, reason, amount=grown[reason])

    def findings(self, now: float) -> Iterator[Finding]:
        """A finding on each engine whose leases were found lost within RECENT_SECONDS. The finding
        has ended once no further loss was found for LULL_SECONDS."""
        self._forget(now)
        for engine, losses in self._losses.items():
            parts = [
                f"{losses.reasons[reason]:,} {words}"
                for reason, words in ENDED_EARLY.items()
                if losses.reasons[reason]
            ]
            yield Finding(
                "leases_ended_early",
                engine,
                ", ".join(parts),
                engine,
                losses.first,
                ended=None if now - losses.last < LULL_SECONDS else losses.last,
            )

    def _forget(self, now: float) -> None:
        """Forget the engines whose last losses are long ago."""
        self._losses = {
            engine: losses
            for engine, losses in self._losses.items()
            if now - losses.last < RECENT_SECONDS
        }


def _ended_of(fates: Mapping[str, LeaseFates]) -> Counter[tuple[str, str]]:
    """The number of leases that ended, by engine and by how they ended."""
    return Counter(
        {
            (engine, reason): leases
            for engine, fate in fates.items()
            for reason, leases in fate.ended.items()
        }
    )
