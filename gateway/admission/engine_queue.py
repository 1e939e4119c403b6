"""The queue of turns for an engine, in fair order. The next turn goes in when an engine has room.

Each engine gets as many turns as it computes together and a few more, and at most `queue_tokens` of
waiting prefill. A workspace's first unanswered turn never waits for others' prefill. An engine that
refuses a turn counts as full for a second, or until one of our turns moves on there. Each gateway
has its own queue, so an engine behind n gateways may get n times as much. Rows of batches wait in a
queue of their own (`batch_rows.py`).
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial

from engine.protocol import Started
from gateway.admission.accounts import MAX_IN_FLIGHT
from gateway.admission.batch_rows import ROW_SECONDS, BatchRows, WaitingTurn
from gateway.admission.between import Between, QueuedTurn
from gateway.admission.fair_queue import FairQueue, QueueFull, Waiting
from gateway.base.catalogue import is_served
from gateway.base.errors import Overloaded
from gateway.base.metrics import Metrics
from gateway.routing.engine import Engine
from gateway.routing.router import Route

_TICK_SECONDS = 0.2
_CLOSED_SECONDS = 1.0
_MIN_NOT_BEGUN = 2
_MOVES = 32
_MOVE_SECONDS = 30.0
_MAX_RETRY_SECONDS = 60


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
        self._queue: FairQueue[WaitingTurn] = FairQueue()
        self._between = Between()
        self._rows = BatchRows(engines, self._between, monotonic, num_rows)
        # Until when each engine counts as full, by its URL.
        self._closed: dict[str, float] = {}
        # When the last turns were let in from the queue: how fast it moves.
        self._moved: deque[float] = deque(maxlen=_MOVES)
        self._timer: asyncio.TimerHandle | None = None
        metrics.watch(
            waiting_turns=lambda: self.num_waiting,
            waiting_tokens=lambda: self._queue.num_tokens,
            **{"vllm:num_requests_waiting": lambda: self.num_waiting},
        )

    async def enter(self, turn: QueuedTurn) -> None:
        """Return once the turn is let in. A row of a batch is let in where an engine is idle
        enough.

        A turn that an engine refused goes before its workspace's other turns. Raise Overloaded if
        the queue is full or the turn's time is over. A row has no deadline here; its batch has one.
        """
        ask = turn.ask
        is_row = turn.is_row
        began = self._monotonic()
        workspace = turn.workspace
        model = ask.model.engine_model
        if not (is_row or turn.is_again or self._queue):
            is_first = self._is_first(workspace)
            if self._has_room(model, counts_prefill=not is_first):
                self._between.add(turn)
                return
        seconds = None if is_row else ask.arrived + self.wait_seconds - began
        if seconds is not None and seconds <= 0:
            raise self._refusal("deadline")
        future = asyncio.get_running_loop().create_future()
        item = WaitingTurn(future, turn)
        queue = self._rows.queue if is_row else self._queue
        waiting = Waiting(workspace, model, ask.estimated_tokens, item, turn.charged)
        try:
            victims = queue.push(waiting, is_first=turn.is_again)
        except QueueFull as full:
            raise self._refusal(full.reason) from None
        for victim in victims:
            if not victim.item.future.done():
                victim.item.future.set_exception(self._refusal("made_way"))
        try:
            self._admit()
            done, _ = await asyncio.wait([future], timeout=seconds)
            if not done:
                raise self._refusal("deadline")
            future.result()
        finally:
            queue.remove(waiting)
            if not is_row:
                self._metrics.observe("waited_seconds", self._monotonic() - began)
        turn.charged = waiting.charged

    # What happens to a turn at an engine is told here, and passed on to the engine's own state.

    def assigned(self, turn: QueuedTurn, request_id: str, route: Route[Engine]) -> None:
        """Count the turn as the load of the route's engine, until `left`."""
        route.engine.assign(request_id, route, is_batch=turn.is_row, workspace=turn.workspace)
        computed_share = min(route.to_prefill / route.tokens, 1.0) if route.tokens else 1.0
        self._between.learn(computed_share)
        self._between.remove(turn)
        # What it reads costs the engine nothing. A turn that goes on at another engine comes here
        # again, so only what it was charged too much is given back.
        num_read = int(turn.ask.prompt_tokens * (1.0 - computed_share))
        surplus = max(turn.charged - (turn.ask.estimated_tokens - num_read), 0)
        queue = self._rows.queue if turn.is_row else self._queue
        queue.give_back(turn.workspace, surplus)
        turn.charged -= surplus
        self.changed()

    def started(self, request_id: str, route: Route[Engine], frame: Started) -> None:
        """Note that the route's engine has begun to answer the turn."""
        route.engine.started(request_id, frame, route.prompt.ends.digests)
        self._moved_on(route.engine)

    def left(
        self, request_id: str, route: Route[Engine], *, was_accepted: bool, has_started: bool
    ) -> None:
        """Note that the turn is over at the route's engine, however it ended. A second call does
        nothing."""
        route.engine.left(request_id, route, has_started=has_started)
        if was_accepted:
            self._moved_on(route.engine)

    def leave(self, turn: QueuedTurn) -> None:
        """Note that the turn goes to no engine now. A second call does nothing."""
        self._between.remove(turn)

    def changed(self) -> None:
        """Let waiting turns in: a turn has begun to answer or is over, so there may be room."""
        if self._queue or self._rows.queue:
            self._admit()

    def _moved_on(self, engine: Engine) -> None:
        """Note that a turn on this engine has begun to answer or is over."""
        self._closed.pop(engine.url, None)
        self.changed()

    def closed(self, engine: Engine) -> bool:
        """Note that the engine refused a turn because it is full. Return whether the turn may wait
        for it."""
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
        """URLs of engines that have enough turns, so that other engines are preferred.

        Such an engine has a quarter more turns than it computes together. Below that a held prefix
        is worth a short wait. For a row of a batch they are the engines without room for a row.
        """
        if is_row:
            return [engine.url for engine in self._engines if self._rows.room_at(engine) <= 0]
        return [engine.url for engine in self._engines if has_enough(engine)]

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
        """Let in the turns that have room. Try again soon, since engines come back by
        themselves."""
        self._rows.note_if_empty()
        if self._rows.is_overdue:
            self._let_in_row(self._has_room)
        self._let_in_turns()
        if self._rows.is_due and not self._queue:
            self._let_in_row(self._has_idle_room)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue or self._rows.queue:
            is_row_due_soon = bool(self._rows.queue) and not self._rows.is_due
            seconds = ROW_SECONDS if is_row_due_soon else _TICK_SECONDS
            self._timer = asyncio.get_running_loop().call_later(seconds, self._admit)

    def _let_in_turns(self) -> None:
        has_place = cache(partial(self._has_room, counts_prefill=False))

        def is_first_with_place(waiting: Waiting[WaitingTurn]) -> bool:
            return has_place(waiting.kind) and self._is_first(waiting.workspace)

        while (waiting := self._queue.pop(self._has_room, is_first_with_place)) is not None:
            if not waiting.item.future.done():
                self._moved.append(self._monotonic())
                self._let_in(waiting.item)
            has_place.cache_clear()

    def _let_in_row(self, has_room: Callable[[str | None], bool]) -> None:
        row = self._rows.pop(has_room)
        if row is not None:
            self._let_in(row)

    def _let_in(self, waiting: WaitingTurn) -> None:
        self._between.add(waiting.turn)
        waiting.future.set_result(None)

    def _has_idle_room(self, model: str | None) -> bool:
        return self._rows.has_idle_room(model, self.refusing)

    def _is_first(self, workspace: str) -> bool:
        """Whether the workspace has no unanswered turn. Its first one needs only a place."""
        return not self._between.has_turn_of(workspace) and not any(
            engine.load.has_unanswered(workspace) for engine in self._engines
        )

    def _has_room(self, model: str | None, *, counts_prefill: bool = True) -> bool:
        """Whether an engine that serves the model has room. With `counts_prefill` waiting prefill
        takes room.

        True also if no engine serves the model, so that routing refuses. False if its only engine
        is unsure, so that turns wait for it.
        """
        if self._in_flight() - len(self._queue) > MAX_IN_FLIGHT:
            return False
        now = self._monotonic()
        is_any = False
        num_places = -self._between.num
        num_idle = -self._between.num
        tokens = -self._between.tokens
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

    def _refusal(self, reason: str) -> Overloaded:
        self._metrics.count("refused_turns", reason)
        now = self._monotonic()
        moved = self._moved
        seconds = float(_MAX_RETRY_SECONDS)
        while moved and now - moved[0] > _MOVE_SECONDS:
            moved.popleft()
        if moved:
            elapsed = max(now - moved[0], 0.0)
            if len(moved) < _MOVES:
                elapsed = max(elapsed, 1.0)  # a turn that was just let in says little of the pace
            seconds = (len(self._queue) + 1) * elapsed / len(moved)
        return Overloaded(retry_after=max(1, math.ceil(min(seconds, _MAX_RETRY_SECONDS))))


def has_enough(engine: Engine) -> bool:
    """Whether the engine has a quarter more turns than it computes together."""
    if engine.description is None or not engine.description.max_running:
        return False
    most = engine.description.max_running
    return engine.load.num_running >= most + max(4, most // 4)
