"""Why a turn missed: how its prompt differs from an earlier turn's, and who held its prefix.

The client names the earlier turn. Fingerprints of recent turns are in memory; others are fetched
from the ledger while the engine works, and the response does not wait for them ("unfinished").
Turns of another workspace, or whose client did not ask for diagnostics, are not found.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.protocol import TTLS, Name, Started
from gateway.base.background import Background
from gateway.base.errors import Overloaded
from gateway.prompt.ask import Ask
from gateway.prompt.fingerprint import Divergence, Fingerprint, compare, pack, unpack

MAX_TURNS = 10_000
MAX_NAMES_KNOWN = 100_000
# A turn reaches the ledger a moment after its close, so a missing one is looked up once more.
_SETTLE_SECONDS = 1.0
_MAX_FETCHES = 32
_TURN_ID = re.compile(r"msg_[0-9a-f]{28}")

Explanation = Literal["engine_restart", "routed_elsewhere", "ttl_expired"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result. If `found` is "compared", `divergence` None means that there is none."""

    found: Literal["compared", "not_found", "unfinished"]
    divergence: Divergence | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The earlier turn's fingerprint, or the task that fetches it."""

    earlier: asyncio.Task[bytes | None] | bytes | None

    def diagnosis(self, later: Fingerprint) -> Diagnosis:
        """The diagnosis at this moment. It never waits."""
        earlier = self.earlier
        if isinstance(earlier, asyncio.Task):
            if not earlier.done() or earlier.cancelled() or earlier.exception() is not None:
                return Diagnosis("unfinished")
            earlier = earlier.result()
        if earlier is None or not (fingerprint := unpack(earlier)).is_shared:
            return Diagnosis("not_found")
        return Diagnosis("compared", compare(fingerprint, later))


@dataclass(slots=True)
class PromptComparer:
    """`find` fetches a packed fingerprint from the ledger, by turn id and workspace."""

    find: Callable[[str, str], Awaitable[bytes | None]]
    background: Background
    recent: OrderedDict[str, tuple[str, bytes]] = field(default_factory=OrderedDict)
    num_fetches: int = 0

    def begin(self, ask: Ask) -> Comparison | None:
        """Start a comparison. None if the client asked for none, or if this is a first turn."""
        turn_id = ask.comparison.previous
        if not ask.comparison.is_wanted or turn_id is None:
            return None
        if _TURN_ID.fullmatch(turn_id) is None:
            return Comparison(None)
        workspace = ask.principal.workspace
        owner, packed = self.recent.get(turn_id, (None, None))
        if packed is not None and owner == workspace:
            return Comparison(packed)

        async def fetch() -> bytes | None:
            if self.num_fetches >= _MAX_FETCHES:
                raise Overloaded
            self.num_fetches += 1
            try:
                found = await self.find(turn_id, workspace)
                if found is None:
                    await asyncio.sleep(_SETTLE_SECONDS)
                    found = await self.find(turn_id, workspace)
                if found is not None:
                    self._keep(turn_id, workspace, found)
                return found
            finally:
                self.num_fetches -= 1

        # A turn of another workspace takes as long as an unknown one.
        return Comparison(self.background.spawn(fetch(), "fetch fingerprint"))

    def remember(self, workspace: str, turn_id: str, fingerprint: Fingerprint) -> bytes:
        """Remember a turn whose response begins. Return the fingerprint to store."""
        packed = pack(fingerprint)
        self._keep(turn_id, workspace, packed)
        return packed

    def _keep(self, turn_id: str, workspace: str, packed: bytes) -> None:
        self.recent[turn_id] = workspace, packed
        while len(self.recent) > MAX_TURNS:
            self.recent.popitem(last=False)


class _Holder(NamedTuple):
    """An entry on `engine` in one epoch, and its end on the monotonic clock."""

    engine: str
    epoch: str
    until: float


@dataclass(frozen=True, slots=True)
class LastHolders:
    """Which engines were last known to hold prefixes, by this gateway's own responses, until an
    entry's TTL is over: why a turn missed. Routing does not use it. `epoch_of` gives an engine's
    epoch by its name, None if unknown."""

    epoch_of: Callable[[str], str | None]
    max_names: int = MAX_NAMES_KNOWN
    holders: OrderedDict[str, _Holder] = field(default_factory=OrderedDict)

    def learn(self, engine: str, started: Started, names: Iterable[Name], now: float) -> None:
        """Remember the entries of a response."""
        digests = {name.segment: name.digest for name in names if name.characters is None}
        for report in started.breakpoints:
            digest = digests.get(report.segment)
            if digest is None or report.state == "none":
                continue
            # An entry without a lease has no promised end. By this time it has expired in any case.
            seconds = report.expires_in_seconds or TTLS[report.ttl or "5m"].seconds
            self.holders[digest] = _Holder(engine, started.epoch, now + seconds)
            self.holders.move_to_end(digest)
        while len(self.holders) > self.max_names:
            self.holders.popitem(last=False)

    def explain(
        self, engine: str, epoch: str, digests: Iterable[str], now: float
    ) -> Explanation | None:
        """Why `engine`, in this epoch, may not hold these prefixes. They are given deepest first.
        None if this gateway has no better reason than the engine."""
        for digest in digests:
            holder = self.holders.get(digest)
            if holder is None:
                continue
            current = epoch if holder.engine == engine else self.epoch_of(holder.engine)
            if holder.engine == engine and holder.epoch == current:
                return None
            if holder.until <= now:
                return "ttl_expired"
            if current is not None and holder.epoch != current:
                return "engine_restart"
            return "routed_elsewhere"
        return None
