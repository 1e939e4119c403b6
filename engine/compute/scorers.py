"""Scorers choose which tokens of a prefix a layer keeps. Each scorer names its source and formula.

The formulas are those of kvpress 0.5.5, except where a docstring tells a difference. A scorer gives
scores (heads, tokens) for one layer. A token with a higher score is more worth keeping. The scorers
of `SCORE_KEYS` take the layer's rotated keys (heads, tokens, head size) and the number of tokens
that are kept. The scorers of `SCORE_ATTENDED` take the sum of attention that each token got (heads,
tokens).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import avg_pool1d, cosine_similarity, normalize, pad

from engine.cache.ids import TokenId
from engine.protocol import Scorer

SINKS = 4
"""The number of first tokens that are always kept. Attention that is of no use elsewhere gathers
there."""
CHUNK = 20
"""The tokens of a chunk of ChunkKV."""
WINDOW = 64
"""The number of last tokens whose attention SnapKV counts."""
KERNEL = 5
"""The number of neighbours over which SnapKV averages."""
PIECE = 2048
"""The tokens that KVzip repeats at once."""
BEFORE = 8
"""The number of tokens in front of a piece that show where it begins."""
REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_PART = "\n\nRepeat the part of the previous context exactly, starting with"


class Instructions(NamedTuple):
    """The tokens that ask a model to repeat its prompt (`pieces`)."""

    # REPEAT, for the first piece.
    repeat: Sequence[TokenId]
    # REPEAT_PART, for later pieces. The tokens in front of the piece follow it.
    repeat_part: Sequence[TokenId]
    # The beginning of an answer.
    turn: Sequence[TokenId]


def keydiff(keys: torch.Tensor, _num_kept: int) -> torch.Tensor:
    """KeyDiff (arXiv 2504.15364): keys that differ from the others are kept.

    score_i = -cos(k_i, mean over j of k_j / |k_j|).
    """
    anchor = normalize(keys, dim=-1).mean(dim=1, keepdim=True)
    return -cosine_similarity(keys, anchor, dim=-1)


def chunkkv(keys: torch.Tensor, num_kept: int) -> torch.Tensor:
    """ChunkKV (arXiv 2502.00299): neighbours are kept together, so that they have a meaning.

    A token's score is the mean over its chunk of the sum over heads of KeyDiff's scores. SnapKV's
    scores are not used, because they are made for a window that holds the question. kvpress keeps
    only whole chunks. Here the last chunk may be cut to fit the blocks.
    """
    pieces = torch.split(keydiff(keys, num_kept).sum(0), CHUNK)
    return torch.cat([piece.mean().expand(len(piece)) for piece in pieces])[None]


def sinks(keys: torch.Tensor, num_kept: int) -> torch.Tensor:
    """StreamingLLM (arXiv 2309.17453): the first four tokens and the last tokens are kept.

    The middle of the prefix is lost. This scorer is a control, and rarely a choice.
    """
    scores = torch.ones_like(keys[..., 0])
    scores[:, SINKS : SINKS + keys.shape[1] - num_kept] = 0
    return scores


def random(keys: torch.Tensor, num_kept: int) -> torch.Tensor:
    """Tokens are drawn at random, as a control of all other scorers.

    The scores are the same for the same number of tokens and of kept tokens.
    """
    generator = torch.Generator().manual_seed(num_kept)
    return torch.rand(keys.shape[:2], generator=generator).to(keys.device)


def snapkv(attended: torch.Tensor) -> torch.Tensor:
    """SnapKV (arXiv 2404.14469): the last 64 tokens are kept, and the tokens that they attend to.

    score_i = the mean attention of the 64 tokens and of the heads of a group to token i, averaged
    over 5 neighbours. The 64 tokens themselves have the largest score plus 1. SnapKV is made for a
    window that holds the question. Here the window does not hold it, so the scorer is a control.
    """
    scores = avg_pool1d(attended[:, :-WINDOW] / WINDOW, KERNEL, 1, KERNEL // 2)
    return pad(scores, (0, WINDOW), value=float(scores.max()) + 1)


def h2o(attended: torch.Tensor) -> torch.Tensor:
    """H2O (arXiv 2306.14048): the tokens to which the prefix's own tokens attend most are kept.

    score_i = the mean attention to token i, over all tokens from i on and over the heads of a
    group. A sum in place of the mean would favour the first tokens.
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
    """KVzip (arXiv 2505.23416): the tokens that the model needs to repeat the prefix are kept.

    Yield the places of each piece of 2,048 tokens, and the tokens that run behind the prefix for
    it. These tokens ask the model to repeat the piece, and then repeat it.

    score_i = the largest attention to token i, of any token of the repetition in any head of the KV
    head's group. The softmax runs over the piece, the sinks and the repetition. In kvpress the
    number of kept tokens may differ by head and layer. Here it is the same for all layers. KVzip
    needs no question. Of the known scorers it is the best for questions that come later.
    """
    for begin in range(0, len(tokens), PIECE):
        piece = tokens[begin : begin + PIECE]
        request = instructions.repeat
        if begin:
            request = [*instructions.repeat_part, *tokens[begin - BEFORE : begin]]
        yield range(begin, begin + len(piece)), [*request, *instructions.turn, *piece]


def choose(scores: torch.Tensor, num_kept: int) -> torch.Tensor:
    """The places of the kept tokens, in order. `scores` are (heads, tokens).

    All heads keep the same tokens, those with the highest mean score. The first SINKS tokens are
    always among them. If scores are equal, the earlier token is kept.
    """
    together = scores.mean(0)
    together[:SINKS] = torch.inf
    return together.sort(descending=True, stable=True).indices[:num_kept].sort().values
