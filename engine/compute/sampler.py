"""Sampling of the next token. A draw depends on the logits, the seed and the position alone."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from engine.cache.ids import TokenId
from engine.schedule.runner import DrawnProbs, SampleParams

LEAST_LOGPROB = -9999.0
"""What is told of a token that the model rules out: JSON has no infinity."""
_FRACTION_BITS = 53  # of a double: as many as a uniform number in [0, 1) has
_NUM_BINS = 4096
_MAX_NUMBERS = 1 << 16
"""Logits that are ordered at a time: what is computed of them stays in a processor's cache."""
_MAX_NUMBERS_ON_GPU = 1 << 22
"""There each call costs more than its numbers. This many take some 130 MB."""


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
    most = _MAX_NUMBERS if logits.device.type == "cpu" else _MAX_NUMBERS_ON_GPU
    by_top_k = defaultdict(list)
    for index, one in enumerate(params):
        by_top_k[one.top_k if one.top_k < num_kept else 0].append(index)
    tokens = [0] * len(params)
    for top_k, indexes in by_top_k.items():
        width = top_k or logits.shape[-1]
        for some in _parts(indexes, max(most // width, 1)):
            rows = logits if len(some) == len(params) else logits[some]
            values, token_ids = torch.topk(rows, top_k) if top_k else (rows, None)
            places = _Ordered(values, [params[i].temperature for i in some]).draw(
                [params[i].top_p for i in some],
                [uniform(params[i].seed, positions[i]) for i in some],
            )
            if token_ids is not None:
                at = torch.tensor(places, device=token_ids.device)[:, None]
                places = token_ids.gather(-1, at)[:, 0].tolist()
            for index, token in zip(some, places, strict=True):
                tokens[index] = token
    return tokens


def _parts(indexes: list[int], most: int) -> Iterator[list[int]]:
    for begin in range(0, len(indexes), most):
        yield indexes[begin : begin + most]


class _Ordered:
    """Rows of logits as distributions, most likely first, none of which is sorted as a whole.

    Sorting 128,000 of them takes 10 ms, and sorting those of one bin next to nothing.
    """

    def __init__(self, logits: torch.Tensor, temperatures: Sequence[float]) -> None:
        self._logits = logits.float()
        below = self._logits.amax(-1, keepdim=True) - self._logits
        heat = torch.tensor(temperatures, dtype=torch.float64, device=logits.device)[:, None]
        # The largest is subtracted first so that no temperature overflows.
        self._weights = below.double().div_(-heat).exp_()
        span = below.nan_to_num(posinf=0).amax(-1, keepdim=True).clamp(min=1e-30)
        self._bins = below.mul_((_NUM_BINS - 1) / span).clamp_(max=_NUM_BINS - 1).long()
        empty = self._weights.new_zeros(len(temperatures), _NUM_BINS)
        self._in_bin = empty.scatter_add(-1, self._bins, self._weights)
        self._sums = self._in_bin.cumsum(-1)

    def draw(self, top_ps: Sequence[float], numbers: Sequence[float]) -> list[int]:
        """The token of each row at which its cumulative weight passes `numbers` of the whole."""
        wholes = self._sums[:, -1]
        if any(top_p < 1.0 for top_p in top_ps):
            # A token is kept while the sum before it has not reached top_p.
            _, cut = self._at(wholes * wholes.new_tensor(top_ps), is_reached=True)
            is_cut = torch.tensor([top_p < 1.0 for top_p in top_ps], device=wholes.device)
            wholes = torch.where(is_cut, wholes.new_tensor(cut), wholes)
        return self._at(wholes * wholes.new_tensor(numbers), is_reached=False)[0]

    def _at(
        self, weights: torch.Tensor, *, is_reached: bool
    ) -> tuple[list[int], NDArray[np.float64]]:
        """The first token of each row at which the cumulative weight passes `weights`; that sum.

        With `is_reached` the first at which it is at least that.
        """
        whole = self._sums[:, -1]
        weights = weights.minimum(whole.nextafter(whole.new_zeros(())))[:, None]
        chosen = torch.searchsorted(self._sums, weights, right=not is_reached)
        before = (self._sums.gather(-1, chosen) - self._in_bin.gather(-1, chosen))[:, 0]
        found = (self._bins == chosen).nonzero(as_tuple=True)
        rows, tokens, logits, own = (
            tensor.cpu().numpy() for tensor in (*found, self._logits[found], self._weights[found])
        )
        # By row, the most likely first; of equal ones the first. What has no weight is never drawn.
        order = np.lexsort((-logits, rows))
        order = order[own[order] > 0]
        rows, tokens, own = rows[order], tokens[order], own[order]
        ends = np.searchsorted(rows, np.arange(len(whole)), side="right").tolist()
        places, sums, begin = [], np.empty(len(whole)), 0
        side: Literal["left", "right"] = "left" if is_reached else "right"
        for row, (end, start, weight) in enumerate(
            zip(ends, before.tolist(), weights[:, 0].tolist(), strict=True)
        ):
            cumulative = start + own[begin:end].cumsum()
            place = min(int(cumulative.searchsorted(weight, side)), end - begin - 1)
            places.append(int(tokens[begin + place]))
            sums[row] = cumulative[place]
            begin = end
        return places, sums


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
