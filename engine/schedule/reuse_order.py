"""Lets a waiting request pass others of its scope where they would evict what it reuses.

The rule is `cache/residency.py`. Scopes keep their order: only requests of one scope are compared.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from engine.cache.pool import BlockPool
from engine.cache.residency import MAX_COMPARED, Waiting, as_waiting, next_by_reuse
from engine.schedule.request import SequenceState

MAX_LOOKED_AT = 64
"""How many requests of the queue a step looks at for those of one scope."""


class ReuseOrder:
    def __init__(self, pool: BlockPool, max_step_tokens: int) -> None:
        self._pool = pool
        self._max_step_tokens = max_step_tokens
        # The request that is next, and the earlier ones that it passes.
        self._next: SequenceState | None = None
        self._passed: list[SequenceState] = []

    def next(
        self,
        first: SequenceState | None,
        queue: Iterable[SequenceState],
        awaits_twin: Callable[[SequenceState], bool],
    ) -> SequenceState | None:
        """The next request: the first in order, or one of its scope that passes it."""
        self._next, self._passed = None, []
        if first is None or not _is_comparable(first):
            return first
        line = self._line(first, queue)
        while len(line) > 1:
            waiting = [self._as_waiting(sequence) for sequence in line]
            index = next_by_reuse(waiting, self._pool, self._max_step_tokens)
            if index == 0:
                break
            if not awaits_twin(line[index]):
                self._next, self._passed = line[index], line[:index]
                return self._next
            del line[index]
        return first

    def admitted(self, sequence: SequenceState, overtaken: Sequence[SequenceState]) -> None:
        """It has its blocks. Those that it passed, and those in `overtaken`, still wait."""
        passed = self._passed if sequence is self._next else []
        for other in {*passed, *overtaken}:
            other.request.num_overtaken += 1
        for other in passed:
            other.request.overtaken_tokens += sequence.num_pending
        self._next, self._passed = None, []

    def _line(self, first: SequenceState, queue: Iterable[SequenceState]) -> list[SequenceState]:
        line = [first]
        if self._pool.num_empty * self._pool.block_size >= first.num_pending:
            return line  # nothing is evicted for it
        for other in islice(queue, MAX_LOOKED_AT):
            if len(line) == MAX_COMPARED:
                break
            if other.scope == first.scope and other is not first and _is_comparable(other):
                line.append(other)
        return line

    def _as_waiting(self, sequence: SequenceState) -> Waiting:
        request = sequence.request
        assert request.found is not None
        return as_waiting(
            self._pool,
            request.query.digests,
            request.found.read,
            num_overtaken=request.num_overtaken,
            overtaken=request.overtaken_tokens,
        )


def _is_comparable(sequence: SequenceState) -> bool:
    return sequence.is_new and not sequence.lacks_look_up
