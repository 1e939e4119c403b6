"""Speculation without loss: several tokens of a choice in one step.

A drafter proposes the next tokens of a choice. The step computes them behind the last token, and
the runner draws at each position as it would have drawn one step later. The tokens are kept up to
the first that was not proposed. Draws depend on logits, seed and position alone, so they are those
of an engine without a drafter (Leviathan et al., arXiv 2211.17192, with a drafter that gives one
token all the probability).

Keys and values of proposed tokens are written behind the block table's frontier. They become part
of the sequence only when their tokens have been taken. So no block is found, shared, copied or
stored by a token that was not drawn.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from engine.cache.pool import BlockPool
from engine.cache.table import BlockCopy
from engine.schedule.request import Drafter, PrefillChunk, SequenceState

MAX_STEP_SHARE = 4
"""At most one in so many of a step's tokens is a proposed one."""


class Speculation:
    """The speculation of one engine. Used from the engine's thread alone."""

    def __init__(
        self,
        new_drafter: Callable[[], Drafter],
        *,
        max_step_tokens: int,
        max_context_tokens: int,
    ) -> None:
        self._new_drafter = new_drafter
        self._max_step_tokens = max_step_tokens // MAX_STEP_SHARE
        self._max_context_tokens = max_context_tokens

    def propose(self, sequences: Iterable[SequenceState]) -> None:
        """Note what may follow the sequences' tokens.

        Nothing is proposed to a sequence with a grammar, biases, penalties or log-probabilities.
        They depend on the tokens drawn before, so they would have to be known ahead.
        """
        for sequence in sequences:
            if (
                sequence.finish is not None
                or sequence.num_pending != 1
                or sequence.parser.constraint is not None
            ):
                continue
            constraints = (sequence.parser.allowed, sequence.bias, sequence.seen, sequence.logprobs)
            if all(constraint is None for constraint in constraints):
                sequence.drafter = sequence.drafter or self._new_drafter()
                sequence.draft = sequence.drafter.propose(sequence.tokens)

    def extended(
        self, chunks: Sequence[PrefillChunk], pool: BlockPool, copies: list[BlockCopy]
    ) -> list[PrefillChunk]:
        """The step's chunks with proposed tokens behind those that decode, as far as there is room.

        No sequence is preempted for them, and a block is left for each chunk's next token.
        """
        left = self._max_step_tokens
        extended = []
        for chunk in chunks:
            sequence = chunk.sequence
            table = chunk.sequence.table
            # One token more than proposed is drawn: it must fit into the context and `max_tokens`.
            query = sequence.request.query
            num_tokens = len(sequence.tokens)
            room = min(left, self._max_context_tokens - query.cut - num_tokens - 1)
            most = sequence.request.request.sampling.max_tokens
            if most is not None:
                room = min(room, most - sequence.num_output - 1)
            draft = sequence.draft[: max(room, 0)]
            if chunk.count == 1 and chunk.is_last and draft and not sequence.is_preparing:
                needed = table.blocks_needed(1 + len(draft))
                if not needed or needed + len(chunks) <= pool.num_reclaimable:
                    copies.extend(table.prepare(1 + len(draft)))
                    left -= len(draft)
                    chunk = replace(chunk, draft=draft)
            extended.append(chunk)
        return extended
