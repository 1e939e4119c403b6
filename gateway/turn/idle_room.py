"""The room that engines have for rows of batches: what other turns leave.

A row is let in where no other turn waits at the gateway or for its first token, and an engine
computes fewer than half of the turns that it computes together. An engine with the capability
`service_class` computes rows behind its other turns by itself. Any other engine gets FEW rows while
it has other turns, or had some in the last LATELY_SECONDS.

Rows that end together would begin together, and a turn that comes then would wait for all of them
here. So one is let in every ROW_SECONDS.

Rows have a floor: where none was let in for FLOOR_SECONDS, a free place is enough for one.
"""

from collections.abc import Callable, Collection, Sequence

from gateway.base.catalogue import is_served
from gateway.limits.fair_queue import FairQueue
from gateway.routing.engine import Engine
from gateway.turn.passing import PassingSum, WaitingTurn

FEW = 1
LATELY_SECONDS = 0.5
ROW_SECONDS = 0.01
FLOOR_SECONDS = 2.0
_SHARE = 0.5
_UNTOLD_RUNNING = 32


class IdleRoom:
    """`queue` has the rows that wait. `num_rows` of this gateway are at engines at most."""

    def __init__(
        self,
        engines: Sequence[Engine],
        passing: PassingSum,
        monotonic: Callable[[], float],
        num_rows: int,
    ) -> None:
        self.queue: FairQueue[WaitingTurn] = FairQueue()
        self._engines = engines
        self._passing = passing
        self._monotonic = monotonic
        self._num_rows = num_rows
        self._let_in_at = monotonic()

    def let_in(self) -> None:
        self._let_in_at = self._monotonic()

    @property
    def is_due(self) -> bool:
        return self._monotonic() - self._let_in_at >= ROW_SECONDS

    @property
    def is_overdue(self) -> bool:
        """Whether the floor is due: rows wait, and none was let in for long."""
        if not self.queue:
            self.let_in()
        return self._monotonic() - self._let_in_at > FLOOR_SECONDS

    @property
    def has_row_left(self) -> bool:
        """Whether this gateway has fewer rows at engines than it may have."""
        num_there = sum(engine.load.num_rows for engine in self._engines)
        return self._passing.num_rows + num_there < self._num_rows

    def is_for(self, model: str | None, refusing: Collection[str]) -> bool:
        """Whether an engine that serves the model has room for one more row.

        True also if no engine is ready, so that routing refuses.
        """
        ready = [
            engine
            for engine in self._engines
            if engine.is_ready
            and engine.description is not None
            and is_served(model, engine.description.model)
        ]
        spare = sum(max(self._spare(one), 0) for one in ready if one.url not in refusing)
        return self.has_row_left and (not ready or spare > self._passing.num)

    def without(self) -> list[str]:
        """URLs of engines without room for a row."""
        return [engine.url for engine in self._engines if self._spare(engine) <= 0]

    def _spare(self, engine: Engine) -> int:
        """How many more rows the engine may get."""
        load, description = engine.load, engine.description
        if description is None or load.num_unanswered:
            return 0
        most = max(int((description.max_running or _UNTOLD_RUNNING) * _SHARE), 1)
        room = most - load.num_running
        if "service_class" in description.capabilities:
            return room
        if load.seconds_without_turns(self._monotonic()) < LATELY_SECONDS:
            room = min(room, FEW - load.num_rows)
        # One prompt at a time: such an engine computes it before whatever comes later.
        return 0 if load.num_waiting_tokens else room
