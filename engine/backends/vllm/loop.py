"""Brings requests to vLLM and its tokens back, on the event loop's thread.

vLLM steps by itself; here its outputs become frames, the connector's reports first frames, and time
expiries. Nothing of ours waits for a step but what has to know what it did.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from engine.backends.external import ExternalLoop, Order, new_order, vllm_sampling
from engine.backends.vllm.directive import (
    BIND,
    CORE_STATS,
    LOSSES,
    PARAM_KEY,
    RELEASE,
    REPORT,
    SWITCH_OFF,
    UNLEASE,
    CoreStats,
    Directive,
    Loss,
    Report,
)
from engine.backends.vllm.mirror import HeldCache
from engine.cache.ids import Digest, TokenId
from engine.clock import Clock, ManualClock
from engine.protocol import ErrorCode, Failed
from engine.schedule.accounting import Accounting
from engine.schedule.request import RequestState, SequenceState
from engine.supervisor import Supervisor, trace_of

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What came since the last one; `queue_seconds` by the scheduler's clock."""

    token_ids: Sequence[TokenId]
    is_last: bool
    num_cached_tokens: int
    queue_seconds: float = 0.0


class OrderRefused(Exception):
    """vLLM does not take a request that we hold for good; its reason is for the log."""


class VllmCore:
    """`llm` is a vllm.AsyncLLM; `vocabulary_size` bounds what its sampler takes for `top_k`.

    `takes_seeds`: vLLM's CPU build ends with an error when a request with a seed has its prompt
    computed in several steps, so there seeds are left out. `is_owner`: vLLM ends when we end.
    """

    def __init__(
        self, llm: Any, vocabulary_size: int, *, takes_seeds: bool, is_owner: bool
    ) -> None:
        self._llm = llm
        self._is_owner = is_owner
        self._token = secrets.token_hex(32)
        self._vocabulary_size = vocabulary_size
        self._takes_seeds = takes_seeds

    async def bind(self) -> None:
        """Tell the connector the token that our directives carry. Must come before `generate`."""
        await self._call(BIND, self._token)

    async def switch_off(self, reason: str) -> None:
        """End all holds for good: nobody keeps books of them any more."""
        await self._call(SWITCH_OFF, reason)

    async def generate(self, order: Order, directive: Directive) -> AsyncIterator[Output]:
        """Run one choice to its end; who stops listening must `abort` it. Raises OrderRefused."""
        prompt = {"prompt_token_ids": list(order.token_ids), "cache_salt": order.scope}
        try:
            params = self._params(order, directive)
            # The grammar knows what may be thought. Without this a server's `--reasoning-parser`
            # would leave it unapplied until the model ends its thinking.
            collector = await self._llm.add_request(
                order.order_id,
                prompt,
                params,
                reasoning_ended=True,
                # Of the policy `priority`: a higher number comes later. `fcfs` ignores it.
                priority=int(order.is_batch),
            )
        except ValueError as error:
            raise OrderRefused(str(error)) from error
        while True:
            output = await collector.get()
            metrics = output.metrics
            yield Output(
                token_ids=[token for one in output.outputs for token in one.token_ids],
                is_last=output.finished,
                num_cached_tokens=output.num_cached_tokens or 0,
                queue_seconds=metrics.scheduled_ts - metrics.queued_ts if metrics else 0.0,
            )
            if output.finished:
                return

    async def abort(self, order_id: str) -> None:
        await self._llm.abort(order_id)

    async def report(self, request_id: str) -> Report:
        """What became of a directive; raises RuntimeError for one never heard of."""
        report = await self._call(REPORT, request_id)
        if report is None:
            raise RuntimeError("the connector has no report of a request that began to answer")
        return msgspec.convert(report, Report)

    async def computed(self, request_id: str) -> int:
        """Tokens of a prompt that were scheduled; 0 for a request that the connector never met."""
        report = await self._call(REPORT, request_id)
        return 0 if report is None else msgspec.convert(report, Report).computed_tokens

    async def release(self, keys: Sequence[str]) -> None:
        await self._call(RELEASE, list(keys))

    async def unlease(self, keys: Sequence[str]) -> None:
        await self._call(UNLEASE, list(keys))

    async def losses(self) -> list[Loss]:
        return msgspec.convert(await self._call(LOSSES), list[Loss])

    async def stats(self) -> CoreStats:
        return msgspec.convert(await self._call(CORE_STATS), CoreStats)

    def shut_down(self) -> None:
        if self._is_owner:
            self._llm.shutdown()

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._llm.engine_core.call_utility_async(name, *arguments)

    def _params(self, order: Order, directive: Directive) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        known = msgspec.structs.replace(directive, token=self._token)
        structured = None
        if order.grammar is not None:
            structured = StructuredOutputsParams(grammar=order.grammar)
        return SamplingParams(
            **vllm_sampling(order, self._vocabulary_size, takes_seeds=self._takes_seeds),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=structured,
            extra_args={"kv_transfer_params": {PARAM_KEY: msgspec.to_builtins(known)}},
        )


