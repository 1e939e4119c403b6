"""Sampled tokens on their way into their parsers.

A grammar takes a token in microseconds, or in milliseconds if it is large, and holds the
interpreter's lock for that. All others of the step wait. So while scopes share the engine, a step
gives tokens to grammars for TAKE_SECONDS; the other choices get theirs in the next steps. A grammar
that a thread works on gets its tokens when the thread is done (`masks.py`).

A step may have drawn several tokens of a choice (`speculation.py`). They are taken one by one, and
no further than to the one that ends the choice.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from engine.cache.ids import TokenId
from engine.clock import Clock
from engine.schedule.request import SequenceState
from engine.schedule.runner import DrawnProbs

TAKE_SECONDS = 0.002
"""How long grammars take tokens in one shared step, and one token longer at most."""

Take = Callable[[SequenceState, TokenId], None]
IsBusy = Callable[[SequenceState], bool]


class Drawn(NamedTuple):
    """A drawn token, and its log-probabilities where they are wanted."""

    token: TokenId
    probs: DrawnProbs | None = None


class SampledTokens:
    """Used from the engine's thread alone."""

    def __init__(self, clock: Clock, take: Take) -> None:
        self._clock = clock
        self._take = take
        self._late: deque[tuple[SequenceState, deque[Drawn]]] = deque()

    def add(self, sequence: SequenceState, drawn: Iterable[Drawn]) -> None:
        """One step's tokens. Those without a grammar are taken at once."""
        tokens = deque(drawn)
        if sequence.parser.mask is not None:
            self._late.append((sequence, tokens))
            return
        while self._take_one(sequence, tokens):
            pass

    def take_late(self, is_busy: IsBusy, *, is_shared: bool) -> list[SequenceState]:
        """Let grammars take their tokens, in the order in which they were sampled.

        Return the sequences that have taken all of theirs.
        """
        begun = self._clock.now()
        taken: list[SequenceState] = []
        busy: list[tuple[SequenceState, deque[Drawn]]] = []
        while self._late:
            sequence, tokens = self._late.popleft()
            # One that has ended needs it no more. One that was preempted samples it again.
            if sequence.finish is not None or sequence.num_pending:
                continue
            if is_busy(sequence):
                busy.append((sequence, tokens))
                continue
            if self._take_one(sequence, tokens):
                self._late.appendleft((sequence, tokens))
            else:
                taken.append(sequence)
            if is_shared and self._clock.now() - begun > TAKE_SECONDS:
                break
        self._late.extendleft(reversed(busy))
        return taken

    def _take_one(self, sequence: SequenceState, tokens: deque[Drawn]) -> bool:
        """Take the first token. Return whether the next may be taken."""
        token, probs = tokens.popleft()
        if probs is not None and sequence.logprobs is not None:
            sequence.logprobs.probs = probs
        self._take(sequence, token)
        # Behind a token that others follow, its keys and values are there: it was proposed.
        return bool(tokens) and sequence.finish is None and sequence.commit_draft()
