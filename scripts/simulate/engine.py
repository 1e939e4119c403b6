"""One simulated engine: the real pool, entries and leases under a virtual clock, and a time model.

One token of the pool stands for one *unit* of the trace (its hash block), so that long traces take
minutes. Prefill is serial, in order of arrival; decodes run beside it and only take time. The KV of
answers is not kept, as in the published simulations of these traces. What is not simulated: chunked
prefill, preemption, the host tier.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.lookup import Segment
from engine.cache.pool import BlockPool, NoFreeBlocks
from engine.cache.prefix_cache import CacheQuery, CacheResult, Found, PrefixCache
from engine.cache.table import BlockTable
from engine.protocol import Breakpoint, ChainGone, Event, HeldName, LeaseEnded, Ttl

SCOPE = "simulated"
PREFILL_SECONDS, DECODE_SECONDS = 50e-6, 20e-3
"""For each token."""
NAME_UNITS = 4
"""A name at every so many units, besides segment ends: of the traces, every 8,192 characters."""


@dataclass(slots=True)
class SimulatedRequest:
    """`units` are ids of consecutive pieces of the prompt: equal ids, equal content and history.

    `ends` are the segment ends in units; the last is the prompt's. `marks` index `ends`. A request
    that `is_marked` is promised its reuse, even where its marks are left out to see what LRU does.
    """

    at: float
    kind: str
    units: list[int]
    unit_tokens: int
    tokens: int
    output_tokens: int
    ends: list[int]
    marks: list[int] = field(default_factory=list)
    ttl: Ttl = "5m"
    is_marked: bool = False
    next: "SimulatedRequest | None" = None

    def tokens_of(self, start: int, end: int) -> int:
        """How many tokens the units from `start` to `end` have; the last one may be short."""
        return min(end * self.unit_tokens, self.tokens) - min(start * self.unit_tokens, self.tokens)

    def names(self) -> list[HeldName]:
        """A prefix's name is its last unit's id, since that stands for all before it too."""
        depths = sorted({*range(NAME_UNITS, len(self.units), NAME_UNITS), *self.ends})
        return [HeldName(f"{self.units[depth - 1]:016x}", depth) for depth in depths if depth]


@dataclass(slots=True)
class SimulatedTurn:
    request: SimulatedRequest
    query: CacheQuery
    arrived_at: float
    found: Found
    table: BlockTable
    written: CacheResult | None = None


At = Callable[[float, Callable[[float], None]], None]


class SimulatedEngine:
    """`at(time, call)` runs `call(time)` then. `started`, `ended` hear of jobs, `tell` events."""

    def __init__(
        self,
        capacity_tokens: int,
        unit_tokens: int,
        at: At,
        *,
        lease_share: float,
    ) -> None:
        self.pool = BlockPool(max(capacity_tokens // unit_tokens, 2), 1)
        self.entries = Entries(self.pool, lease_share=lease_share, scope_lease_share=1.0)
        self._hasher = ChainHasher(b"simulation", 1)
        self._cache = PrefixCache(self.pool, self.entries, self._hasher)
        self._at = at
        self._queue: deque[SimulatedTurn] = deque()
        self._is_busy = False
        self._num_running = 0
        self.started: Callable[[SimulatedTurn, float], None] = lambda job, now: None
        self.ended: Callable[[SimulatedTurn, float], None] = lambda job, now: None
        self.tell: Callable[[list[Event], float], None] = lambda events, now: None
        self.num_refused = 0

    def take(self, request: SimulatedRequest, now: float) -> None:
        self.entries.expire(now)
        digests = self._cache.digests(SCOPE, request.units)
        query = CacheQuery(
            scope=SCOPE,
            tokens=request.units,
            digests=digests,
            segments=[Segment("text", end, number) for number, end in enumerate(request.ends)],
            breakpoints=[Breakpoint(mark, request.ttl) for mark in request.marks],
            names=request.names(),
            min_tokens=1,
            arrived_at=now,
        )
        found = self._cache.look_up(query)
        self._queue.append(SimulatedTurn(request, query, now, found, self._cache.new_table(query)))
        self._advance(now)

    def _advance(self, now: float) -> None:
        """Begin the first in the queue, if the engine is idle and there is room."""
        while self._queue and not self._is_busy:
            job = self._queue[0]
            try:
                self._cache.begin(job.query, job.found, job.table)
            except NoFreeBlocks:
                if self._num_running:
                    return
                if not self._make_room(job):
                    self._refuse(job, now)
                continue
            self._queue.popleft()
            self._is_busy = True
            self._num_running += 1
            # What is reused is at the front but for holes, which are as long as other units.
            tokens = job.request.tokens_of(job.found.reused, len(job.request.units))
            seconds = tokens * PREFILL_SECONDS
            self._at(now + seconds, partial(self._prefilled, job))

    def _make_room(self, besides: SimulatedTurn) -> bool:
        """As the engine's scheduler: what waiting requests hold goes first, then leases."""
        for job in reversed(self._queue):
            if job is not besides and job.found.held:
                self._cache.give_up(job.found)
                return True
        return self.entries.sacrifice()

    def _refuse(self, job: SimulatedTurn, now: float) -> None:
        self._queue.popleft()
        self._cache.let_go(job.found)
        self._cache.take_back(job.found)
        self.num_refused += 1
        self.ended(job, now)

    def _prefilled(self, job: SimulatedTurn, now: float) -> None:
        for start, end in list(job.table.gaps(len(job.query.tokens))):
            job.table.commit(job.query.tokens[start:end])
        job.written = self._cache.write(job.query, job.found, job.table, now)
        self._is_busy = False
        self.started(job, now)
        self._publish(job, now)
        seconds = job.request.output_tokens * DECODE_SECONDS
        self._at(now + seconds, partial(self._decoded, job))
        self._advance(now)

    def _decoded(self, job: SimulatedTurn, now: float) -> None:
        job.table.release()
        self._num_running -= 1
        self.entries.expire(now)
        self.ended(job, now)
        self._publish(None, now)
        self._advance(now)

    def _publish(self, job: SimulatedTurn | None, now: float) -> None:
        events: list[Event] = []
        for lease in self.entries.leases.take_ended():
            key = lease.entry.key.hex()
            events.append(LeaseEnded(seq=0, entry=key, names=lease.names, reason=lease.reason))
        if job is not None and job.written is not None and job.written.held is not None:
            events.append(job.written.held)
        if gone := self.pool.take_evicted_names():
            events.append(ChainGone(seq=0, names=gone, reason="evicted"))
        if events:
            self.tell(events, now)
