"""The engines over vLLM and over a server: another program computes, and we keep books.

The other program's blocks are mirrored here: their tokens, their names, the entries on them. That
program steps by itself, and its answers become frames.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.cache.block import Block
from engine.cache.digests import ChainHasher, PromptDigests, common_blocks
from engine.cache.entries import Entries
from engine.cache.ids import Digest, TokenId
from engine.cache.lookup import Mark
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import CacheQuery, Lookup, PrefixCache
from engine.cache.table import BlockTable
from engine.errors import Overloaded
from engine.protocol import Breakpoint, BreakpointReport, ErrorCode, GenerateRequest, MissReason
from engine.schedule.accounting import Accounting
from engine.schedule.request import ImagePrompt, RequestState, SequenceState
from engine.schedule.runner import SampleParams
from engine.supervisor import Supervisor
from engine.text.renderer import TurnParser

T = TypeVar("T")

MAX_IDLE_SECONDS = 1.0
_MAX_SEED = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one choice asks of the other program."""

    order_id: str
    scope: str
    token_ids: Sequence[TokenId]
    request: GenerateRequest
    sample: SampleParams
    # At least 1.
    max_tokens: int
    # Whether the client gave a seed, so that draws can be repeated.
    is_seeded: bool = False
    # The tokens that end it. The end tokens of the model's files do not end it by themselves.
    end_token_ids: Sequence[TokenId] = ()
    # The grammar of the answer, in llguidance's form of Lark. None: the answer is free.
    grammar: str | None = None
    is_batch: bool = False
    # The adapter's digest. Empty: no adapter acts on it.
    adapter: str = ""
    image_prompt: ImagePrompt | None = None

    @property
    def cache_salt(self) -> str:
        """The salt that tells its content apart in the other program's cache.

        It has the adapter too, since other connectors of a vLLM find their content by the salt
        alone. vLLM takes 128 characters at most, without `@`, `/`, a backslash and NUL.
        """
        return ".".join(filter(None, (self.scope, self.adapter, self.request.salt)))


def new_order(sequence: SequenceState, order_id: str, max_context_tokens: int) -> Order:
    request = sequence.request
    parser = sequence.parser
    adapter = request.query.adapter
    max_tokens = request.request.sampling.max_tokens
    room = max_context_tokens - len(request.query.tokens)
    return Order(
        order_id=order_id,
        scope=request.query.scope,
        token_ids=request.query.tokens,
        request=request.request,
        sample=sequence.sample,
        is_seeded=request.request.sampling.seed is not None,
        # No program computes a prompt without sampling. So pre-warming samples one token, which is
        # not sent to the client.
        max_tokens=max(room if max_tokens is None else min(max_tokens, room), 1),
        end_token_ids=sorted(parser.end_token_ids) if isinstance(parser, TurnParser) else [],
        grammar=parser.grammar if isinstance(parser, TurnParser) else None,
        is_batch=sequence.is_batch,
        adapter="" if adapter is None else adapter.digest,
        image_prompt=request.image_prompt,
    )


def vllm_sampling(
    order: Order, vocabulary_size: int, *, takes_seeds: bool = True
) -> dict[str, Any]:
    """How an order is sampled, by the names of vLLM's API and of its `SamplingParams` alike."""
    sample = order.sample
    return {
        "temperature": sample.temperature,
        "top_p": sample.top_p,
        "top_k": sample.top_k if sample.top_k < vocabulary_size else 0,
        "seed": sample.seed % _MAX_SEED if order.is_seeded and takes_seeds else None,
        "presence_penalty": sample.presence_penalty,
        "frequency_penalty": sample.frequency_penalty,
        "repetition_penalty": sample.repetition_penalty,
        "min_p": sample.min_p,
        "min_tokens": min(sample.min_tokens, order.max_tokens),
        "logit_bias": {
            token: bias for token, bias in sample.bias.items() if token < vocabulary_size
        }
        or None,
        "max_tokens": order.max_tokens,
        # We say what ends a turn, not the model's files.
        "ignore_eos": True,
        "stop_token_ids": [token for token in order.end_token_ids if token < vocabulary_size],
        "allowed_token_ids": [
            token for token in order.request.sampling.allowed_token_ids if token < vocabulary_size
        ]
        or None,
    }


