"""The waiting requests and their fair order.

There is one line per scope, in order of arrival. The scope with the fewest computed tokens has the
next turn. Of equal scopes it is the one that was served longest ago. A scope that comes, or comes
back, starts level with the least served of the others, so that no scope saves up turns by staying
away. A preempted sequence comes before all others.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain

from engine.schedule.request import SequenceState

MAX_IDLE_SCOPES = 1024


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
        served_at = self._served_at
        for scope in sorted(self._lines, key=lambda name: (served[name], served_at.get(name, 0))):
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
