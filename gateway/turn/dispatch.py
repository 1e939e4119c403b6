"""Sends a turn to an engine, and to the next best one while nothing of an answer has gone out.

An engine may be unreachable, die, fall silent, fail, or refuse because it is full or not ready.
Then the turn goes on at another engine, as another request, and the client does not notice. The
request at the first engine is cancelled and not charged; the reconciler acknowledges its counts.
Where there is no other engine the turn waits for the lost one, as long as a turn may wait in the
queue. If that one does not come back, the client is told to come again (`NotServed`).

A stream's first byte is the engine's first frame. After it a failure is the stream's error. An
answer in one piece goes out when it is whole, so until then it can begin anew elsewhere.

A turn on which an engine fell silent before it accepted it is not sent to a second one. Its prompt
may be the cause, and must not stop one engine after another. The client is told to come again,
since the engine may also be busy with other turns.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

from engine.protocol import Done, Frame, Started
from gateway.base.clock import Clock
from gateway.base.errors import (
    DemandRefused,
    EngineTimeout,
    GatewayError,
    NoEngineReady,
    NotServed,
    Overloaded,
    PromptTooLong,
)
from gateway.base.logs import get_logger
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.limits.congestion import Unanswered
from gateway.prompt.ask import Ask
from gateway.routing.client import CannotConnect
from gateway.routing.engine import Engine
from gateway.routing.fleet import Fleet
from gateway.routing.generation import Generation
from gateway.routing.router import Route, Router
from gateway.turn.attempts import Attempts
from gateway.turn.failures import is_breakdown, is_retried, is_unsure, reason_of, told
from gateway.turn.first_leg import FirstLeg, FirstLegs, over_legs, prefill_only
from gateway.turn.full_engines import FullEngines
from gateway.turn.tracing import NO_TRACE, TurnTrace

RETRY_SECONDS = 300.0
"""Seconds from the turn's arrival. A later failure is the answer."""
_PAUSE_SECONDS = 0.1
_RETURN_SECONDS = 0.25
"""Between two looks whether a lost engine is back. The fleet polls it every second."""


@dataclass(slots=True)
class Dispatch:
    """One turn on its way to an engine. `record` has the engine and the attempt.

    `may_run`: the engine may have the request. `has_started`: this attempt's first frame has come.
    `failure` ended the last attempt. `leg` is the first leg while it runs, `prefilled` what came of
    it (`first_leg.py`).
    `is_charged`: the gate's queue counted it as served. `unanswered` is its place in its
    workspace's window; a row of a batch has none.
    """

    ask: Ask
    record: TurnRecord
    choice: Route[Engine] | None = None
    generation: Generation | None = None
    may_run: bool = False
    has_started: bool = False
    failure: GatewayError | None = None
    attempts: Attempts = field(default_factory=Attempts)
    is_charged: bool = False
    unanswered: Unanswered | None = None
    trace: TurnTrace = NO_TRACE
    leg: FirstLeg | None = None
    prefilled: Started | None = None

    @property
    def engine(self) -> Engine:
        assert self.choice is not None
        return self.choice.engine

    @property
    def has_gone_out(self) -> bool:
        """Whether a byte of the answer has gone out. An answer in one piece goes out at its end."""
        return self.has_started and self.ask.stream


