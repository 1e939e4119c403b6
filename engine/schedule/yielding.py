"""In a step that several scopes share, long prompts give way to first tokens.

A long prompt waits a few steps for the first tokens of other scopes, since a step that only decodes
takes a fraction of the time.
"""

from collections.abc import Sequence

from engine.schedule.pace import StepPace
from engine.schedule.request import SequenceState

FIRST_TOKENS = 3
"""A client sees its first text with one of so many tokens."""
MAX_YIELDED = 3
"""How many steps in a row long prompts wait for others' first tokens."""


class Yielding:
    """Used from the engine's thread alone: `begin` for each step, then the questions."""

    def __init__(self, pace: StepPace) -> None:
        self._pace = pace
        self._urgent: set[str] = set()
        self._num_yielded = 0
        self._has_yielded = False

    def begin(self, running: Sequence[SequenceState], candidate: SequenceState | None) -> None:
        """`candidate` is the first that waits."""
        self._num_yielded = self._num_yielded + 1 if self._has_yielded else 0
        self._has_yielded = False
        self._urgent = {one.scope for one in running if self._is_urgent(one)}
        if candidate is not None:
            self.admitted(candidate)

    def admitted(self, sequence: SequenceState) -> None:
        """This one is to run from this step on."""
        if self._pace.is_short(sequence) and not sequence.is_batch:
            self._urgent.add(sequence.scope)

    def asks(self, sequence: SequenceState) -> bool:
        """Whether this sequence's prompt must wait for the next step."""
        if not self._pace.is_shared or self._num_yielded >= MAX_YIELDED or sequence.is_batch:
            return False
        yields = not self._pace.is_short(sequence) and bool(self._urgent - {sequence.scope})
        self._has_yielded = self._has_yielded or yields
        return yields

    def _is_urgent(self, sequence: SequenceState) -> bool:
        if sequence.is_batch or not sequence.num_pending or not sequence.can_sample:
            return False
        if sequence.num_output >= FIRST_TOKENS:
            return False
        return sequence.request.started_at is not None or self._pace.is_short(sequence)
