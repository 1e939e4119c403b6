"""One simulated engine: the engine's own loop, scheduler and memory, under a virtual clock.

A time model replaces the computation, and a *unit* of the traffic replaces a token. With units of
one token the simulation is exact. Larger units are for long traces: an answer takes part in a step
only when it has a further whole unit. The steps in between are counted and not simulated.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from engine import protocol
from engine.cache.digests import TOKEN_BYTES, ChainHasher, ChainKind
from engine.cache.entries import ARRIVAL_GRACE_SECONDS, Entries
from engine.cache.host_tier import HostTier
from engine.cache.ids import BlockId, Digest, TokenId
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.cache.store_tier import Payload, StoreTier
from engine.cache.table import BlockCopy
from engine.clock import ManualClock
from engine.schedule.accounting import Accounting
from engine.schedule.loop import EngineLoop
from engine.schedule.request import PrefillChunk, RequestState, SequenceState
from engine.schedule.runner import SampleParams, Work
from engine.schedule.scheduler import Scheduler
from engine.schedule.speculation import Speculation
from engine.schedule.token_masks import TokenMaskPool
from gateway.base.rounding import ceil_div
from gateway.planner.requests import ANSWERS, TAILS, PlannedRequest

STEP_TOKENS = 2048
"""The most tokens of a step: the default of engines on a GPU."""
SPARE_BLOCKS = 2
"""A prompt must leave this many blocks of the pool free. Engines refuse longer prompts."""
_UNBOUNDED = 2**31
_GREEDY = SampleParams(temperature=0.0, top_p=1.0, top_k=0, seed=0)
_PROMPT = protocol.Prompt(messages=[])
_ROUNDED = 1e-6
"""A tolerance in decode steps, within which sums of floats count as equal."""
At = Callable[[float, Callable[[float], None]], None]
"""`at(time, call)` runs `call(time)` at this virtual time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The time model. All but `step_tokens` are seconds."""

    # The time to compute one token of a prompt.
    prefill: float = 50e-6
    # The time to compute one token of all running answers. A step with answers takes it once.
    decode: float = 20e-3
    # The time to bring one token back to the device from the host.
    host: float = 0.0
    # The time to bring one token back to the device from disk.
    disk: float = 0.0
    # The most tokens of prompts that a step computes.
    step_tokens: int = STEP_TOKENS
    # The time of a first token before and after the engine's work.
    overhead: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """The bounds of one engine. `device`, `host` and `disk` are the tokens of the tiers."""

    device: int
    host: int = 0
    disk: int = 0
    # The part of the device that leases may hold.
    lease_share: float = 0.5
    # The most requests that are computed together.
    max_running: int = _UNBOUNDED
    # The units of a block.
    block_units: int = 1
    # The tokens of the shortest prefix that is cached.
    min_cache_tokens: int = 1


class UnitHasher(ChainHasher):
    """A prefix's digest is its last unit's id. Equal ids have equal content and history."""

    def root(self, scope: str) -> Digest:
        return Digest(scope.encode())

    def extend(
        self,
        parent: Digest,
        packed: bytes | bytearray | memoryview,
        place: int = 0,
        kind: ChainKind | None = None,
    ) -> Digest:
        return Digest(bytes(packed[-TOKEN_BYTES:]))

    def chain(self, root: Digest, packed: bytes, kind: ChainKind | None = None) -> list[Digest]:
        stride = self._stride
        ends = range(stride, len(packed) + 1, stride)
        return [Digest(packed[end - TOKEN_BYTES : end]) for end in ends]


class Decoding:
    """The decode steps that an engine has made, and the answers that it writes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.num_made = 0.0
        self.answers: set[Answer] = set()

    def seconds_to_next(self) -> float | None:
        """Seconds until the first answer has its next whole unit. None if no answer waits for
        one."""
        dues = [answer.due for answer in self.answers if not answer.is_ready]
        if not dues:
            return None
        return math.ceil(min(dues) - self.num_made - _ROUNDED) * self.seconds


