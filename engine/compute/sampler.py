"""Sampling of the next token. A draw depends on the logits, the seed and the position alone."""

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
import torch

from engine.cache.ids import TokenId
from engine.schedule.runner import DrawnProbs, SampleParams

LEAST_LOGPROB = -9999.0
"""What is told of a token that the model rules out: JSON has no infinity."""
_FRACTION_BITS = 53  # of a double: as many as a uniform number in [0, 1) has
_NUM_BINS = 4096


def is_greedy(params: SampleParams) -> bool:
    """Whether a draw is the most likely token."""
    return params.temperature <= 0 or params.top_k == 1


def sample(
    logits: torch.Tensor, params: SampleParams, position: int, allowed: bytes | None = None
) -> int:
    """Draw the token at `position` from one row of logits (vocabulary).

    Only `allowed` tokens are drawn (a bit each, lowest first; None: all). A token that is not
    allowed takes no place in top-k or top-p.

    The order is temperature, top-k, top-p (the smallest set whose probability reaches it). The
    drawn token is the one at which the cumulative distribution, most likely first, passes a uniform
    number.
    """
    num_kept = logits.shape[-1]
    if allowed is not None:
        is_allowed = _unpack(allowed, num_kept)
        num_kept = int(is_allowed.sum())
        logits = logits.masked_fill(~is_allowed.to(logits.device), float("-inf"))
    if is_greedy(params):
        return int(logits.argmax())
    if 0 < params.top_k < num_kept:
        values, token_ids = torch.topk(logits, params.top_k)
        return int(token_ids[_Ordered(values, params.temperature).draw(params, position)])
    return _Ordered(logits, params.temperature).draw(params, position)


class _Ordered:
    """A row of logits as a distribution, most likely first, that is not sorted as a whole.

    Sorting 128,000 of them takes 10 ms, and sorting those of one bin next to nothing.
    """

    def __init__(self, logits: torch.Tensor, temperature: float) -> None:
        self._logits = logits.float()
        below = self._logits.max() - self._logits
        # The largest is subtracted first so that no temperature overflows.
        self._weights = (below.double() / -temperature).exp()
        span = below.masked_fill(below.isinf(), 0).max().clamp(min=1e-30)
        self._bins = (below * ((_NUM_BINS - 1) / span)).clamp(max=_NUM_BINS - 1).long()
        self._in_bin = torch.bincount(self._bins, self._weights, minlength=_NUM_BINS)
        self._sums = self._in_bin.cumsum(0)

    def draw(self, params: SampleParams, position: int) -> int:
        whole = self._sums[-1]
        if params.top_p < 1.0:
            # A token is kept while the sum before it has not reached top_p.
            _, whole = self._at(whole * params.top_p, is_reached=True)
        token, _ = self._at(whole * uniform(params.seed, position), is_reached=False)
        return token

    def _at(self, weight: torch.Tensor, *, is_reached: bool) -> tuple[int, torch.Tensor]:
        """The first token at which the cumulative weight passes `weight`, and that sum.

        With `is_reached` the first at which it is at least that.
        """
        weight = weight.clamp(max=self._sums[-1].nextafter(self._sums.new_zeros(())))
        chosen = int(torch.searchsorted(self._sums, weight, right=not is_reached))
        tokens = ((self._bins == chosen) & (self._weights > 0)).nonzero()[:, 0]
        tokens = tokens[self._logits[tokens].argsort(descending=True, stable=True)]
        before = self._sums[chosen] - self._in_bin[chosen]
        sums = before + self._weights[tokens].cumsum(0)
        place = int(torch.searchsorted(sums, weight, right=not is_reached))
        place = min(place, len(tokens) - 1)
        return int(tokens[place]), sums[place]


def biased(logits: torch.Tensor, bias: Mapping[TokenId, float] | None) -> torch.Tensor:
    """One row of logits (vocabulary), raised by the bias; tokens beyond the vocabulary are none."""
    known = [] if bias is None else [token for token in bias if token < logits.shape[-1]]
    if bias is None or not known:
        return logits
    raised = torch.tensor([bias[token] for token in known], dtype=torch.float32)
    token_ids = torch.tensor(known, dtype=torch.long, device=logits.device)
    return logits.float().index_add(-1, token_ids, raised.to(logits.device))


def tell_probs(logits: torch.Tensor, token: TokenId, probs: DrawnProbs) -> None:
    """Fill `probs` from one row of logits (vocabulary) after `token` was drawn."""
    logprobs = torch.log_softmax(logits.float(), dim=-1).clamp(min=LEAST_LOGPROB)
    probs.drawn = float(logprobs[token])
    values, token_ids = torch.topk(logprobs, min(probs.num_top, logprobs.shape[-1]))
    probs.top = list(zip(token_ids.tolist(), values.tolist(), strict=True))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), hashed from both. No generator state must be kept or restored."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return float(int.from_bytes(digest) >> (64 - _FRACTION_BITS)) / (1 << _FRACTION_BITS)


def _unpack(allowed: bytes, vocabulary: int) -> torch.Tensor:
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=vocabulary, bitorder="little")
    return torch.from_numpy(bits).bool()
