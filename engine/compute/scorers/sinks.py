"""StreamingLLM (arXiv 2309.17453): the first four tokens and the last ones are kept.

score_i = 0 for the tokens behind the first four that are too many, else 1, as in kvpress 0.5.5's
`StreamingLLMPress`. What stands in the middle is gone: a control, and rarely a choice.
"""

import torch

SINKS = 4
"""The first tokens are always kept: attention that has nowhere to go goes there."""


def sinks(keys: torch.Tensor, num_kept: int) -> torch.Tensor:
    scores = torch.ones_like(keys[..., 0])
    scores[:, SINKS : SINKS + keys.shape[1] - num_kept] = 0
    return scores