@dataclass(slots=True)
class StepCounts:
    """`running` requests of ours in vLLM's last step. `preempted` requests of all, ever.

    `failure` says why nothing is counted any more.
    """

    failure: str | None = None
    running: int = 0
    preempted: int = 0

    def check(self) -> None:
        """Raise RuntimeError where vLLM's steps are not counted any more."""
        if self.failure is not None:
            raise RuntimeError(f"the stat logger is off: {self.failure}")


FAILED = "the engine failed"
LOSS_SECONDS = 0.25
"""How often a running engine is asked what it lost, besides at every first token."""
IDLE_LOSS_SECONDS = 1.0
"""The same while no request of ours runs."""


class VllmLoop(ExternalLoop):
    """`start` is told of an error that vLLM can't go on after.

    `max_leased_blocks`: the whole budget, of which a request may name its scope's share.
    """

    _cache: HeldCache

    def __init__(
        self,
        core: VllmCore,
        counts: StepCounts,
        accounting: Accounting,
        cache: HeldCache,
        clock: Clock,
        event_loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
        *,
        max_waiting: int,
        max_leased_blocks: int,
        max_context_tokens: int,
    ) -> None:
        super().__init__(accounting, cache, clock, event_loop, supervisor, max_waiting=max_waiting)
        self._core = core
        self._counts = counts
        self._max_leased_blocks = max_leased_blocks
        self._max_context_tokens = max_context_tokens
        # What each choice asked of the connector, and the requests whose wants are not settled.
        self._directives: dict[SequenceState, Directive] = {}
        self._wanting: dict[RequestState, Directive] = {}
        self._released: list[Digest] = []
        self._num_orders = 0

    def stop(self) -> None:
        """End our tasks, and vLLM if it is ours; what runs is not finished."""
        super().stop()
        self._core.shut_down()

    async def abandon(self, reason: str) -> None:
        """Our books failed in a vLLM that others use: our requests fail, its own go on.

        The connector gives back all that it holds, since nobody knows any more what that is for.
        """
        order_ids = [self._directives[sequence].request_id for sequence in self._serving]
        await self.fail_all(FAILED)
        aborts = (self._core.abort(order_id) for order_id in order_ids)
        await asyncio.gather(*aborts, return_exceptions=True)
        await self._core.switch_off(reason)

    def _fail(self, sequence: SequenceState, message: str, code: ErrorCode = "internal") -> None:
        try:
            super()._fail(sequence, message, code)
        except Exception as error:
            if not self._is_stopped:
                raise
            log.error("a request could not be closed", trace=trace_of(error))
            sequence.request.emit(Failed(code=code, message=message))

    # Requests.

    @property
    def num_waiting(self) -> int:
        """Those that did not run in the last step."""
        return max(len(self._serving) - self._counts.running, 0)

    def _begin(self, sequence: SequenceState) -> None:
        query, found = sequence.request.query, sequence.request.found
        # A client may use an id again; the connector never hears one twice.
        self._num_orders += 1
        order_id = f"{sequence.request.request_id}/{self._num_orders}"
        share = query.lease_share
        lease_blocks = None if share is None else int(self._max_leased_blocks * share)
        if sequence is sequence.request.leader:
            assert found is not None
            directive = self._cache.directive(order_id, query, found, lease_blocks)
            self._wanting[sequence.request] = directive
        else:
            # Its leader has begun, so vLLM has the prompt's full blocks.
            directive = Directive(
                request_id=order_id, scope=query.scope, wants=[], lease_blocks=lease_blocks
            )
        self._directives[sequence] = directive
        super()._begin(sequence)

    def _remove(self, sequence: SequenceState) -> None:
        """What still runs of it is aborted; before anything that is asked of vLLM after this."""
        directive, request = self._directives.pop(sequence), sequence.request
        is_running = self._serving[sequence] is not asyncio.current_task()
        if sequence is request.leader:
            self._end_wants(request)
        super()._remove(sequence)
        if request.started_at is None:
            self._spawn(self._close_failed(request, directive.request_id))
        elif is_running:
            self._spawn(self._core.abort(directive.request_id))

    async def _close_failed(self, request: RequestState, order_id: str) -> None:
        """Only vLLM's scheduler knows what it computed of a prompt without a first token.

        Nothing more is computed behind an abort.
        """
        await self._core.abort(order_id)
        self.accounting.close_failed(request, await self._core.computed(order_id))

    def _end_wants(self, request: RequestState) -> None:
        """It began to answer, or never will: nothing waits for its wants any more."""
        directive = self._wanting.pop(request, None)
        if directive is not None:
            self._released += self._cache.let_off(directive)

    async def _generate(self, sequence: SequenceState) -> None:
        is_last, directive = False, self._directives[sequence]
        order = new_order(sequence, directive.request_id, self._max_context_tokens)
        try:
            async for output in self._core.generate(order, directive):
                is_last = output.is_last
                if sequence.request.started_at is None:
                    await self._admit(sequence, output, directive)
                self._take(sequence, output)
                if sequence not in self._serving:
                    break
        except OrderRefused as refusal:
            log.error("vLLM refused a request", why=type(refusal.__cause__).__name__)
            self._fail(sequence, "vLLM refused the request")
            self._tell()
            return
        if not is_last:
            await self._core.abort(order.order_id)

    async def _admit(self, sequence: SequenceState, output: Output, directive: Directive) -> None:
        """The first token: what vLLM reused, and what the connector holds, is known now."""
        request, order_id = sequence.request, directive.request_id
        losses, report = await asyncio.gather(self._core.losses(), self._core.report(order_id))
        assert request.found is not None
        self._cache.lose(losses)
        self._cache.admit(request.query, request.found, sequence.table, report)
        is_manual = isinstance(self._clock, ManualClock)
        request.began_at = request.submitted_at + (0.0 if is_manual else output.queue_seconds)
        self._started(sequence)
        self._end_wants(request)

    def _take(self, sequence: SequenceState, output: Output) -> None:
        for token in output.token_ids:
            if sequence.finish is not None:
                break
            self.accounting.token(sequence, token)
        if output.is_last and sequence.finish is None:
            sequence.finish = "failed"
        self._end_if_finished(sequence)
        self._tell()

    # Along the way.

    def _tell(self) -> None:
        """Publish what happened, and let the connector go of what ended."""
        super()._tell()
        if unleased := [key.hex() for key in self._cache.take_unleased()]:
            self._spawn(self._core.unlease(unleased))
        released, self._released = self._released, []
        if keys := [key.hex() for key in (*released, *self._cache.take_released())]:
            self._spawn(self._core.release(keys))

    def start(self, on_crash: Callable[[BaseException], None]) -> None:
        self._event_loop.call_soon_threadsafe(lambda: self._spawn(self._watch_losses()))
        super().start(on_crash)

    async def _watch_losses(self) -> None:
        """Other clients of the server take blocks too, whether or not a request of ours runs.

        An error is a crash: vLLM tells a loss once, and no lease may stand on what is lost. The
        connector answers with an error once it is off, and the stat logger is asked for one.
        """
        # Asked once at the start: a scheduler that is not as we know it ends the engine here.
        await self._core.stats()
        while True:
            await asyncio.sleep(LOSS_SECONDS if self._serving else IDLE_LOSS_SECONDS)
            self._counts.check()
            self._cache.lose(await self._core.losses())
            self._tell()
