"""Computes which tokens may come next, beside the engine's step.

A grammar's mask mostly takes microseconds, and may take a second. So threads compute masks while
the engine goes on. A choice whose mask is not ready does not decode in this step. A mask that takes
longer than MASK_SECONDS ends its choice, and no other. Computing frees the interpreter's lock.

The choices of one request share one state of their grammar behind a lock of the library. A token
that the grammar takes would wait for that lock, and hold the interpreter's lock meanwhile. So the
masks of one request are computed one after another, and its grammar takes no token meanwhile.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from engine.cache.ids import TokenId
from engine.clock import Clock, MonotonicClock
from engine.schedule.output import Mask
from engine.schedule.request import RequestState, SequenceState
from engine.schedule.runner import DrawnProbs

MASK_SECONDS = 10.0
"""By the clock on the wall. The library's own limits end a mask within a second of processor."""
WAIT_SECONDS = 0.005
"""Seconds for which a step waits for masks. Most are ready by then."""
BRIEF_SECONDS = 0.001
"""The same while other scopes wait for the step."""
MAX_THREADS = 4
NICENESS = 5
"""A thread takes a third of the processor that a step takes beside it, as preparing workers do."""
TAKE_SECONDS = 0.002
"""How long grammars take tokens in one shared step, and one token longer at most."""


class _Work:
    """One mask to compute. Time in the queue does not count. `future` is done when the mask is."""

    def __init__(self, mask: Mask, clock: Clock) -> None:
        self.future: Future[None] = Future()
        self._mask = mask
        self._clock = clock
        self._began_at: float | None = None

    def run(self) -> None:
        self._began_at = self._clock.now()
        self._mask.compute()

    def is_late(self, seconds: float) -> bool:
        """Whether it took longer. Call this only while it is computed or waits for a thread."""
        return self._began_at is not None and self._clock.now() - self._began_at > seconds


class MaskPool:
    """Used from the engine's thread alone."""

    def __init__(self, clock: Clock | None = None, *, seconds: float = MASK_SECONDS) -> None:
        """`clock` is real time, also if the engine's lifetimes follow a manual clock."""
        self._clock = clock or MonotonicClock()
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(
            MAX_THREADS, thread_name_prefix="mask", initializer=step_back
        )
        self._pending: dict[SequenceState, _Work] = {}
        # Of each request with a mask at a thread, the masks that wait behind it. The threads
        # change this too.
        self._lines: dict[RequestState, deque[_Work]] = {}
        self._lock = threading.Lock()

    def begin(self, sequences: Iterable[SequenceState]) -> None:
        """Start computing the masks of these sequences, if a grammar binds them."""
        for sequence in sequences:
            mask = sequence.parser.mask
            if mask is None or mask.is_ready or sequence.finish or sequence in self._pending:
                continue
            self._submit(sequence, mask)

    def is_busy(self, sequence: SequenceState) -> bool:
        """Whether a thread has the grammar of this sequence's request."""
        return sequence.request in self._lines

    def settle(self, *, is_brief: bool = False) -> list[SequenceState]:
        """Wait a moment for masks; a shorter one if `is_brief`.

        Return the sequences whose mask failed or takes too long: they must end.
        """
        failed: list[SequenceState] = []
        if not self._pending:
            return failed
        seconds = BRIEF_SECONDS if is_brief else WAIT_SECONDS
        wait([work.future for work in self._pending.values()], seconds)
        for sequence, work in list(self._pending.items()):
            future = work.future
            if not future.done() and not work.is_late(self._seconds):
                continue
            del self._pending[sequence]
            mask = sequence.parser.mask
            has_failed = not future.done() or future.exception() is not None
            if has_failed or (mask is not None and mask.is_failed):
                failed.append(sequence)
            elif mask is not None and not mask.is_ready and not sequence.finish:
                # The mask was ready before its thread was done: a token was taken meanwhile, and
                # `begin` took the thread for one that computes what comes after it.
                self._submit(sequence, mask)
        return failed

    def _submit(self, sequence: SequenceState, mask: Mask) -> None:
        work = self._pending[sequence] = _Work(mask, self._clock)
        with self._lock:
            line = self._lines.get(sequence.request)
            if line is not None:
                line.append(work)
                return
            self._lines[sequence.request] = deque()
        self._start(sequence.request, work)

    def _start(self, request: RequestState, work: _Work) -> None:
        running = self._threads.submit(work.run)
        running.add_done_callback(partial(self._done, request, work))

    def _done(self, request: RequestState, work: _Work, run: "Future[None]") -> None:
        """Start the request's next mask, behind those of other requests. Mostly on a thread."""
        with self._lock:
            line = self._lines[request]
            following = line.popleft() if line else None
            if following is None:
                del self._lines[request]
        error = None if run.cancelled() else run.exception()
        if error is not None:
            work.future.set_exception(error)
        else:
            work.future.set_result(None)
        if following is not None:
            with suppress(RuntimeError):  # the pool was closed
                self._start(request, following)

    def close(self) -> None:
        with self._lock:
            # A cancelled run starts the one behind it, for which the shutdown's lock is taken.
            for line in self._lines.values():
                line.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


def step_back() -> None:
    """Lower the calling thread's priority.

    On Linux niceness is a thread's; elsewhere it would be the process's.
    """
    if sys.platform == "linux":
        os.nice(NICENESS)


class Drawn(NamedTuple):
    """A drawn token, and its log-probabilities where they are wanted."""

    token: TokenId
    probs: DrawnProbs | None = None


class SampledTokens:
    """Sampled tokens on their way into their parsers. Used from the engine's thread alone.

    A grammar takes a token in microseconds, or in milliseconds if it is large, and holds the
    interpreter's lock for that. All others of the step wait. So while scopes share the engine, a
    step gives tokens to grammars for TAKE_SECONDS; the other choices get theirs in the next steps.
    A grammar that a thread works on gets its tokens when the thread is done.

    A step may have drawn several tokens of a choice (`speculation.py`). They are taken one by one,
    and no further than to the one that ends the choice.
    """

    def __init__(self, clock: Clock, take: Callable[[SequenceState, TokenId], None]) -> None:
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

    def take_late(
        self, is_busy: Callable[[SequenceState], bool], *, is_shared: bool
    ) -> list[SequenceState]:
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
