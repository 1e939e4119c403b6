"""ChunkKV (arXiv 2502.00299): neighbours are kept together, so that what is kept has a meaning.

A token's score is the mean over its chunk of 20 tokens, the last one perhaps shorter, of the heads'
sum of another score: KeyDiff's here, since SnapKV's knows the question. As in kvpress 0.5.5's
`ChunkKVPress`, which keeps whole chunks alone; here the last one may be cut to fit the blocks.
"""

import torch

from engine.compute.scorers.keydiff import keydiff

CHUNK = 20


def chunkkv(keys: torch.Tensor, num_kept: int) -> torch.Tensor:
    pieces = torch.split(keydiff(keys, num_kept).sum(0), CHUNK)
    return torch.cat([piece.mean().expand(len(piece)) for piece in pieces])[None]
