"""May this turn run now? Its workspace's limits, then the queue. The answer is one permit.

Turns wait here, in fair order, so that an engine with room first gets the next one. Each engine
gets as many as it computes together and a few more, and at most `queue_tokens` of waiting prefill;
a workspace's first unanswered turn never waits for others' prefill. An engine that refuses a turn
counts as full until one of ours moves on there, or for a second. Each gateway has its own queue: an
engine behind n gateways may get n times as much.

**Rows of batches** have a queue of their own, and what room other turns leave. A row is let in
where no other turn waits here or for its first token, and an engine computes fewer than half of the
turns that it computes together. An engine without the capability `service_class`, which would
compute rows behind its other turns, gets FEW of them while it has other turns, or had some in the
last LATELY_SECONDS. One row is let in every ROW_SECONDS, since those that end together would begin
together. Where none was let in for FLOOR_SECONDS, a free place is enough for one.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import TracebackType
from typing import Self

from engine.protocol import Started
from gateway.admission.accounts import MAX_IN_FLIGHT, Wanted, WorkspaceLimits
from gateway.admission.fair_queue import FairQueue, QueueFull, Waiting
from gateway.admission.shared import SharedLimits
from gateway.base.catalogue import is_served
from gateway.base.errors import Overloaded
from gateway.base.metrics import Metrics
from gateway.prompt.ask import Ask
from gateway.routing.engine import Engine
from gateway.routing.router import Route

FEW = 1
LATELY_SECONDS = 0.5
ROW_SECONDS = 0.01
FLOOR_SECONDS = 2.0
_IDLE_SHARE = 0.5
_UNTOLD_RUNNING = 32
_TICK_SECONDS = 0.2
_CLOSED_SECONDS = 1.0
_MIN_NOT_BEGUN = 2
_LEARNING = 0.1
_MOVES = 32
_MOVE_SECONDS = 30.0
_MAX_RETRY_SECONDS = 60


@dataclass(slots=True, eq=False)
class Permit:
    """What admission gives a turn. Its context is the turn: leaving it gives everything back.
    `is_open`: the turn is in the journal, so its close counts what it used. `is_limited`: it has a
    place in its workspace's limits. `is_between`: it was let in and is no engine's load yet; it
    will compute `tokens`. `is_again`: an engine refused it after it was let in. `is_charged`: the
    queue counted it as served."""

    turn_id: str
    ask: Ask
    admission: "Admission"
    is_open: bool = False
    is_limited: bool = False
    is_between: bool = False
    tokens: float = 0.0
    is_again: bool = False
    is_charged: bool = False

    @property
    def workspace(self) -> str:
        return self.ask.principal.workspace

    async def wait_again(self) -> None:
        """Go back to the queue, in front of the workspace's other turns: an engine refused it."""
        self.admission.queue.leave(self)
        self.is_again = True
        await self.admission.queue.enter(self)

    async def give_back(self) -> None:
        """Give the workspace's place back before the client has its whole answer."""
        self._leave_limits()
        if self.admission.shared is not None:
            await self.admission.shared.told(self.workspace)

    def _leave_limits(self) -> None:
        if self.is_limited:
            self.is_limited = False
            self.admission.limits.leave(self.turn_id, self.workspace, is_open=self.is_open)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        queue = self.admission.queue
        was_between = self.is_between
        queue.leave(self)
        self._leave_limits()
        if was_between:
            queue.changed()


@dataclass(frozen=True, slots=True)
class _Item:
    future: asyncio.Future[None]
    permit: Permit


