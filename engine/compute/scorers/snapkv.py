"""SnapKV (arXiv 2404.14469): what the prefix's own last tokens attend to is kept, and they are.

score_i = the mean attention of the last 64 tokens to token i over the heads of a group, averaged
over 5 neighbours; of the 64 themselves the most of any score, and 1. As in kvpress 0.5.5's
`SnapKVPress`. Made for a window that holds the question: here it does not, and it is a control.
"""

import torch
from torch.nn.functional import avg_pool1d, pad

WINDOW = 64
KERNEL = 5


def snapkv(attended: torch.Tensor) -> torch.Tensor:
    """Takes the sum of the window's attention (kv_heads, tokens)."""
    scores = avg_pool1d(attended[:, :-WINDOW] / WINDOW, KERNEL, 1, KERNEL // 2)
    return pad(scores, (0, WINDOW), value=float(scores.max()) + 1)
