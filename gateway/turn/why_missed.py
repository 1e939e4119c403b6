"""Why a turn missed: which engine was last known to hold its prefix.

The source is this gateway's own responses, at breakpoints, until an entry's TTL is over. Entries
that other gateways placed are unknown. The number of names is bounded, and the oldest are
forgotten. This module only explains misses; routing does not use it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from engine.protocol import TTLS, Name, Started

MAX_NAMES_KNOWN = 100_000

Explanation = Literal["engine_restart", "routed_elsewhere", "ttl_expired"]
EpochOf = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class LastHolder:
    """An entry on `engine` in one epoch, and its end on the monotonic clock."""

    engine: str
    epoch: str
    until: float


class LastHolders:
    """The last known holders of prefixes.

    `epoch_of` gives an engine's epoch by its name, None if unknown.
    """

    def __init__(self, epoch_of: EpochOf, max_names: int = MAX_NAMES_KNOWN) -> None:
        self._epoch_of = epoch_of
        self._max_names = max_names
        self._holders: OrderedDict[str, LastHolder] = OrderedDict()

    def learn(self, engine: str, started: Started, names: Iterable[Name], now: float) -> None:
        """Remember the entries of a response."""
        digests = {name.segment: name.digest for name in names if name.characters is None}
        for report in started.breakpoints:
            digest = digests.get(report.segment)
            if digest is None or report.state == "none":
                continue
            # An entry without a lease has no promised end. By this time it has expired in any case.
            seconds = report.expires_in_seconds or TTLS[report.ttl or "5m"].seconds
            self._holders[digest] = LastHolder(engine, started.epoch, now + seconds)
            self._holders.move_to_end(digest)
        while len(self._holders) > self._max_names:
            self._holders.popitem(last=False)

    def explain(
        self, engine: str, epoch: str, digests: Iterable[str], now: float
    ) -> Explanation | None:
        """Why `engine`, in this epoch, may not hold these prefixes. They are given deepest first.

        None if this gateway has no better reason than the engine.
        """
        for digest in digests:
            holder = self._holders.get(digest)
            if holder is None:
                continue
            current = epoch if holder.engine == engine else self._epoch_of(holder.engine)
            if holder.engine == engine and holder.epoch == current:
                return None
            if holder.until <= now:
                return "ttl_expired"
            if current is not None and holder.epoch != current:
                return "engine_restart"
            return "routed_elsewhere"
        return None
