"""Where turns wait while the engines are full: the gateway's own queue, in fair order.

A turn that waits at an engine can't move to another engine that has room first. Engines like vLLM
also serve in the order of arrival, without fairness between workspaces. So the engines' own queues
are kept short. Each engine gets as many turns as it computes together and a few more, and at most
`queue_tokens` of waiting prefill. Further turns wait here. The bound on prefill does not hold
back a workspace's first unanswered turn: it never waits for others' prompts.

An engine may be full all the same: other gateways send to it too, or it does not say how many turns
it takes. Its refusal counts until one of our turns moves on there, or for a second.

A workspace whose clients keep leaving before the first token has fewer turns at engines at one time
while others have some (`limits/congestion.py`). Its further turns are *held* here, though engines
have room. Being held is no reason to refuse a turn: where its time is over and its workspace's
window alone holds it, it waits on, HELD_SECONDS in all. Turns of other workspaces pass held ones.

Each gateway has its own queue: an engine behind n gateways may get n times as much.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

from gateway.base.catalogue import is_served
from gateway.base.errors import Overloaded
from gateway.base.metrics import QueueMetrics
from gateway.base.settings import Settings
from gateway.limits.admission import MAX_IN_FLIGHT, Admission
from gateway.limits.congestion import CongestionWindows
from gateway.limits.fair_queue import FairQueue, QueueFull, Waiting
from gateway.prompt.ask import Ask
from gateway.routing.engine import Engine
from gateway.routing.fleet import Fleet
from gateway.turn.full_engines import FullEngines
from gateway.turn.idle_room import ROW_SECONDS, IdleRoom
from gateway.turn.passing import Pace, Passing, PassingSum, WaitingTurn, Wanting

HELD_SECONDS = 300.0
"""Seconds from its arrival that a turn may be held by its workspace's window."""
_LEAST_SECONDS = 1.0
_TICK_SECONDS = 0.2
_MIN_NOT_BEGUN = 2
_LEARNING = 0.1
_PACE_SECONDS = 10.0
_MAX_RETRY_SECONDS = 60


