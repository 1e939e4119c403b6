"""Cold twins: the common beginning of two requests is computed once.

A request that is not admitted yet waits while a running sequence computes full blocks that it could
use. Only running sequences are waited for. They wait for no other, so there is no circle. The wait
ends when the blocks are there, or when the running sequence ends, is cancelled or is preempted.
"""

from collections.abc import Sequence

from engine.cache.digests import common_blocks
from engine.schedule.request import RequestState, SequenceState, Twin


def find_twin(
    request: RequestState, running: Sequence[SequenceState], block_size: int
) -> Twin | None:
    """The sequence that computes most of this request's prefix. None if waiting does not pay.

    Waiting pays if it saves at least a block, and at least half of the tokens it waits for. So a
    request that read most of the prefix from an entry does not wait for a sequence that computes it
    from the beginning.
    """
    digests, best, most = request.query.digests, None, 0
    read = request.found.read if request.found is not None else 0
    usable = (digests.num_tokens - 1) // block_size
    for sequence in running:
        # A batch sequence may be paused: an interactive request does not wait for it.
        if sequence.num_pending < block_size or sequence.is_batch > request.leader.is_batch:
            continue
        shared = min(common_blocks(digests, sequence.request.query.digests), usable) * block_size
        computed = sequence.table.num_tokens
        saved = shared - max(read, computed)
        if saved >= block_size and 2 * saved >= shared - computed and saved > most:
            best, most = Twin(sequence, shared), saved
    return best
