"""KVzip (arXiv 2505.23416): what the model needs to repeat the prefix is kept.

The model is told to repeat the prefix, and runs over it as if it did, in pieces of 2,048 tokens.
score_i = the most attention that any token of the repetition, in any head of the KV head's group,
gives token i, among the piece, the sinks and the repetition, as in kvpress 0.5.5's `KVzipPress`
(whose budgets may differ by head and layer; here each layer keeps as much). No question is needed:
of the known ways it is the best for questions that come later.
"""

from collections.abc import Iterator, Sequence

from engine.cache.ids import TokenId

PIECE = 2048
REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_PART = "\n\nRepeat the part of the previous context exactly, starting with"
BEFORE = 8


def pieces(
    tokens: Sequence[TokenId],
    repeat: Sequence[TokenId],
    repeat_part: Sequence[TokenId],
    turn: Sequence[TokenId],
) -> Iterator[tuple[range, list[TokenId]]]:
    """The places of each piece, and what runs behind the prefix for it. `turn` begins an answer."""
    for begin in range(0, len(tokens), PIECE):
        piece = tokens[begin : begin + PIECE]
        asked = [*repeat_part, *tokens[begin - BEFORE : begin]] if begin else repeat
        yield range(begin, begin + len(piece)), [*asked, *turn, *piece]
