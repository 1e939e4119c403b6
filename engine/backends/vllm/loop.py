"""Brings requests to vLLM and its tokens back, on the event loop's thread.

vLLM steps by itself; here its outputs become frames, the connector's reports first frames, and time
expiries. Nothing of ours waits for a step but what has to know what it did.
"""

import asyncio
from collections.abc import Callable

import structlog

from engine.backends.external.loop import ExternalLoop
from engine.backends.vllm.core import Order, OrderRefused, Output, VllmCore
from engine.backends.vllm.directive import Directive
from engine.backends.vllm.mirror import HeldCache
from engine.backends.vllm.turns import Turns
from engine.clock import Clock, ManualClock
from engine.protocol import Failed
from engine.schedule.lifecycle import Lifecycle
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
    """`start` is told of an error that vLLM can't go on after."""

    def __init__(
        self,
        core: VllmCore,
        cache: HeldCache,
        turns: Turns,
        lifecycle: Lifecycle,
        clock: Clock,
        event_loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
    ) -> None:
        super().__init__(lifecycle, clock, event_loop, supervisor)
        self._core = core
        self._cache = cache
        self._turns = turns
        self._served: dict[SequenceState, tuple[asyncio.Task[None], str]] = {}
        self._unstarted: dict[str, str] = {}
        turns.serve, turns.drop = self._serve, self._drop
        lifecycle.ask_prefilled = self._ask_prefilled

    def stop(self) -> None:
        """End our tasks, and vLLM if it is ours; what runs is not finished."""
        super().stop()
        self._core.shut_down()

    async def abandon(self, reason: str) -> None:
        """Our books failed in a vLLM that others use: our requests fail, its own go on.

        The connector gives back all that it holds, since nobody knows any more what that is for.
        """
        self._is_stopped = True
        order_ids = [order_id for _, order_id in self._served.values()]
        for sequence in list(self._served):
            self._end_failed(sequence)
        await self._cancel_tasks()
        aborts = (self._core.abort(order_id) for order_id in order_ids)
        await asyncio.gather(*aborts, return_exceptions=True)
        await self._core.switch_off(reason)

    def _end_failed(self, sequence: SequenceState) -> None:
        if not self._turns.has(sequence):
            return  # it ended with another choice of its request
        try:
            self.lifecycle.fail(sequence, FAILED)
        except Exception as error:  # noqa: BLE001 - the books failed; the caller must hear of it
            log.error("a request could not be closed", trace=trace_of(error))
            sequence.request.emit(Failed(code="internal", message=FAILED))

    # Requests.

    def _serve(self, sequence: SequenceState, directive: Directive) -> None:
        task = self._spawn(self._generate(sequence, directive))
        self._served[sequence] = task, directive.request_id

    def _drop(self, sequence: SequenceState) -> None:
        """What still runs of it is aborted; before anything that is asked of vLLM after this."""
        task, order_id = self._served.pop(sequence)
        if sequence.request.started_at is None:
            self._unstarted[sequence.request.request_id] = order_id
        if task is asyncio.current_task():
            return
        task.cancel()
        self._spawn(self._core.abort(order_id))

    def _ask_prefilled(self, request: RequestState, close: Callable[[int], None]) -> bool:
        """Only vLLM's scheduler knows what it computed of a prompt without a first token."""
        order_id = self._unstarted.pop(request.request_id, None)
        if order_id is not None:
            self._spawn(self._tell_prefilled(order_id, close))
        return order_id is not None

    async def _tell_prefilled(self, order_id: str, close: Callable[[int], None]) -> None:
        # Nothing more is computed behind an abort, and that of `_drop` may come after this one.
        await self._core.abort(order_id)
        close(await self._core.computed(order_id))

    async def _generate(self, sequence: SequenceState, directive: Directive) -> None:
        is_last, order_id = False, directive.request_id
        try:
            async for output in self._core.generate(_order(sequence, directive)):
                is_last = output.is_last
                if sequence.request.started_at is None:
                    await self._begin(sequence, output, order_id)
                self._take(sequence, output)
                if not self._turns.has(sequence):
                    break
        except OrderRefused as refusal:
            log.error("vLLM refused a request", why=type(refusal.__cause__).__name__)
            self.lifecycle.fail(sequence, "vLLM refused the request")
            self._tell()
            return
        if not is_last:
            await self._core.abort(order_id)

    async def _begin(self, sequence: SequenceState, output: Output, order_id: str) -> None:
        """The first token: what vLLM reused, and what the connector holds, is known now."""
        request = sequence.request
        losses, report = await asyncio.gather(self._core.losses(), self._core.report(order_id))
        assert request.found is not None
        self._cache.lose(losses)
        self._cache.admit(request.query, request.found, sequence.table, report)
        is_manual = isinstance(self._clock, ManualClock)
        request.began_at = request.submitted_at + (0.0 if is_manual else output.queue_seconds)
        self.lifecycle.start_if_first(sequence)
        self._cache.let_go(request.found)
        sequence.table.release()
        self._turns.end_wants(request)
        for fork in request.sequences[1:]:
            self._turns.add_fork(fork)

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
        unleased = [key.hex() for key in self._turns.take_unleased()]
        if unleased:
            self._spawn(self._core.unlease(unleased))
        released = [key.hex() for key in self._turns.take_released()]
        if released:
            self._spawn(self._core.release(released))

    def _watch(self) -> None:
        self._spawn(self._check())
        self._spawn(self._watch_losses())
        super()._watch()

    async def _check(self) -> None:
        """Asked once at the start: a scheduler that is not as we know it ends the engine here."""
        await self._core.stats()

    async def _watch_losses(self) -> None:
        """Other clients of the server take blocks too, whether or not a request of ours runs.

        An error is a crash: vLLM tells a loss once, and no lease may stand on what is lost. The
        connector answers with an error once it is off, and the stat logger is asked for one.
        """
        while True:
            await asyncio.sleep(LOSS_SECONDS if self._served else IDLE_LOSS_SECONDS)
            self._turns.check()
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
