"""Rows of batches have a queue of their own, and get the room that other turns leave.

A row is let in while no other turn waits here or for its first token, and an engine computes fewer
than half of the turns that it can compute together. An engine with the capability `service_class`
computes rows behind its other turns. Any other engine gets FEW rows while it has other turns, or
had some in the last LATELY_SECONDS. One row is let in every ROW_SECONDS, since rows that end
together would begin together. If none was let in for FLOOR_SECONDS, a free place is enough for one.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gateway.admission.between import Between, QueuedTurn
from gateway.admission.fair_queue import FairQueue
from gateway.base.catalogue import is_served
from gateway.routing.engine import Engine

FEW = 1
LATELY_SECONDS = 0.5
ROW_SECONDS = 0.01
FLOOR_SECONDS = 2.0
_IDLE_SHARE = 0.5
_UNTOLD_RUNNING = 32


@dataclass(frozen=True, slots=True)
class WaitingTurn:
    """A turn in a queue. The future ends when the turn is let in, or with the error of a
    refusal."""

    future: asyncio.Future[None]
    turn: QueuedTurn


class BatchRows:
    """The waiting rows, and where they may go. At most `max_rows` are at engines at one time."""

    def __init__(
        self,
        engines: Sequence[Engine],
        between: Between,
        monotonic: Callable[[], float],
        max_rows: int,
    ) -> None:
        self.queue: FairQueue[WaitingTurn] = FairQueue()
        self._engines = engines
        self._between = between
        self._monotonic = monotonic
        self._max_rows = max_rows
        self._let_in_at = monotonic()

    def note_if_empty(self) -> None:
        """Start the time anew after which a row is overdue, if no row waits."""
        if not self.queue:
            self._let_in_at = self._monotonic()

    @property
    def is_overdue(self) -> bool:
        """Whether a free place is enough for the next row."""
        waited = self._monotonic() - self._let_in_at
        return bool(self.queue) and waited > FLOOR_SECONDS and self._may_have_more

    @property
    def is_due(self) -> bool:
        """Whether the next row may be let in where an engine is idle enough."""
        return bool(self.queue) and self._monotonic() - self._let_in_at >= ROW_SECONDS

    def pop(self, has_room: Callable[[str | None], bool]) -> WaitingTurn | None:
        """Take the row whose turn it is, if there is room for its model."""
        waiting = self.queue.pop(has_room)
        if waiting is None or waiting.item.future.done():
            return None
        self._let_in_at = self._monotonic()
        return waiting.item

    def has_idle_room(self, model: str | None, refusing: Collection[str]) -> bool:
        """Whether an engine that serves the model, and is not `refusing` by its URL, has room for
        one more row. True also if no engine is ready, so that routing refuses."""
        ready = [
            engine
            for engine in self._engines
            if engine.is_ready
            and engine.description is not None
            and is_served(model, engine.description.model)
        ]
        open_engines = [engine for engine in ready if engine.url not in refusing]
        room = sum(max(self.room_at(engine), 0) for engine in open_engines)
        return self._may_have_more and (not ready or room > self._between.num)

    def room_at(self, engine: Engine) -> int:
        """For how many more rows the engine has room; less than 1 where it has none."""
        load = engine.load
        description = engine.description
        if description is None or load.num_unanswered:
            return 0
        most = max(int((description.max_running or _UNTOLD_RUNNING) * _IDLE_SHARE), 1)
        room = most - load.num_running
        if "service_class" in description.known_capabilities:
            return room
        if load.seconds_without_turns(self._monotonic()) < LATELY_SECONDS:
            room = min(room, FEW - load.num_rows)
        # One prompt at a time, because such an engine computes it before whatever comes later.
        return 0 if load.num_waiting_tokens else room

    @property
    def _may_have_more(self) -> bool:
        """Whether this gateway has fewer rows at engines than it may have."""
        num_there = sum(engine.load.num_rows for engine in self._engines)
        return self._between.num_rows + num_there < self._max_rows
