"""The pieces of a prompt that one step computes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.cache.ids import TokenId
from engine.schedule.request import RequestState, SequenceState


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`count` tokens of a sequence from `start` on; `is_last` when nothing is pending after them.

    A step may have several chunks of one sequence, with content in memory between them. `draft` are
    tokens that may follow, to be computed too.
    """

    sequence: SequenceState
    start: int
    count: int
    is_last: bool
    draft: Sequence[TokenId] = ()


def prefill_chunks(sequence: SequenceState, budget: int) -> Iterator[PrefillChunk]:
    """Chunks up to the budget, never across a boundary, so that equal prompts get equal chunks."""
    if budget <= 0:
        return
    for start, stop in sequence.table.gaps(sequence.table.reachable(len(sequence.tokens))):
        end = min(start + budget, stop)
        for boundary in sequence.request.boundaries:
            if start < boundary < end:
                end = boundary
                break
        yield PrefillChunk(sequence, start, end - start, is_last=end == len(sequence.tokens))
        budget -= end - start
        if end < stop or not budget:
            return


def new_boundaries(request: RequestState) -> list[int]:
    """The positions at which prefill chunks must end.

    One is at each breakpoint, so that the text behind a cached prefix is computed in the same
    chunks as without it (bitwise equal results). One is before the last token if several choices
    start there.
    """
    ends = {request.query.segments[p.segment].end for p in request.query.breakpoints}
    boundaries = {end for end in ends if end}
    if request.request.sampling.num_choices > 1:
        boundaries.add(len(request.query.tokens) - 1)
    return sorted(boundaries)
