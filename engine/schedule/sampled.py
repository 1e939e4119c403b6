"""Sampled tokens on their way into their parsers.

A grammar takes a token in microseconds, or in milliseconds if it is large, and holds the
interpreter's lock for that. All others of the step wait. So while scopes share the engine, a step
gives tokens to grammars for TAKE_SECONDS; the other choices get theirs in the next steps. A grammar
that a thread works on gets its tokens when the thread is done (`masks.py`).
"""

from collections import deque
from collections.abc import Callable

from engine.cache.ids import TokenId
from engine.clock import Clock
from engine.schedule.request import SequenceState

TAKE_SECONDS = 0.002
"""How long grammars take tokens in one shared step, and one token longer at most."""

Take = Callable[[SequenceState, TokenId], None]
IsBusy = Callable[[SequenceState], bool]


class SampledTokens:
    """Used from the engine's thread alone."""

    def __init__(self, clock: Clock, take: Take) -> None:
        self._clock = clock
        self._take = take
        self._late: deque[tuple[SequenceState, TokenId]] = deque()

    def add(self, sequence: SequenceState, token: TokenId) -> None:
        """A token without a grammar is taken at once."""
        if sequence.parser.mask is None:
            self._take(sequence, token)
        else:
            self._late.append((sequence, token))

    def take_late(self, is_busy: IsBusy, *, is_shared: bool) -> list[SequenceState]:
        """Let grammars take their tokens, in the order in which they were sampled."""
        begun = self._clock.now()
        taken: list[SequenceState] = []
        busy: list[tuple[SequenceState, TokenId]] = []
        while self._late:
            sequence, token = self._late.popleft()
            # One that has ended needs it no more. One that was preempted samples it again.
            if sequence.finish is not None or sequence.num_pending:
                continue
            if is_busy(sequence):
                busy.append((sequence, token))
                continue
            self._take(sequence, token)
            taken.append(sequence)
            if is_shared and self._clock.now() - begun > TAKE_SECONDS:
                break
        self._late.extendleft(reversed(busy))
        return taken
