"""Which request of a scope goes first, if the first in order would evict what the others reuse."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import PrefixCache
from engine.schedule.request import RequestState, SequenceState

MAX_LOOKED_AT = 64
"""How far into the queue a step looks for requests of one scope."""
MAX_OVERTAKEN = 16
"""How many requests may be admitted before one that came earlier."""
MAX_STEPS = 4
MAX_COMPARED = 16
"""How many requests a step compares."""


class Waiting(NamedTuple):
    """What a waiting request would compute now, and who went before it."""

    # The tokens that it would compute.
    uncached: int
    # The blocks that it would reuse and that have no reference.
    num_unreferenced: int
    # How many requests went before it.
    num_overtaken: int
    # How many tokens were computed by the requests that passed it.
    overtaken_tokens: int

    def patience(self, max_tokens: int) -> int:
        """How many tokens the next request that passes this one may compute."""
        if self.num_overtaken >= MAX_OVERTAKEN:
            return 0
        return max(self.uncached, max_tokens) - self.overtaken_tokens


def next_by_reuse(line: Sequence[Waiting], pool: BlockPool, step_tokens: int) -> int:
    """The index of the next request. `line` is in order of arrival and not empty.

    It is the first in order, unless that would evict what the others reuse. Then it is the one with
    the fewest tokens to compute, as in SGLang (Zheng et al. 2024, section 3). No request starves:
    others pass it MAX_OVERTAKEN times at most. These compute no more tokens together than it does
    itself, or than MAX_STEPS steps do if that is more.
    """
    first, *others = line
    spare = pool.num_reclaimable - sum(waiting.num_unreferenced for waiting in others)
    if spare * pool.block_size >= first.uncached:
        return 0
    max_tokens = MAX_STEPS * step_tokens
    best = 0
    patience = first.patience(max_tokens)
    for index, waiting in enumerate(others, 1):
        if waiting.uncached < line[best].uncached and waiting.uncached <= patience:
            best = index
        patience = min(patience, waiting.patience(max_tokens))
    return best


class ReuseOrder:
    """Lets a waiting request pass others of its scope if they would evict content that it reuses.

    Only requests of one scope are compared. The reuse is estimated from digests. What a request
    really reuses is decided at its admission.
    """

    def __init__(self, cache: PrefixCache, max_step_tokens: int) -> None:
        self._cache = cache
        self._max_step_tokens = max_step_tokens
        # The request that `next` chose, if it passes others.
        self._next: SequenceState | None = None
        # The earlier requests that it passes.
        self._passed: list[SequenceState] = []

    def next(
        self,
        first: SequenceState | None,
        queue: Iterable[SequenceState],
        awaits_twin: Callable[[SequenceState], bool],
    ) -> SequenceState | None:
        """The next request: the first in order, or one of its scope that passes it."""
        self._next = None
        self._passed = []
        if first is None or not _is_comparable(first):
            return first
        line = [first]
        pool = self._cache.pool
        if pool.num_empty * pool.block_size < first.num_pending:  # it evicts something
            for other in islice(queue, MAX_LOOKED_AT):
                if len(line) == MAX_COMPARED:
                    break
                if other.scope == first.scope and other is not first and _is_comparable(other):
                    line.append(other)
        while len(line) > 1:
            waiting = [self._compared(sequence.request) for sequence in line]
            index = next_by_reuse(waiting, pool, self._max_step_tokens)
            if index == 0:
                break
            if not awaits_twin(line[index]):
                self._next = line[index]
                self._passed = line[:index]
                return self._next
            del line[index]
        return first

    def _compared(self, request: RequestState) -> Waiting:
        assert request.lookup is not None
        digests = request.query.digests
        num_resident = self._cache.resident(digests)
        num_referenced = self._cache.resident(digests, num_resident, is_referenced=True)
        cached = max(num_resident * self._cache.pool.block_size, request.lookup.read)
        # The last token is always computed.
        reused = min(cached, digests.num_tokens - 1)
        return Waiting(
            uncached=digests.num_tokens - reused,
            num_unreferenced=num_resident - num_referenced,
            num_overtaken=request.num_overtaken,
            overtaken_tokens=request.overtaken_tokens,
        )

    def admitted(self, sequence: SequenceState, overtaken: Sequence[SequenceState]) -> None:
        """A sequence got its blocks. It passed others, and the sequences in `overtaken`."""
        passed = self._passed if sequence is self._next else []
        for other in {*passed, *overtaken}:
            other.request.num_overtaken += 1
        for other in passed:
            other.request.overtaken_tokens += sequence.num_pending
        self._next = None
        self._passed = []


def _is_comparable(sequence: SequenceState) -> bool:
    return sequence.is_new and not sequence.lacks_look_up
