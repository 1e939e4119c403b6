"""Who waits and who runs, as `engine.schedule.lifecycle` sees it, where a server decides it."""

from collections.abc import Callable

from engine.backends.external.turns import ExternalTurns
from engine.backends.upstream.books import UpstreamCache
from engine.backends.upstream.places import Places
from engine.schedule.request import SequenceState


class Turns(ExternalTurns):
    """`serve` brings a sequence to the server, `drop` takes it away.

    Both are set by the loop, and called on its thread. Who has one of `places` was sent.
    """

    def __init__(self, cache: UpstreamCache, places: Places) -> None:
        super().__init__(cache)
        self.places = places
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
        return max(len(self._sequences) - self.places.num_taken, 0)

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

    def remove(self, sequence: SequenceState) -> None:
        """It has ended, or is cancelled."""
        self._take_out(sequence)
        self.drop(sequence)
