"""The engine's loop: one thread that owns the cache, the scheduler and the runner.

`step` is one pass of the engine. The rest brings requests in and frames out. Other threads use
`call` alone, which runs a function between two steps.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from engine.cache.ids import Digest, TokenId
from engine.cache.pool import BlockPool, PurgedBlocks
from engine.errors import Overloaded
from engine.schedule.accounting import Accounting
from engine.schedule.request import PrefillChunk, RequestState, SequenceState
from engine.schedule.runner import Runner, SampleParams, Work
from engine.schedule.scheduler import Scheduler
from engine.schedule.token_masks import SampledTokens, TokenMaskPool

T = TypeVar("T")


class StoreWork(Protocol):
    """What the store does on the engine's thread, around each step. It must not block."""

    @property
    def max_loads(self) -> int:
        """Blocks that one step may load."""
        ...

    @property
    def is_reading(self) -> bool: ...
    def before_step(self, now: float) -> None: ...
    def after_step(self, now: float) -> None: ...
    def seconds_to_next(self, now: float) -> float:
        """Seconds until a step has something to do for the store, if nothing else has."""
        ...


MAX_IDLE_SECONDS = 1.0


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        accounting: Accounting,
        runner: Runner,
        *,
        max_waiting: int,
        token_masks: TokenMaskPool | None = None,
        store: StoreWork | None = None,
        model_seconds: Callable[[Sequence[Work]], float] | None = None,
    ) -> None:
        """`model_seconds` gives a step's time by a time model that stands in for the computation.

        None: the clock gives the step's time.
        """
        self.scheduler = scheduler
        self.accounting = accounting
        self._runner = runner
        self._clock = accounting.clock
        self._max_waiting = max_waiting
        self._token_masks = token_masks or TokenMaskPool()
        self._store = store
        self._model_seconds = model_seconds
        self._num_arrived = 0
        self._is_idle = False
        self._sampled = SampledTokens(accounting.clock, accounting.token)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def step(self) -> None:
        """One pass: expire, choose, compute, deliver."""
        now = self._clock.now()
        self._expire(now)
        chunks = self._choose(now)
        begun = self._clock.now()
        works = [chunk.sequence.work(chunk) for chunk in chunks]
        tokens = self._runner.execute(works) if works else []
        self.scheduler.computed(chunks, self._clock.now() - begun)
        needy = self.scheduler.next_to_prepare()
        if needy is not None:
            self.scheduler.prepare(needy)
        self._deliver(chunks, works, tokens)
        self._is_idle = not (chunks or self._num_arrived or needy)
        self.accounting.publish()
        self._learn(chunks, works, self._clock.now() - now)

    def _expire(self, now: float) -> None:
        """End entries whose time is over, and choices whose next tokens are too costly."""
        if self._store is not None:
            self._store.before_step(now)
        self.accounting.expire(now)
        for sequence in self._token_masks.settle(is_brief=self.scheduler.is_shared):
            if self.scheduler.has(sequence):
                self._let_go(sequence.ending)
                self.accounting.failed(
                    sequence, "what may come next takes too long to find out", "too_costly"
                )

    def _choose(self, now: float) -> list[PrefillChunk]:
        """Choose what this step computes, and copy what must be in memory before."""
        chunks = self.scheduler.schedule(now)
        self._copy()
        # Copy what arrives from the tiers below, as much of it as a step may.
        self._copy_arrivals()
        # A sequence that must be looked up again has no blocks any more.
        return [chunk for chunk in chunks if chunk.sequence in self.scheduler.running]

    def _copy(self) -> None:
        """Make the copies that were decided on, in the order in which they may be made."""
        demotions, to_clear, copies = self.scheduler.take_copies()
        self._runner.demote(demotions)
        if to_clear:
            self._runner.clear_blocks(to_clear)
        self._runner.copy_blocks(copies)

    def _copy_arrivals(self) -> None:
        max_loads = self._store.max_loads if self._store is not None else 0
        arrivals = self.scheduler.take_arrivals(max_loads)
        self._runner.promote(arrivals.promotions)
        if arrivals.loads:
            self._runner.load(arrivals.loads)
        if arrivals.promotions or arrivals.loads:
            for sequence in self.scheduler.running:
                request = sequence.request
                if request.started_at is not None:
                    continue
                if not any(table.incoming for table in sequence.tables):
                    request.brought_at = request.brought_at or self._clock.now()
        self._num_arrived = len(arrivals.promotions) + len(arrivals.loads) + arrivals.num_missed

    def _deliver(
        self,
        chunks: Sequence[PrefillChunk],
        works: Sequence[Work],
        tokens: Sequence[TokenId | None],
    ) -> None:
        """Account for what was computed, deliver the tokens, and end the choices that are done."""
        for chunk, work, token in zip(chunks, works, tokens, strict=True):
            self._advance(chunk, work, token)
        is_shared = self.scheduler.is_shared
        stepped = [chunk.sequence for chunk in chunks]
        taken = self._sampled.take_late(self._token_masks.is_busy, is_shared=is_shared)
        self._token_masks.begin([*taken, *stepped])
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.propose(stepped)
        finished = [running for running in self.scheduler.running if running.finish is not None]
        for sequence in finished:
            self._let_go(sequence.ending)
            self.accounting.ended(sequence)
        if self._store is not None:
            self._store.after_step(self._clock.now())

    def _learn(
        self, chunks: Sequence[PrefillChunk], works: Sequence[Work], clock_seconds: float
    ) -> None:
        """Learn from the time of a whole step that computed these chunks.

        With a time model this is the model's time. The clock's time also has the delay of the sleep
        on a busy machine, which is no part of the model. A manual clock gives no time.
        """
        seconds = clock_seconds
        if self._model_seconds is not None:
            seconds = self._model_seconds(works)
        if chunks and seconds > 0:
            prefilled = [chunk.count for chunk in chunks if not chunk.is_decode]
            decodes = len(chunks) - len(prefilled)
            sums = self.accounting.prefill_times
            sums.observe(sum(prefilled), decodes, seconds)
            sums.unshared_tokens += 0 if decodes else sum(prefilled)

    def _advance(self, chunk: PrefillChunk, work: Work, token: TokenId | None) -> None:
        """Account for a computed chunk: its KV, perhaps the response's beginning, its tokens."""
        sequence = chunk.sequence
        assert sequence.table.num_tokens == chunk.start
        sequence.table.commit(sequence.tokens[chunk.start : chunk.start + chunk.count])
        if sequence.request.started_at is None:
            position = sequence.position_of(chunk.start)
            sequence.request.computed.add(position, position + chunk.count)
        if sequence.is_preparing:
            return
        # All prompt tokens but the last are computed. From here the other choices share them.
        request = sequence.request
        num_shared = len(sequence.request.query.tokens) - 1
        is_whole = sequence is request.leader and sequence.table.num_tokens >= num_shared
        if is_whole and not request.is_forked:
            request.is_forked = True
            for other in request.sequences[1:]:
                other.table = sequence.table.fork(num_shared)
                self.scheduler.running.append(other)
        if chunk.is_last:
            self.accounting.started(sequence)
            if token is not None:
                self.accounting.totals.drew(len(chunk.draft), len(work.behind))
                if chunk.draft and sequence.drafter is not None:
                    sequence.drafter.verified(len(chunk.draft), len(work.behind))
                self._sampled.add(sequence, [token, *work.behind])

    def _let_go(self, sequences: Iterable[SequenceState]) -> None:
        """Give back the blocks of choices that end."""
        for sequence in sequences:
            if self.scheduler.has(sequence):
                self.scheduler.remove(sequence)

    # Requests, on the engine's thread.

    def submit(self, request: RequestState, samples: list[SampleParams]) -> None:
        """Raises DuplicateRequest and Overloaded, with nothing changed."""
        if len(self.scheduler.waiting) >= self._max_waiting:
            raise Overloaded("too many requests are waiting")
        self.accounting.arrived(request, samples)
        self.scheduler.add(request.leader)

    def cancel(self, request_id: str) -> bool:
        """End a request now. False if it is not here. Its blocks are free when this returns."""
        request = self.accounting.find(request_id)
        if request is not None:
            self._let_go(request.unfinished)
            self.accounting.cancelled(request)
        return request is not None

    def purge(self, pool: BlockPool, owner: Digest | None, begin: int, end: int) -> PurgedBlocks:
        """Forget content in a part of the device's or the host's blocks, and clear its memory.

        No step may come between the two.
        """
        self._copy()
        purged = pool.purge(owner, begin, end)
        whole = [(block_id, 0) for block_id in purged.empty]
        clear = self._runner.clear_host if pool.tier == "host" else self._runner.clear_from
        clear([*whole, *purged.tails])
        return purged

    # The thread.

    def start(self, on_crash: Callable[[BaseException], None]) -> None:
        """Run until `stop`. `on_crash` is called with an error that ends the loop."""

        def run() -> None:
            try:
                while self._take_calls():
                    self.step()
            # A panic of a library in Rust is no Exception.
            except BaseException as error:  # noqa: BLE001 - the edge of the thread: the process ends
                on_crash(error)

        self._thread = threading.Thread(target=run, name="engine-loop", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step in progress. Running requests are not finished."""
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._token_masks.close()

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function on the engine's thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - the caller's thread gets it
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def _take_calls(self) -> bool:
        """Run the waiting calls; wait if there is nothing to do. False when the loop must stop."""
        now = self._clock.now()
        is_waiting = not self.scheduler.has_work
        timeout = min(self.accounting.seconds_to_expiry(now), MAX_IDLE_SECONDS)
        if self._store is not None:
            timeout = min(timeout, self._store.seconds_to_next(now))
            # All running sequences wait for files. A file's arrival is a call, which ends the wait.
            is_waiting |= self._is_idle and self._store.is_reading
        while True:
            try:
                run = self._inbox.get(block=is_waiting, timeout=timeout if is_waiting else None)
            except queue.Empty:
                return True
            if run is None:
                return False
            run()
            is_waiting = False
