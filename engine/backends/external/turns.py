"""The sequences that another program computes, as `engine.schedule.lifecycle` sees them."""

from engine.cache.digests import common_blocks
from engine.cache.prefix_cache import PrefixCache
from engine.schedule.request import RequestState, SequenceState


class ExternalTurns:
    """All sequences that are not ended. Used on the event loop's thread."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._sequences: dict[SequenceState, None] = {}

    def has(self, sequence: SequenceState) -> bool:
        return sequence in self._sequences

    def _take_out(self, sequence: SequenceState) -> None:
        """It has ended, or is cancelled: what it held here is given back."""
        del self._sequences[sequence]
        request = sequence.request
        if sequence is request.leader and request.found is not None:
            self._cache.let_go(request.found)
        sequence.table.release()

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
