"""Sampling of the next token. A draw depends on the logits, the seed and the position alone."""

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
import torch

from engine.cache.ids import TokenId
from engine.schedule.runner import SampleParams

_FRACTION_BITS = 53  # of a double: as many as a uniform number in [0, 1) has


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
    if params.temperature <= 0 or params.top_k == 1:
        return int(logits.argmax())
    if 0 < params.top_k < num_kept:
        num_kept = params.top_k
    values, token_ids = torch.topk(logits.float(), num_kept)
    # The largest is subtracted first so that no temperature overflows.
    scaled = (values - values[0]).double() / params.temperature
    cumulative = torch.softmax(scaled, dim=-1).cumsum(dim=-1)
    if params.top_p < 1.0:
        # A token is kept while the sum before it has not reached top_p. The first is always kept.
        num_kept = 1 + int((cumulative[:-1] < params.top_p).sum())
        cumulative = cumulative[:num_kept]
    threshold = cumulative[-1] * uniform(params.seed, position)
    index = int(torch.searchsorted(cumulative, threshold, right=True))
    return int(token_ids[min(index, len(cumulative) - 1)])


def biased(logits: torch.Tensor, bias: Mapping[TokenId, float] | None) -> torch.Tensor:
    """One row of logits (vocabulary), raised by the bias; tokens beyond the vocabulary are none."""
    known = [] if bias is None else [token for token in bias if token < logits.shape[-1]]
    if bias is None or not known:
        return logits
    raised = torch.tensor([bias[token] for token in known], dtype=torch.float32)
    token_ids = torch.tensor(known, dtype=torch.long, device=logits.device)
    return logits.float().index_add(-1, token_ids, raised.to(logits.device))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), hashed from both. No generator state must be kept or restored."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return float(int.from_bytes(digest) >> (64 - _FRACTION_BITS)) / (1 << _FRACTION_BITS)


def _unpack(allowed: bytes, vocabulary: int) -> torch.Tensor:
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=vocabulary, bitorder="little")
    return torch.from_numpy(bits).bool()
