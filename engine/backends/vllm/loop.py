"""Brings requests to vLLM and its tokens back, on the event loop's thread.

vLLM steps by itself; here its outputs become frames, the connector's reports first frames, and time
expiries. Nothing of ours waits for a step but what has to know what it did.
"""

import asyncio
from collections.abc import Callable

import structlog

from engine.backends.external import ExternalLoop
from engine.backends.vllm.core import Order, OrderRefused, Output, StepCounts, VllmCore
from engine.backends.vllm.directive import Directive
from engine.backends.vllm.mirror import HeldCache
from engine.cache.ids import Digest
from engine.clock import Clock, ManualClock
from engine.protocol import Failed
from engine.schedule.request import RequestState, SequenceState
from engine.supervisor import Supervisor, trace_of
from engine.text.formats.turn_parser import TurnParser

log = structlog.get_logger()

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
        cache: HeldCache,
        clock: Clock,
        event_loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
        *,
        max_leased_blocks: int,
    ) -> None:
        super().__init__(cache, clock, event_loop, supervisor)
        self._core = core
        self._counts = counts
        self._max_leased_blocks = max_leased_blocks
        # What each choice asked of the connector, and the requests whose wants are not settled.
        self._directives: dict[SequenceState, Directive] = {}
        self._wanting: dict[RequestState, Directive] = {}
        self._unstarted: dict[str, str] = {}
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
        self._is_stopped = True
        order_ids = [self._directives[sequence].request_id for sequence in self._serving]
        for sequence in list(self._serving):
            if self.has(sequence):  # else it ended with another choice of its request
                self._end_failed(sequence)
        await self._cancel_tasks()
        aborts = (self._core.abort(order_id) for order_id in order_ids)
        await asyncio.gather(*aborts, return_exceptions=True)
        await self._core.switch_off(reason)

    def _end_failed(self, sequence: SequenceState) -> None:
        try:
            self.lifecycle.fail(sequence, FAILED)
        except Exception as error:  # noqa: BLE001 - the books failed; the caller must hear of it
            log.error("a request could not be closed", trace=trace_of(error))
            sequence.request.emit(Failed(code="internal", message=FAILED))

    # Requests.

    @property
    def waiting(self) -> range:
        """As long as those that did not run in the last step are many."""
        return range(max(len(self._serving) - self._counts.running, 0))

    def add_fork(self, sequence: SequenceState) -> None:
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
        super().add_fork(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """What still runs of it is aborted; before anything that is asked of vLLM after this."""
        directive = self._directives.pop(sequence)
        is_running = self._serving[sequence] is not asyncio.current_task()
        if sequence is sequence.request.leader:
            self._end_wants(sequence.request)
        if sequence.request.started_at is None:
            self._unstarted[sequence.request.request_id] = directive.request_id
        super().remove(sequence)
        if is_running:
            self._spawn(self._core.abort(directive.request_id))

    def _end_wants(self, request: RequestState) -> None:
        """It began to answer, or never will: nothing waits for its wants any more."""
        directive = self._wanting.pop(request, None)
        if directive is not None:
            self._released += self._cache.let_off(directive)

    def ask_prefilled(self, request: RequestState, close: Callable[[int], None]) -> bool:
        """Only vLLM's scheduler knows what it computed of a prompt without a first token."""
        order_id = self._unstarted.pop(request.request_id, None)
        if order_id is not None:
            self._spawn(self._tell_prefilled(order_id, close))
        return order_id is not None

    async def _tell_prefilled(self, order_id: str, close: Callable[[int], None]) -> None:
        # Nothing more is computed behind an abort, and that of `remove` may come after this one.
        await self._core.abort(order_id)
        close(await self._core.computed(order_id))

    async def _generate(self, sequence: SequenceState) -> None:
        is_last, order = False, _order(sequence, self._directives[sequence])
        try:
            async for output in self._core.generate(order):
                is_last = output.is_last
                if sequence.request.started_at is None:
                    await self._admit(sequence, output, order.directive)
                self._take(sequence, output)
                if not self.has(sequence):
                    break
        except OrderRefused as refusal:
            log.error("vLLM refused a request", why=type(refusal.__cause__).__name__)
            self.lifecycle.fail(sequence, "vLLM refused the request")
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
        self._begin(sequence)
        self._end_wants(request)

    def _take(self, sequence: SequenceState, output: Output) -> None:
        for token in output.token_ids:
            if sequence.finish is not None:
                break
            self.lifecycle.take_token(sequence, token)
        if output.is_last and sequence.finish is None:
            sequence.finish = "failed"
        self.lifecycle.finish_ended([sequence])
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

    def _watch(self) -> None:
        self._spawn(self._watch_losses())
        super()._watch()

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


def _order(sequence: SequenceState, directive: Directive) -> Order:
    request, parser = sequence.request, sequence.parser
    assert isinstance(parser, TurnParser)
    asked = request.request.sampling.max_tokens
    return Order(
        order_id=directive.request_id,
        salt=request.query.scope,
        token_ids=request.query.tokens,
        sample=sequence.sample,
        is_seeded=request.request.sampling.seed is not None,
        # vLLM has no way to compute a prompt alone: pre-warming takes one token, told to nobody.
        max_tokens=asked if asked is None else max(asked, 1),
        end_token_ids=sorted(parser.end_token_ids),
        directive=directive,
        grammar=parser.grammar,
        is_batch=sequence.is_batch,
    )
