"""KeyDiff (arXiv 2504.15364): keys that differ from the others are kept.

score_i = -cos(k_i, mean over j of k_j / |k_j|), as in kvpress 0.5.5's `KeyDiffPress`.
"""

import torch
from torch.nn.functional import cosine_similarity, normalize


def keydiff(keys: torch.Tensor, _num_kept: int) -> torch.Tensor:
    anchor = normalize(keys, dim=-1).mean(dim=1, keepdim=True)
    return -cosine_similarity(keys, anchor, dim=-1)
