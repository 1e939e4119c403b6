"""Who waits and who runs, as `engine.schedule.lifecycle` sees it, where a server decides it."""

from collections.abc import Callable

from engine.backends.upstream.books import UpstreamCache
from engine.cache.digests import common_blocks
from engine.schedule.request import RequestState, SequenceState


class Turns:
    """All sequences that are not ended; `serve` brings one to the server, `drop` takes it away.

    Both are set by the loop, and called on its thread. `running` counts those that were sent.
    """

    def __init__(self, cache: UpstreamCache) -> None:
        self._cache = cache
        self._sequences: dict[SequenceState, None] = {}
        self.running = 0
        self.serve: Callable[[SequenceState], None]
        self.drop: Callable[[SequenceState], None]

    @property
    def waiting(self) -> range:
        """As long as the requests are many that have not begun to answer.

        No server tells which of them it computes.
        """
        return range(sum(one.request.started_at is None for one in self._sequences))

    @property
    def num_unsent(self) -> int:
        return max(len(self._sequences) - self.running, 0)

    @property
    def sequences(self) -> list[SequenceState]:
        return list(self._sequences)

    def add(self, sequence: SequenceState) -> None:
        request = sequence.request
        assert request.found is not None
        request.found.raced = self._raced(request)
        self.add_fork(sequence)

    def add_fork(self, sequence: SequenceState) -> None:
        """Another choice: its leader's prompt is computed, so the server may have its blocks."""
        self._sequences[sequence] = None
        self.serve(sequence)

    def has(self, sequence: SequenceState) -> bool:
        return sequence in self._sequences

    def remove(self, sequence: SequenceState) -> None:
        """It has ended, or is cancelled."""
        del self._sequences[sequence]
        request = sequence.request
        if sequence is request.leader and request.found is not None:
            self._cache.let_go(request.found)
        sequence.table.release()
        self.drop(sequence)

    def _raced(self, request: RequestState) -> int:
        """How much of its prompt others that have not begun to answer are computing."""
        digests = request.query.digests
        others = (
            sequence.request.query.digests
            for sequence in self._sequences
            if sequence.request.started_at is None
        )
        shared = max((common_blocks(digests, other) for other in others), default=0)
        return shared * self._cache.pool.block_size
