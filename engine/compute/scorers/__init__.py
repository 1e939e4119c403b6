"""Which tokens of a prefix a layer keeps: one file for each way, with its source and formula."""

from collections.abc import Callable, Mapping

import torch

from engine.compute.scorers.chunkkv import chunkkv
from engine.compute.scorers.h2o import h2o
from engine.compute.scorers.keydiff import keydiff
from engine.compute.scorers.random import random
from engine.compute.scorers.sinks import SINKS, sinks
from engine.compute.scorers.snapkv import snapkv
from engine.protocol import Scorer

ScoreKeys = Callable[[torch.Tensor, int], torch.Tensor]
"""Takes a layer's keys (heads, tokens, head size), rotated, and how many tokens are kept. Gives the
tokens' scores by head, the higher the more worth keeping."""
SCORE_KEYS: Mapping[Scorer, ScoreKeys] = {
    "keydiff": keydiff,
    "chunkkv": chunkkv,
    "sinks": sinks,
    "random": random,
}
SCORE_ATTENDED: Mapping[Scorer, Callable[[torch.Tensor], torch.Tensor]] = {
    "snapkv": snapkv,
    "h2o": h2o,
}
"""Take what tokens of the prefix attended to (heads, tokens), summed."""


def choose(scores: torch.Tensor, num_kept: int) -> torch.Tensor:
    """The kept tokens in order. All heads keep the same, by the mean of `scores` (heads, tokens).

    Of equal scores the earlier token is kept.
    """
    together = scores.mean(0)
    together[:SINKS] = torch.inf
    return together.sort(descending=True, stable=True).indices[:num_kept].sort().values
