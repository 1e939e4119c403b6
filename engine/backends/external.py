"""What the engines over vLLM and over a server share: another program computes, and we keep books.

Its blocks are mirrored here: their tokens, their names, the entries on them. It steps by itself,
and its answers become frames.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.cache.block import Block
from engine.cache.digests import ChainHasher, PromptDigests, common_blocks
from engine.cache.entries import Entries
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.clock import Clock
from engine.errors import Overloaded
from engine.protocol import Breakpoint, BreakpointReport, ErrorCode
from engine.schedule.accounting import Accounting
from engine.schedule.request import RequestState, SequenceState
from engine.schedule.runner import SampleParams
from engine.supervisor import Supervisor

T = TypeVar("T")

MAX_IDLE_SECONDS = 1.0


class MirrorPool(BlockPool):
    """Mirrors of blocks with entries or names. Other blocks have none."""

    def mirror(self, digests: PromptDigests) -> list[Block]:
        """The mirrors of a prompt's full blocks, each with one reference more."""
        blocks = []
        for index, digest in enumerate(digests.full):
            packed = digests.block_tokens(index)
            block = self.find(digest, packed)
            if block is None:
                block = self.allocate(index)
                self.append(block, packed)
                self.index(block, digest)
            else:
                self.acquire(block)
            blocks.append(block)
        return blocks

    def lose(self, digest: Digest) -> None:
        """The owner has dropped this block, so its names are gone too."""
        block = self._index.get(digest)
        if block is not None:
            self.changes.gone(block.names)
            block.names.clear()
            self.requeue(block)

    def _enqueue(self, block: Block) -> None:
        if not block.names and not block.dependents:
            self._forget_content(block)
        super()._enqueue(block)


class MirrorCache(PrefixCache):
    """`_unwritten`: segments whose entries the other program or our books had no room for."""

    pool: MirrorPool

    def __init__(self, pool: MirrorPool, entries: Entries, hasher: ChainHasher) -> None:
        super().__init__(pool, entries, hasher)
        self._unwritten: set[int] = set()

    def _not_written(self, query: CacheQuery, point: Breakpoint) -> BreakpointReport:
        report = super()._not_written(query, point)
        if point.segment not in self._unwritten:
            return report
        return BreakpointReport(
            segment=point.segment, state="none", tokens=report.tokens, reason="best_effort_evicted"
        )


class ExternalLoop:
    """Brings choices to the other program, and tells `accounting` what comes back.

    `call` may be used from any thread, and everything else runs on the event loop's. An error of a
    task is a crash.
    """

    def __init__(
        self,
        accounting: Accounting,
        cache: PrefixCache,
        clock: Clock,
        event_loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
        *,
        max_waiting: int,
    ) -> None:
        self.accounting = accounting
        self._cache = cache
        self._clock = clock
        self._event_loop = event_loop
        self._supervisor = supervisor
        self._max_waiting = max_waiting
        self._on_crash: Callable[[BaseException], None] = lambda error: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: dict[SequenceState, asyncio.Task[None]] = {}
        self._is_stopped = False

    # What each program does its own way.

    @property
    def num_waiting(self) -> int:
        """How many requests wait for the other program."""
        raise NotImplementedError

    async def _generate(self, sequence: SequenceState) -> None:
        """Have a choice computed. The end of `_serving` ends it here too."""
        raise NotImplementedError

    # Requests.

    def submit(self, request: RequestState, samples: list[SampleParams]) -> None:
        """The first choice computes the prompt. Raises DuplicateRequest and Overloaded."""
        if self.num_waiting >= self._max_waiting:
            raise Overloaded("too many requests are waiting")
        self.accounting.arrived(request, samples)
        assert request.found is not None
        digests = request.query.digests
        others = (
            other.request.query.digests
            for other in self._serving
            if other.request.started_at is None
        )
        # How much of its prompt others that have not begun to answer are computing.
        shared = max((common_blocks(digests, other) for other in others), default=0)
        request.found.raced = shared * self._cache.pool.block_size
        self._begin(request.leader)

    def cancel(self, request_id: str) -> bool:
        """End a request now. False if it is not here."""
        request = self.accounting.find(request_id)
        if request is not None:
            self._let_go(request.unfinished)
            self.accounting.cancelled(request)
        return request is not None

    def _begin(self, sequence: SequenceState) -> None:
        self._serving[sequence] = self._spawn(self._generate(sequence))

    def _started(self, sequence: SequenceState) -> None:
        """The prompt is computed and admitted to the cache: the answer begins.

        The other program may have its blocks, so the other choices begin now.
        """
        request = sequence.request
        assert request.found is not None
        self.accounting.started(sequence)
        self._cache.let_go(request.found)
        sequence.table.release()
        for fork in request.sequences[1:]:
            self._begin(fork)

    def _end_if_finished(self, sequence: SequenceState) -> None:
        if sequence.finish is not None:
            self._let_go(sequence.ending)
            self.accounting.ended(sequence)

    def _fail(self, sequence: SequenceState, message: str, code: ErrorCode = "internal") -> None:
        self._let_go(sequence.ending)
        self.accounting.failed(sequence, message, code)

    def _let_go(self, sequences: Iterable[SequenceState]) -> None:
        """Give back what choices hold here that end."""
        for sequence in sequences:
            if sequence in self._serving:
                self._remove(sequence)

    def _remove(self, sequence: SequenceState) -> None:
        task = self._serving.pop(sequence)
        request = sequence.request
        if sequence is request.leader and request.found is not None:
            self._cache.let_go(request.found)
        sequence.table.release()
        if task is not asyncio.current_task():
            task.cancel()

    # The engine's calls.

    def start(self, on_crash: Callable[[BaseException], None]) -> None:
        """`on_crash` hears of an error that nothing can go on after."""
        self._on_crash = on_crash
        self._event_loop.call_soon_threadsafe(self._watch)

    def stop(self) -> None:
        """End our tasks; what runs is not finished.

        Called from another thread, while the event loop runs or after it has ended.
        """
        self._is_stopped = True
        if self._event_loop.is_running():
            asyncio.run_coroutine_threadsafe(self._cancel_tasks(), self._event_loop).result()

    def call(self, function: Callable[[], T], *, is_urgent: bool = False) -> "Future[T]":
        """Run a function between two outputs; what it ended is told. None waits for a step."""

        async def run() -> T:
            result = function()
            self._tell()
            return result

        return asyncio.run_coroutine_threadsafe(run(), self._event_loop)

    # Inside.

    def _tell(self) -> None:
        """Publish what happened."""
        self.accounting.publish()

    def _watch(self) -> None:
        self._supervisor.start("expiry", self._watch_time)

    async def _watch_time(self) -> None:
        """Announce expiry, also when nothing runs."""
        while not self._is_stopped:
            due = self.accounting.seconds_to_expiry(self._clock.now())
            await asyncio.sleep(min(due, MAX_IDLE_SECONDS))
            self.accounting.expire(self._clock.now())
            self._tell()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._event_loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._is_stopped:
            self._on_crash(error)

    async def _cancel_tasks(self) -> None:
        """Cancel all but the caller's own, and wait for their ends."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