class Gate(FullEngines):
    def __init__(
        self,
        engines: Sequence[Engine],
        metrics: QueueMetrics,
        monotonic: Callable[[], float],
        admission: Admission,
        *,
        wait_seconds: float,
        queue_tokens: int,
        num_rows: int,
    ) -> None:
        """At most `num_rows` rows of batches are at engines at one time."""
        self._passing = PassingSum()
        idle_room = IdleRoom(engines, self._passing, monotonic, num_rows)
        super().__init__(engines, monotonic, idle_room, wait_seconds)
        self._computed_share = 1.0
        self._metrics = metrics
        self._admission = admission
        self._queue_tokens = queue_tokens
        self._queue: FairQueue[WaitingTurn] = FairQueue()
        self._windows = CongestionWindows(monotonic, self.changed, lambda: len(engines) // 2)
        self._pace = Pace(_PACE_SECONDS)
        self._timer: asyncio.TimerHandle | None = None
        self._row_timer: asyncio.TimerHandle | None = None
        metrics.watch_queue(
            lambda: len(self._queue),
            lambda: self._queue.num_tokens,
            lambda: self._windows.num_bounded,
        )

    async def enter(self, ask: Ask, *, is_first: bool = False, is_charged: bool = False) -> Passing:
        """Return at once if there is room and the workspace's window is open, else wait."""
        wanting = Wanting.of(ask)
        if wanting.is_batch:
            return await self._enter_behind(wanting)
        workspace, model = wanting.workspace, wanting.model
        if not (is_first or self._is_awaited) and self._windows.is_open(workspace):
            if self._has_room(model) or self._goes_early({}, workspace, model):
                return self._pass(wanting.prompt_tokens, wanting.workspace)
        return await self._wait(wanting, is_first, is_charged)

    async def _enter_behind(self, wanting: Wanting) -> Passing:
        """Wait until an engine has idle room and it is this row's turn.

        A row has no deadline here; its batch has one.
        """
        waiting = self._new_waiting(wanting)
        try:
            self._idle_room.queue.push(waiting)
        except QueueFull as full:
            raise self._refusal(full.reason) from None
        return await self._entered(waiting, self._idle_room.queue, None)

    def changed(self) -> None:
        """A turn has begun to answer or is over, so there may be room for another."""
        if self._queue or self._idle_room.queue:
            self._admit()

    def assigned(self, to_prefill: int, tokens: int) -> None:
        share = min(to_prefill / tokens, 1.0) if tokens else 1.0
        self._computed_share += _LEARNING * (share - self._computed_share)
        self.changed()

    def moved(self, engine: Engine) -> None:
        """A turn on this engine has begun to answer or is over."""
        super().moved(engine)
        self.changed()

    async def _wait(self, wanting: Wanting, is_first: bool, is_charged: bool) -> Passing:
        began = self._monotonic()
        waiting = self._new_waiting(wanting, is_again=is_first, is_charged=is_charged)
        left = wanting.arrived + self.wait_seconds - began
        if left <= 0:
            left = self._more_seconds(waiting)
        try:
            victims = self._queue.push(waiting, is_first=is_first)
        except QueueFull as full:
            raise self._refusal(full.reason) from None
        for victim in victims:
            if not victim.item.future.done():
                victim.item.future.set_exception(self._refusal("made_way"))
        try:
            return await self._entered(waiting, self._queue, left)
        finally:
            self._metrics.waited_seconds.observe(self._monotonic() - began)

    async def _entered(
        self, waiting: Waiting[WaitingTurn], queue: FairQueue[WaitingTurn], left: float | None
    ) -> Passing:
        """Wait in the queue for `left` seconds, longer where the turn is held.

        Raise Overloaded after that.
        """
        has_entered, future = False, waiting.item.future
        self._admit()
        try:
            while not (await asyncio.wait([future], timeout=left))[0]:
                left = self._more_seconds(waiting)
            passing = future.result()
            passing.is_charged = waiting.is_charged
            has_entered = True
        finally:
            queue.remove(waiting)
            if not has_entered and waiting.item.has_passed:
                future.result().give_up()
                self.changed()
        return passing

    def _more_seconds(self, waiting: Waiting[WaitingTurn]) -> float:
        """How much longer a turn whose time is over may wait.

        Raise Overloaded unless its workspace's window alone holds it.
        """
        left = waiting.item.arrived + HELD_SECONDS - self._monotonic()
        if left <= 0 or not self._is_held(waiting):
            raise self._refusal("deadline")
        return min(left, max(self.wait_seconds, _LEAST_SECONDS))

    def _is_held(self, waiting: Waiting[WaitingTurn]) -> bool:
        """Whether the turn waits for its workspace's window."""
        return not (waiting.item.is_again or self._windows.is_open(waiting.workspace))

    @property
    def _is_awaited(self) -> bool:
        """Whether a turn waits here for an engine, and not for its workspace's window."""
        return any(map(self._windows.is_open, self._queue.workspaces))

    def _new_waiting(
        self, wanting: Wanting, *, is_again: bool = False, is_charged: bool = False
    ) -> Waiting[WaitingTurn]:
        future: asyncio.Future[Passing] = asyncio.get_running_loop().create_future()
        item = WaitingTurn(future, wanting.prompt_tokens, wanting.arrived, is_again)
        return Waiting(wanting.workspace, wanting.model, wanting.tokens, item, is_charged)

    def _admit(self) -> None:
        """Let in the turns that have room.

        Look again soon, since engines come back by themselves.
        """
        rows = self._idle_room
        if rows.is_overdue and rows.has_row_left:
            self._let_in_row(self._has_room)
        while (waiting := self._next()) is not None:
            place = waiting.item
            if not place.future.done():
                self._pace.count(self._monotonic())
                passing = self._pass(
                    place.prompt_tokens, waiting.workspace, has_place=place.is_again
                )
                place.future.set_result(passing)
        refusing = self.refusing
        if not self._is_awaited and rows.is_due:
            self._let_in_row(lambda model: rows.is_for(model, refusing))
        loop = asyncio.get_running_loop()
        if (self._queue or rows.queue) and self._timer is None:
            self._timer = loop.call_later(_TICK_SECONDS, self._tick)
        if rows.queue and not rows.is_due and self._row_timer is None:
            self._row_timer = loop.call_later(ROW_SECONDS, self._row_tick)

    def _let_in_row(self, has_room: Callable[[str | None], bool]) -> bool:
        """Let in the next row that has room. Return whether there was one."""
        waiting = self._idle_room.queue.pop(has_room)
        if waiting is None:
            return False
        place = waiting.item
        if not place.future.done():
            self._idle_room.let_in()
            passing = self._pass(place.prompt_tokens, waiting.workspace, is_batch=True)
            place.future.set_result(passing)
        return True

    def _tick(self) -> None:
        self._timer = None
        self._admit()

    def _row_tick(self) -> None:
        self._row_timer = None
        self._admit()

    def _pass(
        self,
        prompt_tokens: int,
        workspace: str,
        *,
        is_batch: bool = False,
        has_place: bool = False,
    ) -> Passing:
        """Let a turn in. `has_place`: in its workspace's window."""
        tokens = prompt_tokens * self._computed_share
        passing = self._passing.enter(tokens, workspace, is_batch=is_batch)
        if not (is_batch or has_place):
            passing.unanswered = self._windows.enter(workspace)
        return passing

    def _next(self) -> Waiting[WaitingTurn] | None:
        """Take out the next turn that may go now."""
        has_place: dict[str | None, bool] = {}
        return self._queue.pop(
            self._has_room,
            lambda one: self._goes_early(has_place, one.workspace, one.kind),
            self._is_held,
        )

    def _goes_early(
        self, has_place: dict[str | None, bool], workspace: str, model: str | None
    ) -> bool:
        """Whether the workspace has no unanswered turn, and an engine has a place, though no room.

        `has_place` keeps the answer about the engines for each model.
        """
        if model not in has_place:
            has_place[model] = self._has_room(model, counts_prefill=False)
        return (
            has_place[model]
            and workspace not in self._passing.workspaces
            and not any(engine.load.has_unanswered(workspace) for engine in self._engines)
        )

    def _has_room(self, model: str | None, *, counts_prefill: bool = True) -> bool:
        """Whether an engine that serves the model has room.

        True also if no engine serves it, so that routing refuses at once. False if its only engine
        is unsure: turns wait for that one. Prefill that waits at engines takes room if
        `counts_prefill`.
        """
        if self._admission.in_flight - len(self._queue) > MAX_IN_FLIGHT:
            return False
        now, is_any = self._monotonic(), False
        num_places = num_idle = -self._passing.num
        tokens = -self._passing.tokens
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
            load, places = engine.load, self._places(engine, now)
            if places <= 0:
                continue
            num_places += places
            tokens += max(self._queue_tokens - load.num_waiting_tokens, 0)
            num_idle += max(_MIN_NOT_BEGUN - (load.num_running - load.num_decoding), 0)
            if num_places > 0 and (tokens > 0 or num_idle > 0 or not counts_prefill):
                return True
        return not is_any

    def _refusal(self, reason: str) -> Overloaded:
        self._metrics.refused.labels(reason).inc()
        seconds = self._pace.seconds(len(self._queue) + 1, self._monotonic())
        return Overloaded(retry_after=max(1, math.ceil(min(seconds, _MAX_RETRY_SECONDS))))


def gate_of(
    settings: Settings,
    fleet: Fleet,
    metrics: QueueMetrics,
    monotonic: Callable[[], float],
    admission: Admission,
) -> Gate:
    """The gate as settings say it."""
    return Gate(
        fleet.engines,
        metrics,
        monotonic,
        admission,
        wait_seconds=settings.queue_seconds,
        queue_tokens=settings.engine_queue_tokens,
        num_rows=settings.batch_concurrency,
    )
