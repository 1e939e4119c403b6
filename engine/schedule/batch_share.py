"""Which steps rows of batches get.

Rows of batches are computed behind the interactive requests. Batch sequences take no part in a step
while an interactive one waits to begin or for its first tokens. They keep their blocks meanwhile.
While interactive sequences only decode, every second step computes batch sequences too. Batch
sequences have a floor: after FLOOR_SECONDS without them the next step computes them, whatever
waits.
"""

from collections.abc import Sequence

from engine.schedule.pace import FIRST_TOKENS
from engine.schedule.request import SequenceState
from engine.schedule.waiting import WaitingClasses

FLOOR_SECONDS = 0.5


class BatchShare:
    """Which steps compute batch sequences. Times are seconds of the engine's clock."""

    def __init__(self) -> None:
        self._waiting_since: float | None = None
        self._had_turn = False

    def allows(self, running: Sequence[SequenceState], waiting: WaitingClasses, now: float) -> bool:
        """Whether the step that begins now computes batch sequences. Asked once a step."""
        if not any(sequence.is_batch for sequence in running) and not waiting[True]:
            self._waiting_since = None
            return False
        interactive = [sequence for sequence in running if not sequence.is_batch]
        if self._waiting_since is None:
            self._waiting_since = now
        if not interactive and not waiting[False]:
            return True
        if self.is_overdue(now):
            return True
        if waiting[False] or any(
            sequence.can_sample and (sequence.num_pending > 1 or sequence.num_output < FIRST_TOKENS)
            for sequence in interactive
        ):
            return False
        self._had_turn = not self._had_turn
        return self._had_turn

    def is_overdue(self, now: float) -> bool:
        """Whether the floor is due."""
        return self._waiting_since is not None and now - self._waiting_since >= FLOOR_SECONDS

    def computed(self) -> None:
        """A step computed batch sequences."""
        self._waiting_since = None