@dataclass(slots=True, kw_only=True)
class Dispatcher:
    fleet: Fleet
    gate: FullEngines
    router: Router
    journal: Journal
    reconciler: Reconciler
    metrics: Metrics
    clock: Clock
    legs: FirstLegs = field(init=False)

    def __post_init__(self) -> None:
        self.legs = FirstLegs(self.fleet, self.router, self.clock)

    def check_length(self, ask: Ask) -> None:
        """Raise PromptTooLong if no ready engine could hold the prompt even if each of its tokens
        were the longest of the model. An engine that does not tell its bounds refuses nothing."""
        longest = 0
        most = 0
        for engine in self.fleet.ready:
            description = engine.description
            if description is None or not ask.model.is_served_by(description.model):
                continue
            if not description.longest_token_bytes:
                return
            if description.max_context_tokens * description.longest_token_bytes > longest * most:
                longest = description.longest_token_bytes
                most = description.max_context_tokens
        if longest and ask.plan.num_bytes > longest * most:
            least = -(-ask.plan.sure_bytes // longest)
            if least > most:
                raise PromptTooLong(least, most)

    async def send(self, dispatch: Dispatch) -> None:
        """Return when an engine has accepted the turn.

        Raise the last engine's error, NoEngineReady, or InvalidRequest if no engine can serve it.
        """
        while True:
            await self._assign(dispatch)
            engine, record = dispatch.engine, dispatch.record
            request = dispatch.ask.generate_request(
                record.request_id, self.clock.monotonic(), engine.capabilities
            )
            if dispatch.leg is not None:
                request = prefill_only(request)
            headers = dispatch.trace.sent(engine.name, record)
            dispatch.may_run = True
            try:
                dispatch.generation = await engine.generate(request, headers)
                return
            except GatewayError as error:
                dispatch.may_run = is_unsure(error) and not isinstance(error, CannotConnect)
                self._failed(dispatch, error)

    async def frames(self, dispatch: Dispatch) -> AsyncIterator[list[Frame]]:
        """Yield the frames of a sent turn, as `Generation.frames` does.

        Raise the error that ended it early. While no byte has gone out a second Started may come:
        the answer begins anew.
        """
        while True:
            generation = dispatch.generation
            assert generation is not None
            try:
                async for frames in generation.frames():
                    if dispatch.leg is not None:
                        self._take_leg(dispatch, dispatch.leg, frames)
                        yield []
                        continue
                    for frame in frames:
                        if isinstance(frame, Started):
                            self._started(dispatch, frame)
                        elif isinstance(frame, Done):
                            dispatch.engine.succeeded()
                    yield over_legs(frames, dispatch.prefilled)
                if dispatch.leg is None:
                    return
                await self.legs.arrived(dispatch.ask, dispatch.leg)
                self._end_leg(dispatch, dispatch.leg.started)
            except GatewayError as error:
                self._failed(dispatch, error)
            finally:
                if generation.num_ignored:
                    self.metrics.ignored_frames.inc(generation.num_ignored)
            await self.send(dispatch)

    async def count(self, ask: Ask) -> int:
        """The prompt's exact tokens, from the engine that would serve it or from the next best.

        While no engine is ready and one is unsure, or was lost, this waits as long as a turn does.
        """
        self.check_length(ask)
        attempts, failure = Attempts(), None
        while True:
            now, ready = self.clock.monotonic(), self.fleet.ready
            try:
                engine = self.router.choose(ask, ready, now, attempts.tried(ready)).engine
            except NoEngineReady as error:
                if not (self.gate.may_come_back(ask) or self._may_return(attempts)):
                    raise told(failure or error) from None
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            attempts.begin(engine.url)
            try:
                return (await engine.count(ask.count_request(engine.capabilities))).input_tokens
            except GatewayError as error:
                attempts.failed(engine.url, error, self.clock.monotonic())
                if attempts.is_last or not is_retried(error) or isinstance(error, EngineTimeout):
                    raise told(error) from None
                failure = error

    def leave(self, dispatch: Dispatch) -> None:
        """End the turn, whatever its outcome. This never awaits; a second call does nothing."""
        if dispatch.choice is None:
            return
        engine, request_id = dispatch.engine, dispatch.record.request_id
        dispatch.trace.left()
        engine.left(request_id, dispatch.choice.ends, has_started=dispatch.has_started)
        if dispatch.generation is not None:
            dispatch.generation.close()
            dispatch.generation = None
            self.gate.moved(engine)

    async def _assign(self, dispatch: Dispatch) -> None:
        """Choose the engine of the next attempt. From then on the turn counts as its load."""
        choice = await self._choose(dispatch)
        if dispatch.choice is None and (leg := self.legs.begin(dispatch.ask, choice)) is not None:
            dispatch.leg, choice = leg, leg.route
            dispatch.record.is_first_leg = True
        engine, record, description = choice.engine, dispatch.record, choice.engine.description
        assert description is not None
        retired = None
        if dispatch.choice is not None:
            if dispatch.may_run:
                retired = dispatch.engine.name, record.request_id
            dispatch.may_run = dispatch.has_started = False
            record.begin_anew()
            if dispatch.prefilled is not None:
                record.first_leg = dispatch.prefilled.usage
        if dispatch.failure is not None:
            self.metrics.retries.labels(reason_of(dispatch.failure)).inc()
        dispatch.choice = choice
        dispatch.attempts.begin(engine.url)
        record.engine, record.engine_model = engine.name, description.model
        engine.assign(
            record.request_id,
            choice.ends,
            choice.to_prefill,
            is_batch=dispatch.ask.is_batch,
            workspace=record.workspace,
        )
        self.gate.assigned(choice.to_prefill, choice.tokens)
        if record.attempt > 1:
            # The journal has the attempt first: after a kill this attempt's counts are the turn's.
            try:
                await self.journal.rewrite(record)
            finally:
                if retired is not None:
                    self.reconciler.retire(*retired)

    async def _choose(self, dispatch: Dispatch) -> Route[Engine]:
        """Choose the best engine that is not crowded.

        If all engines that could take the turn are full, the turn waits, before the other turns of
        its workspace. If they were lost it waits until one is back.
        """
        while True:
            refusing = self.gate.refusing
            busy = [*refusing, *self.gate.crowded(dispatch.ask)]
            for avoided in (busy, refusing) if busy else (busy,):
                try:
                    return self._cheapest(dispatch, avoided)
                except GatewayError as error:
                    failure = dispatch.failure or error
            if self._may_return(dispatch.attempts):
                await asyncio.sleep(_RETURN_SECONDS)
                continue
            if not (refusing or self._may_wait(dispatch, failure)):
                raise told(failure)
            try:
                self._cheapest(dispatch, ())
            except GatewayError as error:
                if not self._may_wait(dispatch, error):
                    raise told(dispatch.failure or error) from None
            await asyncio.sleep(_PAUSE_SECONDS)
            charged = dispatch.is_charged
            with await self.gate.enter(dispatch.ask, is_first=True, is_charged=charged) as passing:
                dispatch.is_charged = passing.is_charged

    def _may_wait(self, dispatch: Dispatch, failure: GatewayError) -> bool:
        """Whether the failure is NoEngineReady and an untried engine may be ready soon."""
        is_first = isinstance(failure, NoEngineReady) and dispatch.attempts.is_first
        return is_first and self.gate.is_unsure(dispatch.ask.model.engine_model)

    def _may_return(self, attempts: Attempts) -> bool:
        """Whether a lost engine may be waited for still."""
        now, seconds = self.clock.monotonic(), self.gate.wait_seconds
        return attempts.may_return(self.fleet.engines, now, seconds)

    def _cheapest(self, dispatch: Dispatch, avoided: Collection[str]) -> Route[Engine]:
        now, ready = self.clock.monotonic(), self.fleet.ready
        tried = dispatch.attempts.tried(ready)
        return self.router.choose(dispatch.ask, ready, now, [*tried, *avoided])

    def _started(self, dispatch: Dispatch, started: Started) -> None:
        choice, record = dispatch.choice, dispatch.record
        assert choice is not None
        engine, ask = choice.engine, dispatch.ask
        usage = started.usage
        dispatch.has_started = True
        dispatch.trace.started(started)
        engine.started(record.request_id, started, [name.digest for name in ask.plan.names])
        if dispatch.unanswered is not None:
            dispatch.unanswered.answered()
        self.gate.moved(engine)
        if record.engine_model is not None and ask.plan.prefixes:
            num_bytes = ask.plan.num_bytes
            self.router.rates.learn(record.engine_model, num_bytes, usage.prompt_tokens)
        record.available_tokens = choice.exact(choice.available, started)
        record.captured_tokens = choice.exact(choice.captured, started)
        reused = usage.cache_read_tokens + usage.automatic_tokens
        self.metrics.prefix_tokens.add(("available",), record.available_tokens)
        self.metrics.prefix_tokens.add(("captured",), record.captured_tokens)
        self.metrics.prefix_tokens.add(("delivered",), reused)

    def _take_leg(self, dispatch: Dispatch, leg: FirstLeg, frames: list[Frame]) -> None:
        """Take in the frames of a first leg. Raise EngineTimeout where it takes too long."""
        engine, now = dispatch.engine, self.clock.monotonic()
        for frame in frames:
            if isinstance(frame, Started):
                leg.started = frame
                names = [name.digest for name in dispatch.ask.plan.names]
                engine.started(dispatch.record.request_id, frame, names)
            elif isinstance(frame, Done):
                engine.succeeded()
        leg.check_time(now)

    def _end_leg(self, dispatch: Dispatch, prefilled: Started | None) -> None:
        """The first leg is over. The turn goes on at the engine that answers it."""
        self.leave(dispatch)
        dispatch.attempts.take_back(dispatch.engine.url)
        dispatch.leg, dispatch.prefilled = None, prefilled

    def _failed(self, dispatch: Dispatch, error: GatewayError) -> None:
        """Note the failure for its engine. Raise it, unless another engine may be tried."""
        engine, request_id = dispatch.engine, dispatch.record.request_id
        now = self.clock.monotonic()
        dispatch.trace.failed(error)
        if isinstance(error, DemandRefused):
            error = DemandRefused(dispatch.ask.plan.in_request(str(error)))
        if is_breakdown(error):
            engine.broke(request_id)
        elif not isinstance(error, NoEngineReady):
            # Any other refusal is an answer. "Not ready" is neither an answer nor a failure.
            engine.succeeded()
        if not dispatch.may_run:
            engine.returned(request_id)
        if dispatch.leg is not None:
            self.legs.failed(dispatch.leg)
            self._end_leg(dispatch, None)
            return
        if dispatch.has_gone_out or not is_retried(error):
            raise error
        if isinstance(error, EngineTimeout) and dispatch.generation is None:
            raise NotServed("no engine took the request in time")
        attempts = dispatch.attempts
        attempts.failed(engine.url, error, now)
        if attempts.is_last or now - dispatch.ask.arrived > RETRY_SECONDS:
            raise told(error)
        self.leave(dispatch)
        dispatch.failure = error
        if type(error) is Overloaded and self.gate.closed(engine):
            # A full engine is not broken. It is asked again when it may have room.
            attempts.take_back(engine.url)
        get_logger("dispatch").info(
            "attempt_failed",
            turn=dispatch.record.id,
            attempt=dispatch.record.attempt,
            engine=engine.name,
            reason=reason_of(error),
        )
