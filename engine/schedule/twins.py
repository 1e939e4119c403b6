"""Cold twins: what two requests begin with is computed once.

A request that is not admitted yet waits while a running sequence computes full blocks that it could
use. Only running sequences are waited for, and those wait for nobody, so there is no circle; the
wait ends when the blocks are there, or when the other ends, is cancelled or is preempted.
"""

from collections.abc import Sequence

from engine.cache.digests import common_blocks
from engine.schedule.request import RequestState, SequenceState, Twin


def find_twin(
    request: RequestState, running: Sequence[SequenceState], block_size: int
) -> Twin | None:
    """Who computes most of what this request would compute, None where waiting does not pay.

    It pays where it saves a block at least, and half of what it waits for: who has read most of
    the prefix from an entry does not wait for one that began before it.
    """
    digests, best, most = request.query.digests, None, 0
    read = request.found.read if request.found is not None else 0
    usable = (digests.num_tokens - 1) // block_size
    for sequence in running:
        if sequence.num_pending < block_size:
            continue
        shared = min(common_blocks(digests, sequence.request.query.digests), usable) * block_size
        computed = sequence.table.num_tokens
        saved = shared - max(read, computed)
        if saved >= block_size and 2 * saved >= shared - computed and saved > most:
            best, most = Twin(sequence, shared), saved
    return best
