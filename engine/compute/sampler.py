"""Sampling of the next token. A draw depends on the logits, the seed and the position alone."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b

import numpy as np
import torch

from engine.cache.ids import TokenId
from engine.schedule.runner import DrawnProbs, SampleParams

LEAST_LOGPROB = -9999.0
"""What is told of a token that the model rules out: JSON has no infinity."""
_FRACTION_BITS = 53  # of a double: as many as a uniform number in [0, 1) has
_MAX_NUMBERS = 1 << 22
"""Logits that are ordered at a time, in some 160 MB."""


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
    return sample_rows(logits[None], [params], [position], num_kept)[0]


def sample_rows(
    logits: torch.Tensor,
    params: Sequence[SampleParams],
    positions: Sequence[int],
    num_kept: int | None = None,
) -> list[int]:
    """Draw from each row of logits (rows, vocabulary) what `sample` draws from it.

    No row is greedy. `num_kept` tokens can be drawn, None: all.
    """
    num_kept = logits.shape[-1] if num_kept is None else num_kept
    by_top_k = defaultdict(list)
    for index, one in enumerate(params):
        by_top_k[one.top_k if one.top_k < num_kept else 0].append(index)
    tokens = [0] * len(params)
    for top_k, indexes in by_top_k.items():
        most = max(_MAX_NUMBERS // logits.shape[-1], 1)
        for begin in range(0, len(indexes), most):
            some = indexes[begin : begin + most]
            drawn = _draw(logits[some], top_k, [params[i] for i in some], some, positions)
            for index, token in zip(some, drawn, strict=True):
                tokens[index] = token
    return tokens


def _draw(
    logits: torch.Tensor,
    top_k: int,
    params: Sequence[SampleParams],
    indexes: Sequence[int],
    positions: Sequence[int],
) -> list[int]:
    """A token of each row; all have the same `top_k`, 0 for all tokens."""
    if top_k:
        values, order = torch.topk(logits.float(), top_k)
    else:
        values, order = torch.sort(logits.float(), descending=True, stable=True)
    column = partial(torch.tensor, dtype=torch.float64, device=logits.device)
    heat = column([[p.temperature] for p in params])
    top_p = column([[p.top_p] for p in params])
    # The largest is subtracted first so that no temperature overflows.
    weights = (values - values[:, :1]).double().div_(heat).exp_()
    sums = weights.cumsum(-1)
    # A token is kept while the sum before it has not reached top_p.
    num_kept = (sums - weights < sums[:, -1:] * top_p).sum(-1, keepdim=True).clamp_(min=1)
    whole = torch.where(top_p < 1, sums.gather(-1, num_kept - 1), sums[:, -1:])
    numbers = column(
        [[uniform(p.seed, positions[i])] for p, i in zip(params, indexes, strict=True)]
    )
    passed = (whole * numbers).minimum(whole.nextafter(torch.zeros_like(whole)))
    return order.gather(-1, torch.searchsorted(sums, passed, right=True))[:, 0].tolist()


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