class Answer:
    """Writes an answer of `num_units` in `num_steps` decode steps. The prompt's last step gives the
    first unit.

    It is its own constraint: it takes the next unit once the decode steps of that unit are made.
    """

    def __init__(self, decoding: Decoding, num_units: int, num_steps: int) -> None:
        self.finish: protocol.FinishReason | None = None
        self.stop_sequence: str | None = None
        self.thinking_tokens = 0
        self.end_token_ids: frozenset[TokenId] = frozenset()
        self.allowed: bytes | None = None
        self.due = 0.0
        self._decoding = decoding
        self._steps_a_unit = num_steps / max(num_units - 1, 1)
        self.is_failed = False
        self.ahead: Sequence[bytes] = ()

    @property
    def constraint(self) -> "Answer | None":
        return self if self._steps_a_unit > 1 and self._decoding.seconds else None

    @property
    def is_ready(self) -> bool:
        return self.due <= self._decoding.num_made + _ROUNDED

    def feed(self, token_id: TokenId) -> Sequence[protocol.TextDelta]:
        self._decoding.answers.add(self)
        self.due = self._decoding.num_made + self._steps_a_unit
        return ()

    def close(self) -> Sequence[protocol.TextDelta]:
        self._decoding.answers.discard(self)
        return ()

    def foresee(self, draft: Sequence[TokenId]) -> None:
        """Do nothing: no token is proposed."""

    def compute(self) -> None:
        """Do nothing: time alone makes it ready."""


class _NoThreads(TokenMaskPool):
    def begin(self, sequences: object) -> None:
        """Do nothing: no mask is computed."""


class Ahead(Speculation):
    """Makes many decode steps as one, if nothing else would happen between them.

    Each token still takes the time of a step.
    """

    def __init__(self, clock: ManualClock, step_seconds: float) -> None:
        self._clock = clock
        self._seconds = step_seconds
        # The earliest time at which the next request may arrive.
        self.next_arrival: Callable[[], float] = lambda: 0.0
        # The time at which the next entry expires; None without an entry.
        self.next_expiry: Callable[[], float | None] = lambda: None
        # The requests that the scheduler has not begun.
        self.waiting: Sized = ()

    def propose(self, sequences: Iterable[SequenceState]) -> None:
        """Do nothing: `extended` needs all chunks of a step."""

    def extended(
        self, chunks: Sequence[PrefillChunk], pool: BlockPool, copies: list[BlockCopy]
    ) -> list[PrefillChunk]:
        num_steps = self._num_steps(chunks, pool)
        if num_steps < 2:
            return list(chunks)
        draft = [0] * (num_steps - 1)  # the runner draws others
        for chunk in chunks:
            copies += chunk.sequence.table.prepare(num_steps)
        return [replace(chunk, draft=draft) for chunk in chunks]

    def _num_steps(self, chunks: Sequence[PrefillChunk], pool: BlockPool) -> int:
        """How many steps in a row have nothing but decodes."""
        if not chunks or not self._seconds:
            return 1
        num_steps = self._steps_until(self.next_arrival())
        for chunk in chunks:
            request = chunk.sequence.request
            if chunk.count > 1 or request.started_at is None:
                return 1
            output_tokens = request.request.sampling.max_tokens or 0
            num_steps = min(num_steps, output_tokens - chunk.sequence.num_output)
        needed = sum(chunk.sequence.table.blocks_needed(num_steps) for chunk in chunks)
        if num_steps < 2 or needed > pool.num_reclaimable:
            return 1
        due = self.next_expiry()
        if due is not None and (needed > pool.num_empty or self.waiting):
            # An expiry changes what is reused next, and may make room for a request that waits.
            num_steps = min(num_steps, self._steps_until(due))
        return num_steps

    def _steps_until(self, time: float) -> int:
        return math.ceil(min((time - self._clock.now()) / self._seconds, _UNBOUNDED))


