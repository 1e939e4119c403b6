"""Where turns wait while the engines are full: the gateway's own queue, in fair order.

A turn that waits at an engine can't move to another engine that has room first. Engines like vLLM
also serve in the order of arrival, without fairness between workspaces. So the engines' own queues
are kept short. Each engine gets as many turns as it computes together and a few more, and at most
`queue_tokens` of waiting prefill. Further turns wait here.

An engine may be full all the same: other gateways send to it too, or it does not say how many turns
it takes. Its refusal counts until one of our turns moves on there, or for a second.

Each gateway has its own queue: an engine behind n gateways may get n times as much.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from gateway.base.catalogue import is_served
from gateway.base.errors import Overloaded
from gateway.base.metrics import Metrics
from gateway.limits.admission import MAX_IN_FLIGHT, Admission
from gateway.limits.fair_queue import FairQueue, QueueFull, Waiting
from gateway.prompt.ask import Ask
from gateway.routing.engine import Engine

_TICK_SECONDS = 0.2
_CLOSED_SECONDS = 1.0
_MIN_NOT_BEGUN = 2
_LEARNING = 0.1
_PACE_SECONDS = 10.0
_MAX_RETRY_SECONDS = 60
_STILL = 0.05
_BEHIND_SECONDS = 0.02
_BATCH_SHARE = 0.5
"""The part of the turns that an engine computes together that batches may bring it to."""
_UNTOLD_RUNNING = 32


class Passing:
    """A turn that was let in and is not yet an engine's load.

    The context ends when an engine has the turn or the turn has ended. `tokens` is the estimate of
    what it will compute. `is_charged`: the queue counted it as served to its workspace.
    """

    def __init__(self, gate: "Gate", tokens: float) -> None:
        self._gate = gate
        self._tokens = tokens
        self.is_charged = False
        gate.num_passing += 1
        gate.passing_tokens += tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gate = self._gate
        gate.num_passing -= 1
        # With no passing turn the sum is 0, without the remainder of rounding.
        gate.passing_tokens = gate.passing_tokens - self._tokens if gate.num_passing else 0.0


class Gate:
    def __init__(
        self,
        engines: Sequence[Engine],
        metrics: Metrics,
        monotonic: Callable[[], float],
        admission: Admission,
        *,
        wait_seconds: float,
        queue_tokens: int,
    ) -> None:
        self.num_passing = 0
        self.passing_tokens = 0.0
        self._computed_share = 1.0
        self._engines = engines
        self._metrics = metrics
        self._monotonic = monotonic
        self._admission = admission
        self._wait_seconds = wait_seconds
        self._queue_tokens = queue_tokens
        self._queue: FairQueue[_WaitingTurn] = FairQueue()
        self._closed: dict[str, float] = {}
        self._pace = Pace(_PACE_SECONDS)
        self._timer: asyncio.TimerHandle | None = None
        metrics.watch_queue(lambda: len(self._queue), lambda: self._queue.num_tokens)

    async def enter(self, ask: Ask, *, is_first: bool = False, is_charged: bool = False) -> Passing:
        """Wait until an engine has room and it is this turn's turn.

        Return at once if there is room.

        `is_first`: it has been let in before, and an engine refused it; `is_charged` is what was
        told then. Raise Overloaded where the queue
        is full, or its time is over.
        """
        if ask.is_batch:
            return await self._enter_behind(ask)
        if not is_first and not self._queue and self._has_room(ask.model.engine_model):
            return self._pass(ask.prompt_tokens)
        return await self._wait(ask, is_first, is_charged)

    async def _enter_behind(self, ask: Ask) -> Passing:
        """Wait until nobody else waits and an engine has room to spare.

        A turn of a batch has no deadline here; the batch has one.
        """
        while self._queue or not self._has_spare_room(ask.model.engine_model):
            await asyncio.sleep(_BEHIND_SECONDS)
        return self._pass(ask.prompt_tokens)

    def _has_spare_room(self, model: str | None) -> bool:
        """Whether an engine computes fewer turns than the share that batches may fill.

        True also if no engine is ready, so that routing refuses.
        """
        ready = [
            engine
            for engine in self._engines
            if engine.is_ready
            and engine.description is not None
            and is_served(model, engine.description.model)
        ]
        spare = -self.num_passing
        for engine in ready:
            assert engine.description is not None
            most = engine.description.max_running or _UNTOLD_RUNNING
            if engine.url not in self.refusing and not engine.load.num_waiting_tokens:
                spare += max(int(most * _BATCH_SHARE), 1) - engine.load.num_running
        return not ready or spare > 0

    def changed(self) -> None:
        """A turn has begun to answer or is over, so there may be room for another."""
        if self._queue:
            self._admit()

    def assigned(self, to_prefill: int, tokens: int) -> None:
        """An engine has the turn now and must compute `to_prefill` of its `tokens`."""
        share = min(to_prefill / tokens, 1.0) if tokens else 1.0
        self._computed_share += _LEARNING * (share - self._computed_share)
        self.changed()

    def closed(self, engine: Engine) -> bool:
        """The engine refused a turn because it is full.

        Return whether that turn may wait for it.
        """
        if not self._wait_seconds:
            return False
        self._closed = {url: self._closed[url] for url in self.refusing}
        self._closed[engine.url] = self._monotonic() + _CLOSED_SECONDS
        return True

    def moved(self, engine: Engine) -> None:
        """A turn on this engine has begun to answer or is over."""
        self._closed.pop(engine.url, None)
        self.changed()

    @property
    def refusing(self) -> list[str]:
        """URLs of engines that said they are full."""
        if not self._closed:
            return []
        now = self._monotonic()
        return [url for url, until in self._closed.items() if until > now]

    @property
    def crowded(self) -> list[str]:
        """URLs of engines that have a quarter more turns than they compute together.

        Other engines are preferred then, whatever these hold. Below that a held prefix is worth a
        short wait.
        """
        return [
            engine.url
            for engine in self._engines
            if engine.description is not None
            and (most := engine.description.max_running)
            and engine.load.num_running >= most + max(4, most // 4)
        ]

    def may_come_back(self, ask: Ask) -> bool:
        """Whether an unsure engine serves the request, and it may wait for that one still."""
        is_early = self._monotonic() < ask.arrived + self._wait_seconds
        return is_early and self.is_unsure(ask.model.engine_model)

    def is_unsure(self, model: str | None) -> bool:
        """Whether an engine that serves the model is unsure."""
        return any(
            engine.status == "unsure"
            and engine.description is not None
            and not engine.is_draining
            and is_served(model, engine.description.model)
            for engine in self._engines
        )

    async def _wait(self, ask: Ask, is_first: bool, is_charged: bool) -> Passing:
        began = self._monotonic()
        left = ask.arrived + self._wait_seconds - began
        if left <= 0:
            raise self._refusal("deadline")
        future: asyncio.Future[Passing] = asyncio.get_running_loop().create_future()
        waiting = Waiting(
            ask.principal.workspace,
            ask.model.engine_model,
            ask.estimated_tokens,
            _WaitingTurn(future, ask.prompt_tokens),
            is_charged,
        )
        try:
            victims = self._queue.push(waiting, is_first=is_first)
        except QueueFull as full:
            raise self._refusal(full.reason) from None
        for victim in victims:
            if not victim.item.future.done():
                victim.item.future.set_exception(self._refusal("made_way"))
        self._admit()
        has_entered = False
        try:
            async with asyncio.timeout(left):
                passing = await future
            passing.is_charged = waiting.is_charged
            has_entered = True
        except TimeoutError:
            raise self._refusal("deadline") from None
        finally:
            self._queue.remove(waiting)
            self._metrics.waited_seconds.observe(self._monotonic() - began)
            if not has_entered and _has_passed(future):
                future.result().__exit__(None, None, None)
                self.changed()
        return passing

    def _admit(self) -> None:
        """Let in the turns that have room.

        Look again soon, since engines come back by themselves.
        """
        while (waiting := self._queue.pop(self._has_room)) is not None:
            place = waiting.item
            if not place.future.done():
                self._pace.count(self._monotonic())
                place.future.set_result(self._pass(place.prompt_tokens))
        if self._queue and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._admit()

    def _pass(self, prompt_tokens: int) -> Passing:
        return Passing(self, prompt_tokens * self._computed_share)

    def _has_room(self, model: str | None) -> bool:
        """Whether an engine that serves the model has room.

        True also if no engine serves it, so that routing refuses at once. False if its only engine
        is unsure: turns wait for that one.
        """
        if self._admission.in_flight - len(self._queue) > MAX_IN_FLIGHT:
            return False
        now, is_any = self._monotonic(), False
        num_places, num_idle, tokens = -self.num_passing, -self.num_passing, -self.passing_tokens
        for engine in self._engines:
            description = engine.description
            if description is None or engine.is_draining:
                continue
            if not is_served(model, description.model):
                continue
            is_any = is_any or engine.status == "unsure"
            if not engine.is_ready:
                continue
            if not engine.breaker.allows(now):
                continue
            is_any = True
            load, places = engine.load, self._places(engine, description.max_running, now)
            if places <= 0:
                continue
            num_places += places
            tokens += max(self._queue_tokens - load.num_waiting_tokens, 0)
            num_idle += max(_MIN_NOT_BEGUN - (load.num_running - load.num_decoding), 0)
            if num_places > 0 and (tokens > 0 or num_idle > 0):
                return True
        return not is_any

    def _places(self, engine: Engine, max_running: int, now: float) -> int:
        """How many more turns the engine may get, however many tokens they compute."""
        if self._closed.get(engine.url, now) > now:
            return 0
        if not max_running:
            return MAX_IN_FLIGHT
        # A few turns wait at the engine, so that it never waits for us.
        return max_running + max(1, max_running // 16) - engine.load.num_running

    def _refusal(self, reason: str) -> Overloaded:
        self._metrics.refused.labels(reason).inc()
        seconds = self._pace.seconds(len(self._queue) + 1, self._monotonic())
        return Overloaded(retry_after=max(1, math.ceil(min(seconds, _MAX_RETRY_SECONDS))))


@dataclass(frozen=True, slots=True)
class _WaitingTurn:
    """A turn that waits in the queue."""

    future: asyncio.Future[Passing]
    prompt_tokens: int


class Pace:
    """How fast the queue moved lately, counted in events that fade. Pure."""

    def __init__(self, fade_seconds: float) -> None:
        self._fade_seconds = fade_seconds
        self._count = 0.0
        self._at = self._since = 0.0

    def count(self, now: float) -> None:
        before = self._faded(now)
        if before < 1:
            self._since = now
        self._count, self._at = before + 1, now

    def seconds(self, number: int, now: float) -> float:
        """The expected seconds for `number` more events. Infinite if nothing moves."""
        # The faded seconds since the beginning: an even flow would have this weight.
        seen = self._fade_seconds * -math.expm1(-(now - self._since) / self._fade_seconds)
        count = self._faded(now)
        return number * max(seen, 1.0) / count if count > _STILL else math.inf

    def _faded(self, now: float) -> float:
        return self._count * math.exp(-max(now - self._at, 0.0) / self._fade_seconds)


def _has_passed(future: asyncio.Future[Passing]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
