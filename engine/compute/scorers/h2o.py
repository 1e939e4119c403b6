"""H2O (arXiv 2306.14048): heavy hitters, to which the prefix's own tokens attend most, are kept.

score_i = the mean over the tokens from i on of their attention to token i, over the heads of a
group, as in kvpress 0.5.5's `ObservedAttentionPress`; a sum alone would favour the first tokens.
"""

import torch


def h2o(attended: torch.Tensor) -> torch.Tensor:
    """Takes the sum of all tokens' attention (kv_heads, tokens)."""
    return attended / torch.arange(attended.shape[1], 0, -1, device=attended.device)