class TimedRunner:
    """Takes the time of each computation without computing."""

    def __init__(
        self, costs: Costs, unit: int, block_tokens: int, clock: ManualClock, decoding: Decoding
    ) -> None:
        self._costs = costs
        self._unit = unit
        self._block_tokens = block_tokens
        self._clock = clock
        self._decoding = decoding
        self._ids = count(ANSWERS)
        # Whether any time was taken in the engine's current step. The engine sets it to False.
        self.has_worked = False

    def execute(self, works: Sequence[Work]) -> list[TokenId | None]:
        costs = self._costs
        decoding = self._decoding
        tokens = 0
        num_steps = 0
        for work in works:
            ids = work.token_ids
            has_tail = TAILS <= ids[-1] < ANSWERS
            # An engine takes a chunk of one token for a decode.
            is_decode = len(ids) == 1 + len(work.draft) and not has_tail
            if is_decode and (self._unit == 1 or ids[0] >= ANSWERS):
                num_steps = len(ids)
                work.behind.extend(next(self._ids) for _ in work.draft)
            else:
                tokens += (len(ids) - has_tail) * self._unit
        if self._unit > 1:
            # Running answers took part in these steps. Steps of answers alone are counted while
            # time goes on.
            num_steps = math.ceil(tokens / costs.step_tokens) if decoding.answers else 0
        decoding.num_made += num_steps
        self._take(tokens * costs.prefill + num_steps * costs.decode)
        return [None if work.sample is None else next(self._ids) for work in works]

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Do nothing: copies on the device take no time."""

    def clear_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Do nothing: clearing takes no time."""

    def clear_from(self, places: Sequence[tuple[BlockId, int]]) -> None:
        """Do nothing: clearing takes no time."""

    clear_host = clear_from

    def demote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Do nothing: copies to the host run beside the steps and take none of their time."""

    def promote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        if pairs:
            self._take(len(pairs) * self._block_tokens * self._costs.host)

    def save(self, blocks: Sequence[BlockId]) -> list[Payload]:
        return [b"" for _ in blocks]

    def load(self, loads: Sequence[tuple[Payload, BlockId]]) -> None:
        self._take(len(loads) * self._block_tokens * self._costs.disk)

    def _take(self, seconds: float) -> None:
        self.has_worked = True
        self._clock.advance(seconds)


class QuickStore:
    """The store's work around a step. Each write and each read ends at once."""

    max_loads = _UNBOUNDED
    is_reading = False

    def __init__(self, store: StoreTier, runner: TimedRunner) -> None:
        self._store = store
        self._runner = runner

    def before_step(self, now: float) -> None:
        """Do nothing: the work was done after the step before."""

    def after_step(self, now: float) -> None:
        store = self._store
        while saves := store.take_saves(len(store.pool.blocks)):
            for save in saves:
                store.written(save.key.name, is_good=True)
        store.take_deletes()
        store.take_notes()
        for key in store.take_asked():
            store.arrived(key.name, b"")
            self._runner.has_worked = True

    def seconds_to_next(self, now: float) -> float:
        return math.inf


