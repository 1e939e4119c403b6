"""Sends a turn to an engine, and to the next best one while nothing of an answer has gone out.

An engine may be unreachable, die, fall silent, fail, or refuse. Then the turn goes on at another
engine, as another request. The first request is cancelled and not charged. Where there is no other
engine the turn waits for the lost one, as long as it may wait in the queue. Then the client is told
to come again (`NotServed`). A stream begins with the engine's first frame; a later failure is the
stream's error. An answer in one piece can begin anew elsewhere until it is whole.

If an engine falls silent before it accepts a turn, only one other engine gets that turn. The prompt
may be the cause, and must not stop one engine after another.

A turn may have two legs: one engine prefills its prompt, another one reads it and answers. The
first leg is a request with `max_tokens` 0, whose frames are not passed on. The second leg begins,
as any further attempt does, once an engine that may answer reports that it can read the prefix. A
first leg that fails, or takes too long, is given up. `routing/router.py` decides which turns have
two legs. The turn's usage is that of the first leg: what it wrote counts as written.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace

from engine.protocol import Done, Frame, Started
from gateway.admission.engine_queue import EngineQueue
from gateway.base.catalogue import Catalogue
from gateway.base.clock import Clock
from gateway.base.errors import (
    AnswerAborted,
    DemandRefused,
    EngineTimeout,
    GatewayError,
    NoEngineReady,
    NotServed,
    Overloaded,
    PromptTooLong,
    PutOff,
)
from gateway.base.logs import get_logger
from gateway.base.metrics import Metrics
from gateway.base.rounding import ceil_div
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.prompt.ask import Ask
from gateway.routing.client import CannotConnect
from gateway.routing.engine import Engine
from gateway.routing.fleet import Fleet
from gateway.routing.router import Route, Router, likely_holders, marked_tokens, prefill_elsewhere
from gateway.turn.state import (
    Attempts,
    FirstLeg,
    Turn,
    for_client,
    is_breakdown,
    is_retried,
    is_unsure,
    reason_of,
)

RETRY_SECONDS = 300.0
"""Seconds from the turn's arrival until a failure is no longer retried."""
LEG_SECONDS = 60.0
"""The most seconds that a first leg takes."""
ARRIVAL_SECONDS = 5.0
"""The most seconds until another engine reports that it can read the prefix."""
REST_SECONDS = 30.0
"""Seconds for which an engine gets no first leg after one of its first legs failed."""
_LOOK_SECONDS = 0.02
_PAUSE_SECONDS = 0.1
_RETURN_SECONDS = 0.25
"""The pause between two checks whether a lost engine is back. The fleet polls it every second."""


