"""Two service classes: rows of batches are computed behind the interactive requests.

Batch sequences take no part in a step while an interactive one waits to begin or for its first
tokens. They keep their blocks meanwhile. While interactive ones only decode, every second step
computes batch sequences too. A step of batch sequences alone may be stopped by an interactive
request that comes; what it computed is computed again.

Batch sequences have a floor: where none was computed for FLOOR_SECONDS, the next step computes them
whatever waits, and it is not stopped.
"""

from collections.abc import Iterator, Mapping, Sequence

from engine.schedule.request import SequenceState
from engine.schedule.waiting import WaitingQueue
from engine.schedule.yielding import FIRST_TOKENS

FLOOR_SECONDS = 0.5


class WaitingClasses:
    """The waiting sequences: a queue with a fair order of its own for each service class."""

    def __init__(self) -> None:
        self._interactive = WaitingQueue()
        self._batch = WaitingQueue()

    def of(self, *, is_batch: bool) -> WaitingQueue:
        return self._batch if is_batch else self._interactive

    def __len__(self) -> int:
        return len(self._interactive) + len(self._batch)

    def __iter__(self) -> Iterator[SequenceState]:
        """Batch sequences come last."""
        yield from self._interactive
        yield from self._batch

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._interactive or sequence in self._batch

    @property
    def scopes(self) -> set[str]:
        return self._interactive.scopes | self._batch.scopes

    def add(self, sequence: SequenceState) -> None:
        self.of(is_batch=sequence.is_batch).add(sequence)

    def put_back(self, sequence: SequenceState) -> None:
        """Put a preempted sequence before all others of its class."""
        self.of(is_batch=sequence.is_batch).put_back(sequence)

    def remove(self, sequence: SequenceState) -> None:
        self.of(is_batch=sequence.is_batch).remove(sequence)

    def served(self, sequence: SequenceState) -> int:
        """The computed tokens of its scope in its class, for comparison only."""
        return self.of(is_batch=sequence.is_batch).served(sequence)

    def charge(self, computed: Mapping[str, int], *, is_batch: bool) -> None:
        self.of(is_batch=is_batch).charge(computed)

    def check(self) -> None:
        """Prove every invariant that needs no outside knowledge; raises AssertionError."""
        self._interactive.check()
        self._batch.check()


class BatchShare:
    """Which steps compute batch sequences. Times are seconds of the engine's clock."""

    def __init__(self) -> None:
        self._held_since: float | None = None
        self._had_turn = False

    def allows(self, running: Sequence[SequenceState], waiting: WaitingClasses, now: float) -> bool:
        """Whether the step that begins now computes batch sequences. Asked once a step."""
        if not any(one.is_batch for one in running) and not waiting.of(is_batch=True):
            self._held_since = None
            return False
        interactive = [one for one in running if not one.is_batch]
        if self._held_since is None:
            self._held_since = now
        if not interactive and not waiting.of(is_batch=False):
            return True
        if self.is_overdue(now):
            return True
        if waiting.of(is_batch=False) or any(_waits_for_text(one) for one in interactive):
            return False
        self._had_turn = not self._had_turn
        return self._had_turn

    def is_overdue(self, now: float) -> bool:
        """Whether the floor is due."""
        return self._held_since is not None and now - self._held_since >= FLOOR_SECONDS

    def computed(self) -> None:
        """A step computed batch sequences to its end."""
        self._held_since = None


def _waits_for_text(sequence: SequenceState) -> bool:
    return sequence.can_sample and (sequence.num_pending > 1 or sequence.num_output < FIRST_TOKENS)