class MirrorPool(BlockPool):
    """Mirrors of the other program's blocks that have entries or names."""

    def mirror(self, digests: PromptDigests) -> list[Block]:
        """The mirrors of a prompt's full blocks. Each gets a reference."""
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
        """The other program has dropped this block, so its names are gone too."""
        block = self._index.get(digest)
        if block is not None:
            self.changes.gone(block.names)
            block.names.clear()
            self.requeue(block)

    def _enqueue(self, block: Block) -> None:
        # Names in the tier below are only hints, until their entry is read onto the device.
        if not block.dependents and (not block.names or self.tier == "disk"):
            self._forget_content(block)
        super()._enqueue(block)


class MirrorCache(PrefixCache):
    """The cache over mirrors: the other program decides what is in memory."""

    pool: MirrorPool

    def __init__(self, pool: MirrorPool, entries: Entries, hasher: ChainHasher) -> None:
        super().__init__(pool, entries, hasher)
        # Segments whose entries the other program or our books had no room for.
        self._unwritten: set[int] = set()

    def _settle(self, query: CacheQuery, lookup: Lookup, reused: int) -> bool:
        """Note how much of a prompt came from memory. Return whether the whole hit did."""
        size = self.pool.block_size
        hit = lookup.hit
        lookup.raced = min(lookup.raced, reused)
        lookup.reused = reused
        lookup.read = 0 if hit is None else min(hit.tokens, reused)
        usable = (len(query.tokens) - 1) // size * size
        return hit is None or lookup.read >= min(hit.tokens, usable)

    def _lost(self, lookup: Lookup) -> None:
        """Note that breakpoints behind `read` were missed, since a part of the hit was gone."""
        for mark in lookup.marks:
            if mark.tokens > lookup.read:
                lookup.missed.setdefault(mark.segment, "best_effort_evicted")

    def _was_overtaken(self, query: CacheQuery, lookup: Lookup, mark: Mark, now: float) -> bool:
        """Whether another request wrote or computed this mark's prefix after the look-up.

        None did if the look-up found an entry there whose content the other program had lost.
        """
        was_there = lookup.missed.get(mark.segment) in ("best_effort_evicted", "not_told")
        return not was_there and super()._was_overtaken(query, lookup, mark, now)

    def _mirror(self, query: CacheQuery, table: BlockTable) -> None:
        table.blocks = self.pool.mirror(query.digests)
        table.num_tokens = len(query.tokens)

    def _not_written(self, query: CacheQuery, point: Breakpoint) -> BreakpointReport:
        report = super()._not_written(query, point)
        if point.segment not in self._unwritten:
            return report
        reason: MissReason = "no_boundary" if self.has_states else "best_effort_evicted"
        return BreakpointReport(
            segment=point.segment, state="none", tokens=report.tokens, reason=reason
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
        event_loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
        *,
        max_waiting: int,
    ) -> None:
        self.accounting = accounting
        self._cache = cache
        self._clock = accounting.clock
        self._event_loop = event_loop
        self._supervisor = supervisor
        self._max_waiting = max_waiting
        self._on_crash: Callable[[BaseException], None] = lambda error: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: dict[SequenceState, asyncio.Task[None]] = {}
        self._is_stopped = False
        # The request beside which none of ours has run since it arrived.
        self._alone: RequestState | None = None

    async def _generate(self, sequence: SequenceState) -> None:
        """Have a choice computed. Stop when the choice is no longer in `_serving`."""
        raise NotImplementedError

    # Requests.

    def submit(self, request: RequestState, samples: list[SampleParams]) -> None:
        """The first choice computes the prompt. Raises DuplicateRequest and Overloaded."""
        # Requests that have not begun to answer count as waiting: the other program does not say
        # which it computes.
        num_waiting = sum(sequence.request.started_at is None for sequence in self._serving)
        if num_waiting >= self._max_waiting:
            raise Overloaded("too many requests are waiting")
        self.accounting.arrived(request, samples)
        self._alone = None if self._serving else request
        assert request.lookup is not None
        digests = request.query.digests
        others = (
            other.request.query.digests
            for other in self._serving
            if other.request.started_at is None
        )
        # How much of its prompt is being computed by others that have not begun to answer.
        shared = max((common_blocks(digests, other) for other in others), default=0)
        request.lookup.raced = shared * self._cache.pool.block_size
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
        assert request.lookup is not None
        self.accounting.started(sequence)
        self._learn(request)
        self._cache.let_go(request.lookup)
        sequence.table.release()
        for other in request.sequences[1:]:
            self._begin(other)

    def _learn(self, request: RequestState) -> None:
        """Learn from the time of a prefill that waited for no other request.

        Other prefills teach nothing, since the other program does not report its steps.
        """
        if self._alone is not request or len(request.sequences) > 1:
            return
        began_at = request.began_at
        started_at = request.started_at
        if request.usage is not None and began_at is not None and started_at is not None:
            seconds = started_at - began_at
            if seconds > 0:  # a manual clock tells no such time
                computed = request.usage.computed_tokens
                self.accounting.prefill_times.observe(computed, 0, seconds)

    def _end_if_finished(self, sequence: SequenceState) -> None:
        if sequence.finish is not None:
            self._let_go(sequence.ending)
            self.accounting.ended(sequence)

    def _fail(self, sequence: SequenceState, message: str, code: ErrorCode = "internal") -> None:
        self._let_go(sequence.ending)
        self.accounting.failed(sequence, message, code)

    async def fail_all(self, message: str, code: ErrorCode = "internal") -> None:
        """Fail every request; this loop is not used again."""
        self._is_stopped = True
        for sequence in list(self._serving):
            if sequence in self._serving:  # otherwise it ended with another choice of its request
                self._fail(sequence, message, code)
        await self._cancel_tasks()

    def _let_go(self, sequences: Iterable[SequenceState]) -> None:
        """Give back the references of choices that end."""
        for sequence in sequences:
            if sequence in self._serving:
                self._remove(sequence)

    def _remove(self, sequence: SequenceState) -> None:
        task = self._serving.pop(sequence)
        request = sequence.request
        if sequence is request.leader and request.lookup is not None:
            self._cache.let_go(request.lookup)
        sequence.table.release()
        if task is not asyncio.current_task():
            task.cancel()

    # The engine's calls.

    def start(self, on_crash: Callable[[BaseException], None]) -> None:
        """`on_crash` is called with an error after which nothing can go on."""
        self._on_crash = on_crash
        self._event_loop.call_soon_threadsafe(self._supervisor.start, "expiry", self._watch_time)

    def stop(self) -> None:
        """End our tasks; what runs is not finished.

        Called from another thread, while the event loop runs or after it has ended.
        """
        self._is_stopped = True
        if self._event_loop.is_running():
            asyncio.run_coroutine_threadsafe(self._cancel_tasks(), self._event_loop).result()

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function between two outputs, and tell what it ended. It waits for no step."""

        async def run() -> T:
            result = function()
            self._tell()
            return result

        return asyncio.run_coroutine_threadsafe(run(), self._event_loop)

    # Inside.

    def _tell(self) -> None:
        """Publish what happened."""
        self.accounting.publish()

    async def _watch_time(self, _stopping: asyncio.Event) -> None:
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
        """Cancel all tasks but the caller's, and wait until they have ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
