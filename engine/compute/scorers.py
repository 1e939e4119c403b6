"""Which tokens of a prefix a layer keeps. Each way has its source and formula, as in kvpress 0.5.5.

Every way scores a layer's tokens by head: the higher, the more worth keeping. `SCORE_KEYS` are made
of the layer's rotated keys (heads, tokens, head size) and of the number of tokens that are kept.
`SCORE_ATTENDED` are made of the sums of attention that each token got (heads, tokens).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import avg_pool1d, cosine_similarity, normalize, pad

from engine.cache.ids import TokenId
from engine.protocol import Scorer

SINKS = 4
"""The first tokens are always kept: attention that has nowhere to go goes there."""
CHUNK = 20
"""Tokens of a chunk of ChunkKV."""
WINDOW = 64
"""SnapKV's last tokens, whose attention counts."""
KERNEL = 5
"""Neighbours that SnapKV averages."""
PIECE = 2048
"""Tokens that KVzip repeats at once."""
BEFORE = 8
"""Tokens in front of a piece that tell where it begins."""
REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_PART = "\n\nRepeat the part of the previous context exactly, starting with"


class Instructions(NamedTuple):
    """What tells a model to repeat its prompt (`pieces`), in tokens."""

    # REPEAT, for the first piece.
    repeat: Sequence[TokenId]
    # REPEAT_PART, which the tokens in front of the piece follow.
    repeat_part: Sequence[TokenId]
    # What begins an answer.
    turn: Sequence[TokenId]


def keydiff(keys: torch.Tensor, _num_kept: int) -> torch.Tensor:
    """KeyDiff (arXiv 2504.15364): keys that differ from the others are kept.

    score_i = -cos(k_i, mean over j of k_j / |k_j|).
    """
    anchor = normalize(keys, dim=-1).mean(dim=1, keepdim=True)
    return -cosine_similarity(keys, anchor, dim=-1)


def chunkkv(keys: torch.Tensor, num_kept: int) -> torch.Tensor:
    """ChunkKV (arXiv 2502.00299): neighbours are kept together, so that they have a meaning.

    A token's score is the mean over its chunk of the heads' sum of KeyDiff's, since SnapKV's knows
    the question. kvpress keeps whole chunks alone; the last one may be cut to fit the blocks here.
    """
    pieces = torch.split(keydiff(keys, num_kept).sum(0), CHUNK)
    return torch.cat([piece.mean().expand(len(piece)) for piece in pieces])[None]


def sinks(keys: torch.Tensor, num_kept: int) -> torch.Tensor:
    """StreamingLLM (arXiv 2309.17453): the first four tokens and the last ones are kept.

    What stands in the middle is gone: a control, and rarely a choice.
    """
    scores = torch.ones_like(keys[..., 0])
    scores[:, SINKS : SINKS + keys.shape[1] - num_kept] = 0
    return scores


def random(keys: torch.Tensor, num_kept: int) -> torch.Tensor:
    """Tokens drawn at random, alike for equal lengths: the control of every other way."""
    generator = torch.Generator().manual_seed(num_kept)
    return torch.rand(keys.shape[:2], generator=generator).to(keys.device)


def snapkv(attended: torch.Tensor) -> torch.Tensor:
    """SnapKV (arXiv 2404.14469): what the last 64 tokens attend to is kept, and they are.

    score_i = their mean attention to token i over the heads of a group, averaged over 5 neighbours;
    of the 64 themselves the most of any score, and 1. Made for a window that holds the question:
    here it does not, and it is a control.
    """
    scores = avg_pool1d(attended[:, :-WINDOW] / WINDOW, KERNEL, 1, KERNEL // 2)
    return pad(scores, (0, WINDOW), value=float(scores.max()) + 1)


def h2o(attended: torch.Tensor) -> torch.Tensor:
    """H2O (arXiv 2306.14048): what the prefix's own tokens attend to most is kept.

    score_i = the mean over the tokens from i on of their attention to token i, over the heads of a
    group; a sum alone would favour the first tokens.
    """
    return attended / torch.arange(attended.shape[1], 0, -1, device=attended.device)


SCORE_KEYS: Mapping[Scorer, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "keydiff": keydiff,
    "chunkkv": chunkkv,
    "sinks": sinks,
    "random": random,
}
SCORE_ATTENDED: Mapping[Scorer, Callable[[torch.Tensor], torch.Tensor]] = {
    "snapkv": snapkv,
    "h2o": h2o,
}


def pieces(
    tokens: Sequence[TokenId], instructions: Instructions
) -> Iterator[tuple[range, list[TokenId]]]:
    """KVzip (arXiv 2505.23416): what the model needs to repeat the prefix is kept.

    Yield the places of each piece of 2,048 tokens, and what runs behind the prefix for it: the
    model is told to repeat the piece, and runs as if it did. score_i = the most attention that any
    token of the repetition, in any head of the KV head's group, gives token i. Attention is shared
    among the piece, the sinks and the repetition. kvpress's budgets may differ by head and layer;
    here each layer keeps as much. No question is needed: of the known ways it is the best for
    questions that come later.
    """
    for begin in range(0, len(tokens), PIECE):
        piece = tokens[begin : begin + PIECE]
        wish = instructions.repeat
        if begin:
            wish = [*instructions.repeat_part, *tokens[begin - BEFORE : begin]]
        yield range(begin, begin + len(piece)), [*wish, *instructions.turn, *piece]


def choose(scores: torch.Tensor, num_kept: int) -> torch.Tensor:
    """The kept tokens in order. All heads keep the same, by the mean of `scores` (heads, tokens).

    Of equal scores the earlier token is kept.
    """
    together = scores.mean(0)
    together[:SINKS] = torch.inf
    return together.sort(descending=True, stable=True).indices[:num_kept].sort().values
