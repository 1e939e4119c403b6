"""One simulated engine: the real pool, tiers, entries and leases under a virtual clock.

A time model stands in for the computation. One token of the pool stands for one *unit* of the
traffic, so that long traces take minutes. Prefill is serial, in order of arrival; decodes run
beside it. What is not simulated: the order in which scopes share steps, preemption, files that are
still being written.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.host_tier import HostTier
from engine.cache.lookup import Segment
from engine.cache.pool import BlockPool, NoFreeBlocks
from engine.cache.prefix_cache import CacheQuery, CacheResult, Found, PrefixCache
from engine.cache.store_tier import StoreTier
from engine.cache.table import BlockTable
from engine.protocol import (
    Breakpoint,
    ChainGone,
    ChainHeld,
    Event,
    HeldName,
    LeaseEnded,
    Ttl,
)

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
    scope: str = SCOPE
    ttls: list[Ttl] | None = None
    """Of each of `marks`, where they differ."""
    answer: list[int] = field(default_factory=list)
    """Units that the answer takes while it is written."""

    def tokens_of(self, start: int, end: int) -> int:
        """How many tokens the units from `start` to `end` have; the last one may be short."""
        return min(end * self.unit_tokens, self.tokens) - min(start * self.unit_tokens, self.tokens)

    def names(self) -> list[HeldName]:
        """A prefix's name is its last unit's id, since that stands for all before it too."""
        depths = sorted({*range(NAME_UNITS, len(self.units), NAME_UNITS), *self.ends})
        return [HeldName(f"{self.units[depth - 1]:016x}", depth) for depth in depths if depth]

    def breakpoints(self) -> list[Breakpoint]:
        ttls = self.ttls if self.ttls is not None else [self.ttl] * len(self.marks)
        return [Breakpoint(mark, ttl) for mark, ttl in zip(self.marks, ttls, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of the time model: `prefill`, `host` and `disk` for each token, `decode` a step.

    `host` and `disk` are the ways back to the device. While answers are written, a prompt is
    computed in steps of `step_tokens`, each a decode longer; 0: prompts are not held up.
    """

    prefill: float = PREFILL_SECONDS
    decode: float = DECODE_SECONDS
    host: float = 0.0
    disk: float = 0.0
    step_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Tokens of each tier of one engine, and what bounds leases and running requests."""

    device: int
    host: int = 0
    disk: int = 0
    lease_share: float = 0.5
    scope_lease_share: float = 1.0
    max_running: int | None = None
    ttl_scale: float = 1.0


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
    """`at(time, call)` runs `call(time)` then. `started`, `ended` hear of jobs, `tell` events.

    `leases_ended` counts leases by why they ended.
    """

    def __init__(
        self, capacities: Capacities, unit_tokens: int, at: At, costs: Costs | None = None
    ) -> None:
        self.pool = BlockPool(max(capacities.device // unit_tokens, 2), 1)
        self._hasher = ChainHasher(b"simulation", 1)
        host, store = self._tiers(capacities, unit_tokens)
        self.entries = Entries(
            self.pool,
            lease_share=capacities.lease_share,
            scope_lease_share=capacities.scope_lease_share,
            ttl_scale=capacities.ttl_scale,
            host=host.pool if host is not None else None,
            store=store,
        )
        self._cache = PrefixCache(self.pool, self.entries, self._hasher, host, store)
        self._costs = costs or Costs()
        self._unit_tokens = unit_tokens
        self._max_running = capacities.max_running or math.inf
        self._at = at
        self._queue: deque[SimulatedTurn] = deque()
        self._is_busy = False
        self._num_running = self._num_decoding = 0
        self.started: Callable[[SimulatedTurn, float], None] = lambda job, now: None
        self.ended: Callable[[SimulatedTurn, float], None] = lambda job, now: None
        self.tell: Callable[[list[Event], float], None] = lambda events, now: None
        self.leases_ended: Counter[str] = Counter()
        self.num_refused = 0

    def _tiers(
        self, capacities: Capacities, unit_tokens: int
    ) -> tuple[HostTier | None, StoreTier | None]:
        host = store = None
        above = [self.pool]
        if num_units := capacities.host // unit_tokens:
            # Copies are not bounded: a step of the simulation is a whole prompt.
            host = HostTier(self.pool, num_units, max_copies=num_units)
            above.append(host.pool)
        if num_units := capacities.disk // unit_tokens:
            store = StoreTier(num_units, 1, self._hasher, _name_of, lower_than=above)
        return host, store

    def take(self, request: SimulatedRequest, now: float) -> None:
        self.entries.expire(now)
        tokens = request.units + request.answer if request.answer else request.units
        query = CacheQuery(
            scope=request.scope,
            tokens=tokens,
            digests=self._cache.digests(request.scope, tokens),
            segments=[Segment("text", end, number) for number, end in enumerate(request.ends)],
            breakpoints=request.breakpoints(),
            names=request.names(),
            min_tokens=1,
            arrived_at=now,
        )
        found = self._cache.look_up(query)
        self._queue.append(SimulatedTurn(request, query, now, found, self._cache.new_table(query)))
        self._advance(now)

    def _advance(self, now: float) -> None:
        """Begin the first in the queue, if the engine is idle and there is room."""
        while self._queue and not self._is_busy and self._num_running < self._max_running:
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
            seconds = self._bring_back(job)
            # What is reused is at the front but for holes, which are as long as other units.
            seconds += self._prefill_seconds(job)
            self._at(now + seconds, partial(self._prefilled, job))

    def _bring_back(self, job: SimulatedTurn) -> float:
        """Copy to the device what is in lower tiers. Return the seconds that it takes."""
        if self._cache.host is not None:
            self._cache.host.take_demotions()
        seconds, table, store = 0.0, job.table, self._cache.store
        while table.incoming:
            block = table.next_incoming
            if block.tier == "host":
                assert self._cache.host is not None
                self._cache.host.promote(table)
                seconds += self._unit_tokens * self._costs.host
                continue
            assert store is not None
            if store.is_lost(block):
                self._cache.miss(job.query, job.found, table)
                continue
            store.reads.ask(table.arriving(), is_first=True)
            for key in store.reads.take_asked():
                store.reads.arrived(key.name, b"")
            while table.incoming and store.promote(table) is not None:
                seconds += self._unit_tokens * self._costs.disk
                if table.incoming and table.next_incoming.tier == "host":
                    break
        return seconds

    def _prefill_seconds(self, job: SimulatedTurn) -> float:
        costs = self._costs
        tokens = job.request.tokens_of(
            min(job.found.reused, len(job.request.units)), len(job.request.units)
        )
        seconds = tokens * costs.prefill
        if costs.step_tokens and self._num_decoding:
            seconds += math.ceil(tokens / costs.step_tokens) * costs.decode
        return seconds

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
        self._num_decoding += 1
        seconds = job.request.output_tokens * self._costs.decode
        self._at(now + seconds, partial(self._decoded, job))
        self._advance(now)

    def _decoded(self, job: SimulatedTurn, now: float) -> None:
        job.table.release()
        self._num_running -= 1
        self._num_decoding -= 1
        self.entries.expire(now)
        self.ended(job, now)
        self._publish(None, now)
        self._advance(now)

    def close(self, now: float) -> None:
        """End what is over by now, and count it."""
        self.entries.expire(now)
        self._publish(None, now)

    def _publish(self, job: SimulatedTurn | None, now: float) -> None:
        events: list[Event] = []
        for lease in self.entries.leases.take_ended():
            self.leases_ended[lease.reason] += 1
            key = lease.entry.key.hex()
            events.append(LeaseEnded(seq=0, entry=key, names=lease.names, reason=lease.reason))
        if job is not None and job.written is not None and job.written.held is not None:
            events.append(job.written.held)
        gone = self.pool.take_evicted_names() + self._step_of_tiers(events)
        if gone:
            events.append(ChainGone(seq=0, names=gone, reason="evicted"))
        if events:
            self.tell(events, now)

    def _step_of_tiers(self, events: list[Event]) -> list[str]:
        """Write what the store wants, and tell what has moved. Return the names that are gone."""
        gone: list[str] = []
        host, store = self._cache.host, self._cache.store
        if host is not None:
            host.take_demotions()
            gone += host.pool.take_evicted_names()
            events += (ChainHeld(seq=0, names=m.names, tier=m.tier) for m in host.take_moved())
        if store is not None:
            while saves := store.take_saves(len(store.pool.blocks)):
                for save in saves:
                    store.written(save.key.name, is_good=True)
            store.take_deletes()
            store.take_notes()
            gone += store.pool.take_evicted_names()
            events += (ChainHeld(seq=0, names=m.names, tier=m.tier) for m in store.take_moved())
        return gone


def _name_of(digest: bytes) -> str:
    return digest.hex()
