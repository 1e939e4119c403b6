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
"""The log-probability told of a token that the model rules out. JSON has no infinity."""
_FRACTION_BITS = 53  # of a double: as many as a uniform number in [0, 1) has
_HEAD = 256
_MAX_NUMBERS = 1 << 22
"""How many logits are ordered at a time, in some 160 MB."""


def is_greedy(params: SampleParams) -> bool:
    """Whether a draw is the most likely token."""
    return params.temperature <= 0 or params.top_k == 1


def sample(
    logits: torch.Tensor, params: SampleParams, position: int, allowed: bytes | None = None
) -> int:
    """Draw the token at `position` from one row of logits (vocabulary).

    Only `allowed` tokens are drawn (a bit each, lowest first; None: all). A token that is not
    allowed takes no place in top-k or top-p.

    The order is temperature, min-p, top-k, top-p (the smallest set whose probability reaches it,
    of what the others leave). The drawn token is the one at which the cumulative distribution, most
    likely first, passes a uniform number.
    """
    num_kept = logits.shape[-1]
    if allowed is not None:
        packed = np.frombuffer(allowed, np.uint8)
        bits = np.unpackbits(packed, count=num_kept, bitorder="little")
        is_allowed = torch.from_numpy(bits).bool()
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
    for index, row_params in enumerate(params):
        by_top_k[row_params.top_k if row_params.top_k < num_kept else 0].append(index)
    tokens = [0] * len(params)
    rows_at_once = max(_MAX_NUMBERS // logits.shape[-1], 1)
    column = partial(torch.tensor, dtype=torch.float64, device=logits.device)
    for top_k, indexes in by_top_k.items():
        for begin in range(0, len(indexes), rows_at_once):
            some = indexes[begin : begin + rows_at_once]
            heat = column([[params[i].temperature] for i in some])
            top_p = column([[params[i].top_p] for i in some])
            min_p = column([[params[i].min_p] for i in some])
            numbers = column([[uniform(params[i].seed, positions[i])] for i in some])
            rows = logits[some].float()
            # Most draws fall among few tokens, and sorting a large vocabulary takes long. So only
            # the head, the likeliest tokens, is sorted first. A row is sorted whole where the head
            # does not decide its draw.
            head = min(_HEAD, rows.shape[-1])
            values, order = torch.topk(rows, top_k or head)
            if top_k:
                weights = _weights(values, values, heat, min_p)
                drawn = order.gather(-1, _places(weights, top_p, numbers)[0])[:, 0]
            else:
                order, by_token = order.sort(-1)
                values = values.gather(-1, by_token)
                values, by_value = values.sort(dim=-1, descending=True, stable=True)
                order = order.gather(-1, by_value)
                whole = _weights(rows, values, heat, min_p).sum(-1, keepdim=True)
                weights = _weights(values, values, heat, min_p)
                places, deepest = _places(weights, top_p, numbers, whole)
                drawn = order.gather(-1, places.clamp(max=head - 1))[:, 0]
                likelier = (values > values[:, -1:]).sum(-1, keepdim=True)
                left = (deepest >= likelier)[:, 0].nonzero()[:, 0]
                if len(left):
                    values, order = torch.sort(rows[left], descending=True, stable=True)
                    weights = _weights(values, values, heat[left], min_p[left])
                    places, _ = _places(weights, top_p[left], numbers[left])
                    drawn[left] = order.gather(-1, places)[:, 0]
            for index, token in zip(some, drawn.tolist(), strict=True):
                tokens[index] = token
    return tokens


def _weights(
    logits: torch.Tensor, ordered: torch.Tensor, heat: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The probabilities of logits (rows, tokens), as multiples of the most likely token's. That
    token is the first of `ordered`. Probabilities below `min_p` are 0."""
    # The largest is subtracted first so that no temperature overflows.
    weights = (logits - ordered[:, :1]).double().div_(heat).exp_()
    return weights.masked_fill_(weights < min_p, 0.0)


def _places(
    weights: torch.Tensor,
    top_p: torch.Tensor,
    numbers: torch.Tensor,
    whole: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's draw as a place in `weights` (rows, tokens), which are the most likely first.

    `whole` is the weight of all tokens, where these are not all. The second result is the last
    place that was looked at. The others are (rows, 1).
    """
    sums = weights.cumsum(-1)
    whole = sums[:, -1:] if whole is None else whole
    # A token is kept while the sum before it has not reached top_p.
    cut = torch.searchsorted(sums, whole * top_p)
    is_cut = top_p < 1
    kept = torch.where(is_cut, sums.gather(-1, cut.clamp(max=weights.shape[-1] - 1)), whole)
    passed = (kept * numbers).minimum(kept.nextafter(torch.zeros_like(kept)))
    places = torch.searchsorted(sums, passed, right=True)
    return places, torch.where(is_cut, cut, places)


def biased(logits: torch.Tensor, bias: Mapping[TokenId, float] | None) -> torch.Tensor:
    """One row of logits (vocabulary), raised by the bias. Tokens beyond the vocabulary are left
    out."""
    known = [] if bias is None else [token for token in bias if token < logits.shape[-1]]
    if bias is None or not known:
        return logits
    raised = torch.tensor([bias[token] for token in known], dtype=torch.float32)
    token_ids = torch.tensor(known, dtype=torch.long, device=logits.device)
    return logits.float().index_add(-1, token_ids, raised.to(logits.device))


def penalized(logits: torch.Tensor, seen: Mapping[int, tuple[bytearray, float]]) -> torch.Tensor:
    """Logits (rows, vocabulary), in which each row's tokens seen are less likely by its penalty."""
    if not seen:
        return logits
    lowered = logits.clone()
    for row, (tokens, penalty) in seen.items():
        is_seen = torch.frombuffer(tokens, dtype=torch.bool)[: logits.shape[-1]].to(logits.device)
        values = lowered[row, : len(is_seen)]
        changed = torch.where(values > 0, values / penalty, values * penalty)
        lowered[row, : len(is_seen)] = torch.where(is_seen, changed, values)
    return lowered


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
