"""Token masks, computed beside the engine's step: which tokens a constraint lets come next.

A mask mostly takes microseconds, and may take a second. So threads compute masks while the engine
goes on. A choice whose mask is not ready does not decode in this step. A mask that takes longer
than MASK_SECONDS ends its choice, and no other. Computing frees the interpreter's lock.

The choices of one request share one state of their grammar behind a lock of the library. If the
grammar took a token while a thread computes a mask, it would wait for that lock and keep the
interpreter's lock. So the masks of one request are one job of a thread, and the request's grammar
takes no token until the job is done.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from engine.cache.ids import TokenId
from engine.clock import Clock, MonotonicClock
from engine.schedule.output import OutputConstraint
from engine.schedule.request import RequestState, SequenceState

MASK_SECONDS = 10.0
"""Seconds of real time. The library's own limits end a mask within a second of processor time."""
WAIT_SECONDS = 0.005
"""Seconds for which a step waits for masks. Most are ready by then."""
BRIEF_SECONDS = 0.001
"""Seconds for which a step waits for masks while other scopes wait for the step."""
MAX_THREADS = 4
NICENESS = 5
"""A thread takes a third of the processor that a step takes beside it, as preparing workers do."""
TAKE_SECONDS = 0.002
"""Seconds after which a shared step gives grammars no further token."""


class _Job:
    """The masks of one request to compute."""

    def __init__(self, constraints: dict[SequenceState, OutputConstraint], clock: Clock) -> None:
        self.constraints = constraints
        # The sequence whose mask is being computed, and when that began.
        self.at: tuple[SequenceState, float] | None = None
        self._clock = clock

    def run(self) -> None:
        for sequence, constraint in self.constraints.items():
            self.at = sequence, self._clock.now()
            constraint.compute()


class TokenMaskPool:
    """Used from the engine's thread alone."""

    def __init__(self, clock: Clock | None = None, *, seconds: float = MASK_SECONDS) -> None:
        """`clock` is real time, also if the engine's lifetimes follow a manual clock."""
        self._clock = clock or MonotonicClock()
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(
            MAX_THREADS, thread_name_prefix="token-mask", initializer=step_back
        )
        self._jobs: dict[RequestState, tuple[_Job, Future[None]]] = {}
        # Sequences that came while their request had a job. That job may lack their masks.
        self._wanted: dict[SequenceState, None] = {}

    def begin(self, sequences: Iterable[SequenceState]) -> None:
        """Start computing the masks of these sequences, as far as they have a constraint."""
        wanted: dict[RequestState, dict[SequenceState, OutputConstraint]] = {}
        for sequence in sequences:
            constraint = sequence.parser.constraint
            if constraint is None or constraint.is_ready or sequence.finish:
                continue
            if sequence.request in self._jobs:
                self._wanted[sequence] = None
            else:
                wanted.setdefault(sequence.request, {})[sequence] = constraint
        for request, constraints in wanted.items():
            job = _Job(constraints, self._clock)
            self._jobs[request] = job, self._threads.submit(job.run)

    def is_busy(self, sequence: SequenceState) -> bool:
        """Whether a thread has the grammar of this sequence's request."""
        return sequence.request in self._jobs

    def settle(self, *, is_brief: bool = False) -> list[SequenceState]:
        """Wait a moment for masks. With `is_brief` the moment is shorter.

        Return the sequences whose mask failed or takes too long: they must end.
        """
        if not self._jobs:
            return []
        wait([run for _, run in self._jobs.values()], BRIEF_SECONDS if is_brief else WAIT_SECONDS)
        failed: dict[SequenceState, None] = {}
        for request, (job, run) in list(self._jobs.items()):
            if run.done():
                del self._jobs[request]
                if run.exception() is not None and job.at is not None:
                    failed[job.at[0]] = None
                failed |= {
                    sequence: None
                    for sequence, constraint in job.constraints.items()
                    if constraint.is_failed
                }
                # A token may have been taken meanwhile, behind which another mask is wanted.
                self._wanted |= dict.fromkeys(job.constraints)
            elif job.at is not None and self._clock.now() - job.at[1] > self._seconds:
                if job.at[0].finish is None:
                    failed[job.at[0]] = None
        wanted = self._wanted
        self._wanted = {}
        self.begin(sequence for sequence in wanted if sequence not in failed)
        return list(failed)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def step_back() -> None:
    """Lower the calling thread's priority.

    On Linux niceness is a thread's; elsewhere it would be the process's.
    """
    if sys.platform == "linux":
        os.nice(NICENESS)


class SampledTokens:
    """Sampled tokens on their way into their parsers. Used from the engine's thread alone.

    A grammar takes a token in microseconds, or in milliseconds if it is large. It keeps the
    interpreter's lock for that, and all others of the step wait. So while scopes share the engine,
    a step gives tokens to grammars for TAKE_SECONDS. The other choices get theirs in the next
    steps. A grammar that a thread works on gets its token when the thread is done.
    """

    def __init__(self, clock: Clock, take: Callable[[SequenceState, TokenId], None]) -> None:
        self._clock = clock
        self._take = take
        self._late: deque[tuple[SequenceState, TokenId]] = deque()

    def add(self, sequence: SequenceState, tokens: Sequence[TokenId]) -> None:
        """Give a choice one step's tokens.

        A choice with a constraint has one token, which its grammar takes later. Other choices take
        their tokens at once, up to the one that ends the choice.
        """
        if sequence.parser.constraint is not None:
            self._late.append((sequence, tokens[0]))
            return
        for index, token in enumerate(tokens):
            if index:
                # A token that others follow was proposed: its keys and values are there. Where
                # another request has a reference to their block since, they are computed again.
                if sequence.finish is not None or not sequence.table.can_commit:
                    return
                sequence.table.commit(sequence.tokens[-1:])
            self._take(sequence, token)

    def take_late(
        self, is_busy: Callable[[SequenceState], bool], *, is_shared: bool
    ) -> list[SequenceState]:
        """Let grammars take their tokens, in the order in which they were sampled.

        Return the sequences that have taken theirs.
        """
        begun = self._clock.now()
        taken: list[SequenceState] = []
        busy: list[tuple[SequenceState, TokenId]] = []
        while self._late:
            sequence, token = self._late.popleft()
            # An ended sequence needs no token. A preempted sequence samples its token again.
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
