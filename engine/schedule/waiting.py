"""The waiting requests, their fair order, and the service classes.

There is one line per scope, in order of arrival. The next turn is the scope's that got the fewest
computed tokens; of equal ones the one's that was served longest ago. A scope that comes, or comes
back, starts level with the least served of the others, so that no scope saves up turns by staying
away. A preempted sequence comes before all others.

Rows of batches are computed behind the interactive requests. Batch sequences take no part in a step
while an interactive one waits to begin or for its first tokens. They keep their blocks meanwhile.
While interactive ones only decode, every second step computes batch sequences too. They have
a floor: where none was computed for FLOOR_SECONDS, the next step computes them whatever waits.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import PrefixCache
from engine.schedule.pace import FIRST_TOKENS
from engine.schedule.request import SequenceState

MAX_IDLE_SCOPES = 1024
MAX_LOOKED_AT = 64
"""How many requests of the queue a step looks at for those of one scope."""
FLOOR_SECONDS = 0.5
MAX_OVERTAKEN = 16
"""How many requests may be admitted before one that came earlier."""
MAX_STEPS = 4
MAX_COMPARED = 16
"""How many requests a step compares."""


class WaitingQueue:
    def __init__(self) -> None:
        self._preempted: deque[SequenceState] = deque()
        self._lines: dict[str, deque[SequenceState]] = {}
        self._served: dict[str, int] = {}
        self._served_at: dict[str, int] = {}
        self._num_steps = 0
        self._level = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[SequenceState]:
        """The requests in the order of their turns, if no tokens are computed in between."""
        yield from self._preempted
        served = self._served
        at = self._served_at
        for scope in sorted(self._lines, key=lambda name: (served[name], at.get(name, 0))):
            yield from self._lines[scope]

    def __contains__(self, sequence: SequenceState) -> bool:
        return sequence in self._preempted or sequence in self._lines.get(sequence.scope, ())

    @property
    def scopes(self) -> set[str]:
        return {*self._lines, *(sequence.scope for sequence in self._preempted)}

    def add(self, sequence: SequenceState) -> None:
        """Put a sequence last in its scope's line."""
        scope = sequence.scope
        if scope not in self._lines:
            self._lines[scope] = deque()
            self._served[scope] = max(self.served(sequence), self._level)
        self._lines[scope].append(sequence)
        self._size += 1

    def put_back(self, sequence: SequenceState) -> None:
        """Put a preempted sequence before all others."""
        self._preempted.appendleft(sequence)
        self._size += 1

    def remove(self, sequence: SequenceState) -> None:
        """Take out a sequence that runs now or has ended."""
        if sequence in self._preempted:
            self._preempted.remove(sequence)
        else:
            line = self._lines[sequence.scope]
            line.remove(sequence)
            if not line:
                del self._lines[sequence.scope]
        self._size -= 1

    def served(self, sequence: SequenceState) -> int:
        """The scope's computed tokens, for comparison only."""
        return self._served.get(sequence.scope, self._level)

    def charge(self, computed: Mapping[str, int]) -> None:
        """Charge a planned step's tokens, by scope."""
        self._num_steps += 1
        for scope, tokens in computed.items():
            self._served_at[scope] = self._num_steps
            self._served[scope] = self._served.get(scope, self._level) + tokens
        active = computed.keys() | self._lines.keys()
        if active:
            self._level = max(self._level, min(self._served[scope] for scope in active))
        if len(self._served) > len(active) + MAX_IDLE_SCOPES:
            # A scope below the level would start from the level again anyway.
            self._served = {
                scope: served
                for scope, served in self._served.items()
                if scope in active or served > self._level
            }
            self._served_at = {
                scope: step for scope, step in self._served_at.items() if scope in self._served
            }


class WaitingClasses:
    """The waiting sequences: a queue with a fair order of its own for each service class."""

    def __init__(self) -> None:
        self._queues = (WaitingQueue(), WaitingQueue())

    def __getitem__(self, is_batch: bool) -> WaitingQueue:
        return self._queues[is_batch]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[SequenceState]:
        """Batch sequences come last."""
        return chain.from_iterable(self._queues)


class BatchShare:
    """Which steps compute batch sequences. Times are seconds of the engine's clock."""

    def __init__(self) -> None:
        self._held_since: float | None = None
        self._had_turn = False

    def allows(self, running: Sequence[SequenceState], waiting: WaitingClasses, now: float) -> bool:
        """Whether the step that begins now computes batch sequences. Asked once a step."""
        if not any(sequence.is_batch for sequence in running) and not waiting[True]:
            self._held_since = None
            return False
        interactive = [sequence for sequence in running if not sequence.is_batch]
        if self._held_since is None:
            self._held_since = now
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
        return self._held_since is not None and now - self._held_since >= FLOOR_SECONDS

    def computed(self) -> None:
        """A step computed batch sequences."""
        self._held_since = None


class Waiting(NamedTuple):
    """What a waiting request would compute now: `uncached` tokens.

    `num_unheld` blocks that it would reuse have no reference. `num_overtaken` requests went before
    it; those that passed it computed `overtaken` tokens.
    """

    uncached: int
    num_unheld: int
    num_overtaken: int
    overtaken: int

    def patience(self, max_tokens: int) -> int:
        """How many tokens the next request that passes this one may compute."""
        is_late = self.num_overtaken >= MAX_OVERTAKEN
        return 0 if is_late else max(self.uncached, max_tokens) - self.overtaken


def next_by_reuse(line: Sequence[Waiting], pool: BlockPool, step_tokens: int) -> int:
    """The index of the next request. `line` is in order of arrival and not empty.

    The first goes first, unless its blocks can only be had by evicting what the others would reuse.
    Then the one that has least to compute does, as in SGLang (Zheng et al. 2024, section 3). Nobody
    starves: a request is passed MAX_OVERTAKEN times at most, by requests that compute no more
    tokens than it does itself, or than MAX_STEPS steps do.
    """
    first, *others = line
    spare = pool.num_reclaimable - sum(sequence.num_unheld for sequence in others)
    if spare * pool.block_size >= first.uncached:
        return 0
    max_tokens = MAX_STEPS * step_tokens
    best = 0
    patience = first.patience(max_tokens)
    for index, sequence in enumerate(others, 1):
        if sequence.uncached < line[best].uncached and sequence.uncached <= patience:
            best = index
        patience = min(patience, sequence.patience(max_tokens))
    return best


class ReuseOrder:
    """Lets a waiting request pass others of its scope where they would evict what it reuses.

    Only requests of one scope are compared. What is here is estimated from digests: what a request
    reuses is decided at its admission.
    """

    def __init__(self, cache: PrefixCache, max_step_tokens: int) -> None:
        self._cache = cache
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
            waiting = list[Waiting]()
            for request in (sequence.request for sequence in line):
                assert request.lookup is not None
                digests = request.query.digests
                here = self._cache.resident(request.query.digests)
                held = self._cache.resident(digests, here, is_held=True)
                # The last token is always computed.
                most = max(here * pool.block_size, request.lookup.read)
                uncached = digests.num_tokens - min(most, digests.num_tokens - 1)
                passed = request.num_overtaken, request.overtaken_tokens
                waiting.append(Waiting(uncached, here - held, *passed))
            index = next_by_reuse(waiting, pool, self._max_step_tokens)
            if index == 0:
                break
            if not awaits_twin(line[index]):
                self._next = line[index]
                self._passed = line[:index]
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
        self._next = None
        self._passed = []


def _is_comparable(sequence: SequenceState) -> bool:
    return sequence.is_new and not sequence.lacks_look_up