@dataclass(slots=True, kw_only=True)
class Dispatcher:
    fleet: Fleet
    catalogue: Catalogue
    queue: EngineQueue
    router: Router
    journal: Journal
    reconciler: Reconciler
    metrics: Metrics
    clock: Clock
    # Until when an engine gets no first leg because its last one failed, by the engine's epoch.
    resting: dict[str, float] = field(default_factory=dict)

    def check_length(self, ask: Ask) -> None:
        """Raise PromptTooLong if the prompt can fit into no ready engine's context.

        A prompt is refused if it is too long even when each of its tokens is the model's longest.
        Nothing is refused while an engine does not report its bounds.
        """
        longest_token_bytes = 0
        max_tokens = 0
        for engine in self.fleet.ready:
            description = engine.description
            if description is None or not ask.model.is_served_at(description):
                continue
            if not description.longest_token_bytes:
                return
            max_bytes = description.max_context_tokens * description.longest_token_bytes
            if max_bytes > longest_token_bytes * max_tokens:
                longest_token_bytes = description.longest_token_bytes
                max_tokens = description.max_context_tokens
        if longest_token_bytes and ask.plan.num_bytes > longest_token_bytes * max_tokens:
            least_tokens = ceil_div(ask.plan.sure_bytes, longest_token_bytes)
            if least_tokens > max_tokens:
                raise PromptTooLong(least_tokens, max_tokens)

    async def send(self, turn: Turn) -> None:
        """Send the turn to the engine that `assign` chose. Return when that engine or a later one
        has accepted the turn. Raise the last engine's error, NoEngineReady, or InvalidRequest if no
        engine can serve it."""
        while True:
            engine = turn.engine
            record = turn.record
            request = turn.ask.generate_request(
                record.request_id, self.clock.monotonic(), engine.capabilities, engine.ttls
            )
            if turn.leg is not None:  # the same prompt, and no answer
                sampling = replace(request.sampling, max_tokens=0, num_choices=1)
                request = replace(request, sampling=sampling)
            turn.trace.sent(engine.name, record)
            turn.may_run = True
            try:
                turn.generation = await engine.generate(request)
                turn.was_taken = True
                return
            except GatewayError as error:
                turn.may_run = is_unsure(error) and not isinstance(error, CannotConnect)
                turn.was_taken = turn.was_taken or turn.may_run
                self._failed(turn, error)
            await self.assign(turn)

    async def frames(self, turn: Turn) -> AsyncIterator[list[Frame]]:
        """Yield the frames of a sent turn, as `Generation` does. A second Started may come while no
        byte has gone out: the answer then begins anew."""
        while True:
            generation = turn.generation
            assert generation is not None
            try:
                async for frames in generation:
                    self._note(turn, frames)
                    if turn.leg is None:
                        yield over_legs(frames, turn.prefilled)
                        continue
                    seconds = self.clock.monotonic() - turn.leg.began
                    if turn.leg.started is None and seconds > LEG_SECONDS:
                        raise EngineTimeout
                    yield []
                if turn.leg is None:
                    return
                await self._arrived(turn.ask, turn.leg)
                self._end_leg(turn, turn.leg.started)
            except GatewayError as error:
                self._failed(turn, error)
            finally:
                if generation.num_ignored:
                    self.metrics.count("ignored_frames", amount=generation.num_ignored)
            await self.assign(turn)
            await self.send(turn)

    def _note(self, turn: Turn, frames: Sequence[Frame]) -> None:
        """Note what a turn's frames say about its engine."""
        for frame in frames:
            if isinstance(frame, Started):
                self._started(turn, frame)
            elif isinstance(frame, Done):
                turn.engine.breaker.reset()

    async def count(self, ask: Ask) -> int:
        """The exact number of the prompt's tokens, from the best engine that answers.

        While no engine is ready, this waits for one that is unsure or was lost, for as long as a
        turn waits.
        """
        self.check_length(ask)
        attempts = Attempts()
        failure = None
        while True:
            now = self.clock.monotonic()
            ready = self.fleet.ready
            try:
                engine = self.router.choose(ask, ready, now, attempts.tried(ready)).engine
            except NoEngineReady as error:
                is_early = now < ask.arrived + self.queue.wait_seconds
                may_come_back = is_early and self.queue.is_unsure(ask.model.engine_model)
                if not (may_come_back or self._may_return(attempts)):
                    raise for_client(failure or error) from None
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            attempts.begin(engine.url)
            try:
                return (await engine.count(ask.count_request(engine.capabilities))).input_tokens
            except GatewayError as error:
                if isinstance(error, DemandRefused):
                    error = DemandRefused(ask.plan.in_request(str(error)))
                attempts.failed(engine.url, error, self.clock.monotonic())
                if attempts.is_last or not is_retried(error) or isinstance(error, EngineTimeout):
                    raise for_client(error) from None
                failure = error

    def leave(self, turn: Turn) -> None:
        """End the turn, whatever its outcome. This never awaits; a second call does nothing."""
        if turn.route is None:
            return
        turn.trace.left()
        generation = turn.generation
        if generation is not None:
            generation.close()
            turn.generation = None
        self.queue.left(
            turn.record.request_id,
            turn.route,
            was_accepted=generation is not None,
            has_started=turn.has_started,
        )

    async def assign(self, turn: Turn) -> None:
        """Choose the engine of the next attempt. The turn counts as that engine's load until
        `leave`. Raise NoEngineReady, or InvalidRequest if no engine can serve it."""
        choice = await self._choose(turn)
        if turn.route is None:
            likely = likely_holders(choice, self.fleet.ready)
            if likely and await self._any_holds(likely, choice.expected):
                choice = await self._choose(turn)
            if turn.ask.sampling.max_tokens != 0:
                choice = self._begin_leg(turn, choice)
        engine = choice.engine
        record = turn.record
        description = choice.engine.description
        assert description is not None
        retired = None
        if turn.route is not None:
            if turn.may_run:
                retired = turn.engine.name, record.request_id
            turn.may_run = False
            turn.has_started = False
            record.begin_anew()
            if turn.prefilled is not None:
                record.first_leg = turn.prefilled.usage
        if turn.failure is not None:
            self.metrics.count("retries", reason_of(turn.failure))
        turn.route = choice
        turn.attempts.begin(engine.url)
        record.engine = engine.name
        record.engine_model = description.model
        model = turn.ask.model
        record.model = model.name
        if model.adapter is None:
            record.model = self.catalogue.name_of(description.model, model.id)
        self.queue.assigned(turn.permit, record.request_id, choice)
        if record.attempt > 1:
            # The journal records the attempt before it is sent: after a kill its counts are the
            # turn's.
            try:
                await self.journal.rewrite(record)
            finally:
                if retired is not None:
                    self.reconciler.retire(*retired)

    async def _any_holds(self, engines: Iterable[Engine], names: Sequence[str]) -> bool:
        """Ask engines for names that the index may have forgotten. Return whether an engine has
        one."""
        questions = (engine.ask_names(names) for engine in engines)
        answers = await asyncio.gather(*questions, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, GatewayError):
                raise answer
            if isinstance(answer, GatewayError):
                result = "silent"
            elif answer:
                result = "found"
            else:
                result = "nothing"
            self.metrics.count("asked_engines", result)
        return True in answers

    def _begin_leg(self, turn: Turn, choice: Route[Engine]) -> Route[Engine]:
        """Begin a first leg if another engine is to prefill for the chosen one. Return the route of
        that leg, or else `choice`."""
        ready = self.fleet.ready
        prefilling = [
            engine
            for engine in ready
            if engine.description is not None and engine.description.role == "prefill"
        ]
        # Most fleets have no such engine, and this runs for every turn.
        if not prefilling:
            return choice
        now = self.clock.monotonic()
        able = [engine for engine in prefilling if self.resting.get(_epoch_of(engine), now) <= now]
        prefill = prefill_elsewhere(turn.ask, choice, able, self.router.weights, now)
        if prefill is None:
            return choice
        turn.leg = FirstLeg(prefill, now)
        turn.record.is_first_leg = True
        return prefill

    async def _choose(self, turn: Turn) -> Route[Engine]:
        """Choose the best engine that is not crowded, or else the best crowded one.

        If all engines that could take the turn are full or lost, the turn waits. It waits before
        the other turns of its workspace.
        """
        while True:
            refusing = [*self.queue.refusing, *turn.attempts.resting(self.clock.monotonic())]
            busy = [*refusing, *self.queue.crowded(is_row=turn.ask.is_batch)]
            tries = [busy, refusing] if busy else [busy]
            for avoided in tries:
                try:
                    return self._cheapest(turn, avoided)
                except GatewayError as error:
                    failure = turn.failure or error
            # A turn that waits for an engine takes no room from others.
            self.queue.leave(turn.permit)
            if self._may_return(turn.attempts):
                await asyncio.sleep(_RETURN_SECONDS)
                continue
            if not (refusing or self._may_wait(turn, failure)):
                raise for_client(failure)
            try:
                self._cheapest(turn, ())
            except GatewayError as error:
                if not self._may_wait(turn, error):
                    raise for_client(turn.failure or error) from None
            await asyncio.sleep(_PAUSE_SECONDS)
            await turn.permit.wait_again()

    def _may_wait(self, turn: Turn, failure: GatewayError) -> bool:
        """Whether the failure is NoEngineReady and an untried engine may be ready soon."""
        is_first = isinstance(failure, NoEngineReady) and not turn.attempts.sent
        return is_first and self.queue.is_unsure(turn.ask.model.engine_model)

    def _may_return(self, attempts: Attempts) -> bool:
        """Whether it is worth waiting for a lost engine."""
        now = self.clock.monotonic()
        seconds = self.queue.wait_seconds
        return attempts.may_return(self.fleet.engines, now, seconds)

    def _cheapest(self, turn: Turn, avoided: Collection[str]) -> Route[Engine]:
        now = self.clock.monotonic()
        ready = self.fleet.ready
        tried = turn.attempts.tried(ready)
        return self.router.choose(turn.ask, ready, now, [*tried, *avoided])

    def _started(self, turn: Turn, started: Started) -> None:
        """Note that the engine has begun to answer, or to prefill for another one."""
        choice = turn.route
        record = turn.record
        assert choice is not None
        self.queue.started(record.request_id, choice, started)
        if turn.leg is not None:
            turn.leg.started = started
            return
        ask = turn.ask
        usage = started.usage
        turn.has_started = True
        turn.trace.started(started)
        if record.engine_model is not None and ask.plan.prefixes:
            num_bytes = ask.plan.num_bytes
            self.router.rates.learn(record.engine_model, num_bytes, usage.prompt_tokens)
        record.available_tokens = choice.exact(choice.available, started)
        record.captured_tokens = choice.exact(choice.captured, started)
        if started.approximate is not None:
            self.metrics.count("approximate_turns", started.approximate.method)
        reused = usage.cache_read_tokens + usage.automatic_tokens
        for stage, amount in (
            ("available", record.available_tokens),
            ("captured", record.captured_tokens),
            ("delivered", reused),
        ):
            self.metrics.count("prefix_tokens", stage, amount=amount)

    async def _arrived(self, ask: Ask, leg: FirstLeg) -> None:
        """Wait until an answering engine can read the prefix, for ARRIVAL_SECONDS at most. Return
        at once if no answering engine is ready."""
        ends = leg.route.prompt.ends
        marked = marked_tokens(ask, ends)
        deadline = self.clock.monotonic() + ARRIVAL_SECONDS
        now = self.clock.monotonic()
        while now < deadline:
            prefiller = leg.route.engine.description
            model = prefiller.model if prefiller is not None else None
            answering = [engine for engine in self.fleet.ready if _answers(engine, model)]
            reached = [engine.holdings.coverage(ends, now).prefix for engine in answering]
            if not answering or max(reached) >= marked:
                return
            await asyncio.sleep(_LOOK_SECONDS)
            now = self.clock.monotonic()
        self._rest(leg)

    def _rest(self, leg: FirstLeg) -> None:
        """Give the engine of a failed first leg no other for REST_SECONDS."""
        now = self.clock.monotonic()
        self.resting = {epoch: until for epoch, until in self.resting.items() if until > now}
        self.resting[_epoch_of(leg.route.engine)] = now + REST_SECONDS

    def _end_leg(self, turn: Turn, prefilled: Started | None) -> None:
        """End the first leg. The turn goes on at an engine that answers."""
        self.leave(turn)
        turn.attempts.take_back(turn.engine.url)
        turn.leg = None
        turn.prefilled = prefilled
        turn.prefilled_by = turn.engine.name if prefilled is not None else ""

    def _failed(self, turn: Turn, error: GatewayError) -> None:
        """Note the failure for its engine. Raise it, unless another engine may be tried."""
        engine = turn.engine
        request_id = turn.record.request_id
        now = self.clock.monotonic()
        turn.trace.failed(error)
        if isinstance(error, DemandRefused):
            error = DemandRefused(turn.ask.plan.in_request(str(error)))
        if is_breakdown(error):
            engine.breaker.failed(request_id, now)
        elif not isinstance(error, NoEngineReady | AnswerAborted):
            # Any other refusal is an answer. These two are neither an answer nor a failure.
            engine.breaker.reset()
        if not turn.may_run:
            engine.load.returned(request_id, now)
        if turn.leg is not None:
            self._rest(turn.leg)
            self._end_leg(turn, None)
            return
        if turn.has_gone_out or not is_retried(error):
            raise error
        attempts = turn.attempts
        if isinstance(error, EngineTimeout) and turn.generation is None:
            error = NotServed("no engine took the request in time")
            attempts.num_silent += 1
        attempts.failed(engine.url, error, now)
        if attempts.is_last or now - turn.ask.arrived > RETRY_SECONDS:
            raise for_client(error)
        self.leave(turn)
        turn.failure = error
        if type(error) is Overloaded and self.queue.closed(engine):
            # A full engine is not broken. It is asked again when it may have room.
            attempts.take_back(engine.url)
        elif isinstance(error, PutOff) and self.queue.wait_seconds:
            attempts.put_off(engine.url, now)
        get_logger("dispatch").info(
            "attempt_failed",
            turn=turn.record.id,
            attempt=turn.record.attempt,
            engine=engine.name,
            reason=reason_of(error),
        )


def _answers(engine: Engine, model: str | None) -> bool:
    """Whether the engine has this model and answers, instead of only prefilling."""
    description = engine.description
    return description is not None and description.role != "prefill" and description.model == model


def _epoch_of(engine: Engine) -> str:
    return engine.description.epoch if engine.description is not None else ""


def over_legs(frames: list[Frame], first: Started | None) -> list[Frame]:
    """The answering engine's frames, with the first leg's usage, reasons and times in Started."""
    if first is None:
        return frames
    joined = list(frames)
    missed = {report.segment: report.missed for report in first.breakpoints}
    for index, frame in enumerate(frames):
        if isinstance(frame, Started):
            computed = first.usage.computed_tokens + frame.usage.computed_tokens
            joined[index] = replace(
                frame,
                usage=replace(first.usage, computed_tokens=computed),
                miss_reason=first.miss_reason,
                breakpoints=[
                    replace(report, missed=missed.get(report.segment, UNSET))
                    for report in frame.breakpoints
                ],
                read_tier=first.read_tier,
                bring_back_seconds=first.bring_back_seconds,
                queue_seconds=first.queue_seconds + frame.queue_seconds,
                prefill_seconds=first.prefill_seconds + frame.prefill_seconds,
            )
    return joined