class EngineQueue:
    """`wait_seconds` is how long a turn may wait for an engine with room."""

    def __init__(
        self,
        engines: Sequence[Engine],
        metrics: Metrics,
        monotonic: Callable[[], float],
        in_flight: Callable[[], int],
        *,
        wait_seconds: float,
        queue_tokens: int,
        num_rows: int,
    ) -> None:
        """At most `num_rows` rows of batches are at engines at one time."""
        self.wait_seconds = wait_seconds
        self._engines = engines
        self._metrics = metrics
        self._monotonic = monotonic
        self._in_flight = in_flight
        self._queue_tokens = queue_tokens
        self._max_rows = num_rows
        self._queue: FairQueue[_Item] = FairQueue()
        self._rows: FairQueue[_Item] = FairQueue()
        # Turns between this queue and an engine: all, rows of batches, prefill, workspaces.
        self._num_between = self._rows_between = 0
        self._tokens_between = 0.0
        self._workspaces_between: Counter[str] = Counter()
        self._computed_share = 1.0
        self._row_at = monotonic()
        self._closed: dict[str, float] = {}
        # When the last turns were let in from the queue: how fast it moves.
        self._moved: deque[float] = deque(maxlen=_MOVES)
        self._timer: asyncio.TimerHandle | None = None
        metrics.watch(
            waiting_turns=lambda: self.num_waiting,
            waiting_tokens=lambda: self._queue.num_tokens,
            **{"vllm:num_requests_waiting": lambda: self.num_waiting},
        )

    async def enter(self, permit: Permit) -> None:
        """Return once there is room, for a row of a batch once it is its turn in idle room. A turn
        that is here again goes before its workspace's others. Raise Overloaded if the queue is full
        or the turn's time is over. A row has no deadline here; its batch has one."""
        ask = permit.ask
        is_row = permit.ask.is_batch
        began = self._monotonic()
        workspace = permit.workspace
        model = ask.model.engine_model
        if not (is_row or permit.is_again or self._queue):
            is_first = self._is_first(workspace)
            if self._has_room(model, counts_prefill=not is_first):
                self._let_in(permit)
                return
        seconds = None if is_row else ask.arrived + self.wait_seconds - began
        if seconds is not None and seconds <= 0:
            raise self._refusal("deadline")
        future = asyncio.get_running_loop().create_future()
        item = _Item(future, permit)
        queue = self._rows if is_row else self._queue
        waiting = Waiting(workspace, model, ask.estimated_tokens, item, permit.is_charged)
        try:
            victims = queue.push(waiting, is_first=permit.is_again)
        except QueueFull as full:
            raise self._refusal(full.reason) from None
        for victim in victims:
            if not victim.item.future.done():
                victim.item.future.set_exception(self._refusal("made_way"))
        try:
            self._admit()
            if not (await asyncio.wait([future], timeout=seconds))[0]:
                raise self._refusal("deadline")
            future.result()
        finally:
            queue.remove(waiting)
            if not is_row:
                self._metrics.observe("waited_seconds", self._monotonic() - began)
        permit.is_charged = waiting.is_charged

    # What happens to a turn at an engine is told here, and passed on to the engine's own state.

    def assigned(self, permit: Permit, request_id: str, route: Route[Engine]) -> None:
        """The turn counts as the load of the route's engine from now on, until `left`."""
        is_batch = permit.ask.is_batch
        route.engine.assign(request_id, route, is_batch=is_batch, workspace=permit.workspace)
        share = min(route.to_prefill / route.tokens, 1.0) if route.tokens else 1.0
        self._computed_share += _LEARNING * (share - self._computed_share)
        self.leave(permit)
        self.changed()

    def started(self, permit: Permit, request_id: str, engine: Engine, frame: Started) -> None:
        """The engine has begun to answer the turn."""
        engine.started(request_id, frame, [name.digest for name in permit.ask.plan.names])
        self._moved_on(engine)

    def left(
        self, request_id: str, route: Route[Engine], *, was_accepted: bool, has_started: bool
    ) -> None:
        """The turn is over at the route's engine, in any way. A second call does nothing."""
        route.engine.left(request_id, route, has_started=has_started)
        if was_accepted:
            self._moved_on(route.engine)

    def leave(self, permit: Permit) -> None:
        """The turn is an engine's load now, or over."""
        if not permit.is_between:
            return
        permit.is_between = False
        is_row = permit.ask.is_batch
        self._num_between -= 1
        self._rows_between -= is_row
        workspaces = self._workspaces_between
        workspaces[permit.workspace] -= not is_row
        if not workspaces[permit.workspace]:
            del workspaces[permit.workspace]
        # With no turn between the sum is 0, without the remainder of rounding.
        self._tokens_between -= permit.tokens if self._num_between else self._tokens_between

    def changed(self) -> None:
        """A turn has begun to answer or is over, so there may be room for another."""
        if self._queue or self._rows:
            self._admit()

    def _moved_on(self, engine: Engine) -> None:
        """A turn on this engine has begun to answer or is over."""
        self._closed.pop(engine.url, None)
        self.changed()

    def closed(self, engine: Engine) -> bool:
        """The engine refused a turn: it is full. Return whether the turn may wait for it."""
        if not self.wait_seconds:
            return False
        self._closed = {url: self._closed[url] for url in self.refusing}
        self._closed[engine.url] = self._monotonic() + _CLOSED_SECONDS
        return True

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def refusing(self) -> list[str]:
        """URLs of engines that said they are full."""
        now = self._monotonic()
        return [url for url, until in self._closed.items() if until > now]

    def crowded(self, *, is_row: bool) -> list[str]:
        """URLs of engines that have enough turns, so that others are preferred: a quarter more than
        they compute together, below which a held prefix is worth a short wait. For a row of a batch
        those without room for one."""
        if is_row:
            return [engine.url for engine in self._engines if self._room_for_rows(engine) <= 0]
        return [
            engine.url
            for engine in self._engines
            if engine.description is not None
            and (most := engine.description.max_running)
            and engine.load.num_running >= most + max(4, most // 4)
        ]

    def is_unsure(self, model: str | None) -> bool:
        """Whether an engine that serves the model is unsure."""
        return any(
            engine.status == "unsure"
            and engine.description is not None
            and not engine.is_draining
            and is_served(model, engine.description.model)
            for engine in self._engines
        )

    def _admit(self) -> None:
        """Let in the turns that have room. Look again soon: engines come back by themselves."""
        now = self._monotonic()
        if not self._rows:
            self._row_at = now
        elif now - self._row_at > FLOOR_SECONDS and self._has_row_left:
            self._let_in_row(self._has_room)
        has_place = cache(partial(self._has_room, counts_prefill=False))

        def is_first_with_place(waiting: Waiting[_Item]) -> bool:
            return has_place(waiting.kind) and self._is_first(waiting.workspace)

        while (waiting := self._queue.pop(self._has_room, is_first_with_place)) is not None:
            if not waiting.item.future.done():
                self._moved.append(now)
                self._let_in(waiting.item.permit)
                waiting.item.future.set_result(None)
            has_place.cache_clear()
        if self._rows and not self._queue and now - self._row_at >= ROW_SECONDS:
            self._let_in_row(self._has_idle_room)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue or self._rows:
            is_row_due_soon = bool(self._rows) and now - self._row_at < ROW_SECONDS
            seconds = ROW_SECONDS if is_row_due_soon else _TICK_SECONDS
            self._timer = asyncio.get_running_loop().call_later(seconds, self._admit)

    def _let_in_row(self, has_room: Callable[[str | None], bool]) -> None:
        waiting = self._rows.pop(has_room)
        if waiting is not None and not waiting.item.future.done():
            self._row_at = self._monotonic()
            self._let_in(waiting.item.permit)
            waiting.item.future.set_result(None)

    def _let_in(self, permit: Permit) -> None:
        is_row = permit.ask.is_batch
        workspace = permit.workspace
        permit.is_between = True
        permit.tokens = permit.ask.prompt_tokens * self._computed_share
        self._num_between += 1
        self._rows_between += is_row
        self._workspaces_between[workspace] += not is_row
        self._tokens_between += permit.tokens

    def _is_first(self, workspace: str) -> bool:
        """Whether the workspace has no unanswered turn: then a place is enough for one."""
        return workspace not in self._workspaces_between and not any(
            engine.load.has_unanswered(workspace) for engine in self._engines
        )

    def _has_room(self, model: str | None, *, counts_prefill: bool = True) -> bool:
        """Whether an engine that serves the model has room; waiting prefill takes room if
        `counts_prefill`. True if no engine serves it, so that routing refuses. False if its only
        engine is unsure: turns wait for it."""
        if self._in_flight() - len(self._queue) > MAX_IN_FLIGHT:
            return False
        now = self._monotonic()
        is_any = False
        num_places = num_idle = -self._num_between
        tokens = -self._tokens_between
        for engine in self._engines:
            description = engine.description
            load = engine.load
            if description is None or engine.is_draining:
                continue
            if not is_served(model, description.model):
                continue
            is_any = is_any or engine.status == "unsure"
            if not (engine.is_ready and engine.breaker.allows(now)):
                continue
            is_any = True
            if self._closed.get(engine.url, now) > now:
                continue
            places = MAX_IN_FLIGHT
            most = description.max_running
            if most:
                # A few turns wait at the engine, so that it never waits for us.
                places = most + max(1, most // 16) - load.num_running
            if places <= 0:
                continue
            num_places += places
            tokens += max(self._queue_tokens - load.num_waiting_tokens, 0)
            num_idle += max(_MIN_NOT_BEGUN - (load.num_running - load.num_decoding), 0)
            if num_places > 0 and (tokens > 0 or num_idle > 0 or not counts_prefill):
                return True
        return not is_any

    @property
    def _has_row_left(self) -> bool:
        """Whether this gateway has fewer rows at engines than it may have."""
        num_there = sum(engine.load.num_rows for engine in self._engines)
        return self._rows_between + num_there < self._max_rows

    def _has_idle_room(self, model: str | None) -> bool:
        """Whether an engine that serves the model has room for one more row. True also if no engine
        is ready, so that routing refuses."""
        ready = [
            engine
            for engine in self._engines
            if engine.is_ready
            and engine.description is not None
            and is_served(model, engine.description.model)
        ]
        refusing = self.refusing
        spare = sum(max(self._room_for_rows(e), 0) for e in ready if e.url not in refusing)
        return self._has_row_left and (not ready or spare > self._num_between)

    def _room_for_rows(self, engine: Engine) -> int:
        load = engine.load
        description = engine.description
        if description is None or load.num_unanswered:
            return 0
        most = max(int((description.max_running or _UNTOLD_RUNNING) * _IDLE_SHARE), 1)
        room = most - load.num_running
        if "service_class" in description.capabilities:
            return room
        if load.seconds_without_turns(self._monotonic()) < LATELY_SECONDS:
            room = min(room, FEW - load.num_rows)
        # One prompt at a time: such an engine computes it before whatever comes later.
        return 0 if load.num_waiting_tokens else room

    def _refusal(self, reason: str) -> Overloaded:
        self._metrics.count("refused_turns", reason)
        now = self._monotonic()
        moved = self._moved
        seconds = float(_MAX_RETRY_SECONDS)
        while moved and now - moved[0] > _MOVE_SECONDS:
            moved.popleft()
        if moved:
            # A first turn just let in says little of the pace.
            seen = max(now - moved[0], 0.0 if len(moved) == _MOVES else 1.0)
            seconds = (len(self._queue) + 1) * seen / len(moved)
        return Overloaded(retry_after=max(1, math.ceil(min(seconds, _MAX_RETRY_SECONDS))))


@dataclass(frozen=True, slots=True)
class Admission:
    """`most_cost` says what a turn can cost at most, in nano-dollars. With `shared`, limits hold
    over all gateways."""

    limits: WorkspaceLimits
    queue: EngineQueue
    most_cost: Callable[[Ask], int]
    shared: SharedLimits | None

    async def admit(self, permit: Permit, backlog: int) -> None:
        """Raise Overloaded, RateLimited or SpendLimitReached. `backlog` is the journal's: turns
        that the ledger does not have yet. A row of a batch that waits for idle room takes no place
        of its workspace's turns."""
        ask = permit.ask
        if ask.is_batch:
            await self.queue.enter(permit)
        is_spending = ask.principal.limits.monthly_spend is not None
        wanted = Wanted(
            turn_id=permit.turn_id,
            principal=ask.principal,
            estimate=ask.estimated_tokens,
            backlog=backlog,
            most_cost=self.most_cost(ask) if is_spending else 0,
        )
        if self.shared is None:
            self.limits.take(wanted)
        else:
            await self.shared.take(wanted)
        permit.is_limited = True
        if not ask.is_batch:
            await self.queue.enter(permit)