class SimulatedEngine:
    """One engine under virtual time. With `has_names` requests name their prefixes, so that a
    gateway can tell where a prefix is held."""

    def __init__(
        self, capacities: Capacities, unit: int, at: At, costs: Costs, *, has_names: bool
    ) -> None:
        block_tokens = unit * capacities.block_units
        self._unit = unit
        self._at = at
        self._has_names = has_names
        self._clock = ManualClock()
        self._decoding = Decoding(costs.decode)
        self._runner = TimedRunner(costs, unit, block_tokens, self._clock, self._decoding)
        self._cache = _new_cache(capacities, block_tokens)
        self._min_units = max(ceil_div(capacities.min_cache_tokens, unit), 1)
        step_units = max(costs.step_tokens // unit, 1)
        self.ahead = Ahead(self._clock, costs.decode)
        self.scheduler = Scheduler(
            self._cache,
            max_step_tokens=step_units,
            max_running=capacities.max_running,
            speculation=self.ahead if unit == 1 else None,
        )
        self.ahead.next_expiry = self._cache.entries.next_expiry
        self.ahead.waiting = self.scheduler.waiting
        self._accounting = Accounting(
            self._cache,
            self._clock,
            self._take_events,
            epoch="simulated",
            max_context_tokens=_UNBOUNDED,
        )
        store = self._cache.store
        self._loop = EngineLoop(
            self.scheduler,
            self._accounting,
            self._runner,
            max_waiting=_UNBOUNDED,
            token_masks=_NoThreads(),
            store=QuickStore(store, self._runner) if store is not None else None,
        )
        self._inbox: deque[PlannedRequest] = deque()
        # The next step's number. A call for an earlier number is out of date.
        self._number = 0
        self._is_busy = False
        self._frames: list[tuple[PlannedRequest, protocol.Started | None]] = []
        self._events: list[protocol.Event] = []
        # Called at a request's first token.
        self.started: Callable[[PlannedRequest, protocol.Started, float], None] = lambda *_: None
        # Called at a request's end.
        self.ended: Callable[[PlannedRequest, float], None] = lambda *_: None
        # Called with the engine's events.
        self.tell: Callable[[list[protocol.Event], float], None] | None = None
        # How many leases ended, by the reason.
        self.leases_ended: Counter[str] = Counter()
        self.num_refused = 0

    def take(self, request: PlannedRequest, now: float) -> None:
        """Take a request that arrives. It is submitted between two steps."""
        self._inbox.append(request)
        if self._is_busy:
            return
        self._is_busy = True
        step = self._decoding.seconds
        if self._decoding.answers and step and self._unit > 1:
            # The decode step in progress goes on to its end.
            began = self._clock.now()
            now = began + math.ceil((now - began) / step - _ROUNDED) * step
        self._wake_at(now)

    def close(self, now: float) -> None:
        """End the leases that expire by `now`, and count them."""
        self._go_on_to(now)
        self._accounting.expire(now)
        self._accounting.publish()

    def _wake_at(self, time: float) -> None:
        self._number += 1
        self._at(time, partial(self._step, self._number))

    def _go_on_to(self, now: float) -> None:
        seconds = max(now - self._clock.now(), 0.0)
        self._clock.advance(seconds)
        if self._unit > 1 and self._decoding.answers and self._decoding.seconds:
            self._decoding.num_made += seconds / self._decoding.seconds

    def _step(self, number: int, now: float) -> None:
        if number != self._number:
            return
        self._go_on_to(now)
        while self._inbox:
            self._submit(self._inbox.popleft())
        self._runner.has_worked = False
        if self.scheduler.waiting or any(
            sequence.can_sample for sequence in self.scheduler.running
        ):
            self._loop.step()
        end = self._clock.now()
        if self._frames or self._events:
            self._at(end, partial(self._deliver, self._frames, self._events))
            self._frames = []
            self._events = []
        seconds = self._decoding.seconds_to_next()
        self._is_busy = self._runner.has_worked
        if self._is_busy:
            self._wake_at(end)
        elif seconds is not None:
            self._wake_at(end + seconds)

    def _submit(self, request: PlannedRequest) -> None:
        units = request.units
        pool = self._cache.pool
        if len(units) > max(pool.num_blocks - SPARE_BLOCKS, 1) * pool.block_size:
            self.num_refused += 1
            self._frames.append((request, None))
            return
        num_units = ceil_div(request.output_tokens, self._unit)
        num_steps = max(request.output_tokens - 1, 0)
        if num_steps and num_units == 1:
            num_units = 2  # the second unit takes the decode steps
        query = CacheQuery(
            scope=request.scope,
            tokens=units,
            digests=self._cache.digests(request.scope, units),
            segments=request.segments,
            breakpoints=request.breakpoints,
            names=request.names if self._has_names else [],
            min_cache_tokens=self._min_units,
            arrived_at=request.at,
        )
        state = RequestState(
            request=protocol.GenerateRequest(
                request_id=str(id(request)),
                scope=request.scope,
                prompt=_PROMPT,
                sampling=protocol.Sampling(max_tokens=num_units),
            ),
            query=query,
            parsers=[Answer(self._decoding, num_units, num_steps)],
            emit=partial(self._hear, request),
            submitted_at=request.at,
        )
        self._loop.submit(state, [_GREEDY])

    def _hear(self, request: PlannedRequest, frame: protocol.Frame) -> None:
        if isinstance(frame, protocol.Started):
            self._frames.append((request, frame))
        elif isinstance(frame, protocol.Done | protocol.Failed):
            self.num_refused += isinstance(frame, protocol.Failed)
            self._frames.append((request, None))

    def _take_events(self, events: list[protocol.Event]) -> None:
        self.leases_ended.update(
            event.reason for event in events if isinstance(event, protocol.LeaseEnded)
        )
        if self.tell is not None:
            self._events += events

    def _deliver(
        self,
        frames: Sequence[tuple[PlannedRequest, protocol.Started | None]],
        events: list[protocol.Event],
        now: float,
    ) -> None:
        if events and self.tell is not None:
            self.tell(events, now)
        for request, started in frames:
            if started is not None:
                self.started(request, started, now)
                continue
            self._accounting.totals.acknowledge([str(id(request))])
            self.ended(request, now)


def _new_cache(capacities: Capacities, block_tokens: int) -> PrefixCache:
    size = capacities.block_units
    pool = BlockPool(max(capacities.device // block_tokens, 2), size)
    hasher = UnitHasher(b"simulation", size)
    host = None
    store = None
    pools_above = [pool]
    num_host_blocks = capacities.host // block_tokens
    if num_host_blocks:
        # A step of the simulation may copy a whole prompt, so copies have no bound.
        host = HostTier(pool, num_host_blocks, max_copies=num_host_blocks)
        pools_above.append(host.pool)
    num_disk_blocks = capacities.disk // block_tokens
    if num_disk_blocks:
        store = StoreTier(num_disk_blocks, size, hasher, bytes.hex, lower_than=pools_above)
    entries = Entries(
        pool,
        lease_share=capacities.lease_share,
        grace_seconds=ARRIVAL_GRACE_SECONDS,
        host=host.pool if host is not None else None,
        store=store,
    )
    return PrefixCache(pool, entries, hasher, host, store)
