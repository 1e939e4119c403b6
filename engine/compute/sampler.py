"""Sampling of the next token. A draw depends on the logits, the seed and the position alone."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch

from engine.cache.ids import TokenId
from engine.schedule.runner import DrawnProbs, SampleParams

LEAST_LOGPROB = -9999.0
"""The log-probability told of a token that the model rules out. JSON has no infinity."""
_FRACTION_BITS = 53  # of a double: as many as a uniform number in [0, 1) has
HEAD = 256
"""So many of the likeliest tokens are ordered first."""
_WIDTHS = (64, HEAD)
"""The same where a top-k is smaller than these. One more than a top-k tells what is as likely."""
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
    vocabulary = logits.shape[-1]
    num_kept = vocabulary if num_kept is None else num_kept
    # By how many of the likeliest tokens are ordered first, and whether these are all that is
    # drawn from.
    kinds = defaultdict(list)
    for index, row in enumerate(params):
        is_within = 0 < row.top_k < num_kept
        width = next((width for width in _WIDTHS if width > row.top_k), row.top_k)
        kinds[min(width if is_within else HEAD, vocabulary), is_within].append(index)
    tokens = [0] * len(params)
    at_a_time = rows_at_a_time(vocabulary)
    for (width, is_within), indexes in kinds.items():
        for begin in range(0, len(indexes), at_a_time):
            some = indexes[begin : begin + at_a_time]
            columns = _columns_of(
                [params[i] for i in some],
                [positions[i] for i in some],
                logits.device,
                is_within=is_within,
            )
            drawn = _drawn(logits[some].float(), columns, width, is_within=is_within)
            for index, token in zip(some, drawn.tolist(), strict=True):
                tokens[index] = token
    return tokens


class DrawColumns(NamedTuple):
    """How each row is drawn from, a column (rows, 1) each."""

    heat: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    # `uniform`'s.
    numbers: torch.Tensor
    # At least the vocabulary: off. None: off for all rows.
    top_k: torch.Tensor | None

    def of_rows(self, rows: torch.Tensor) -> "DrawColumns":
        """Those of some rows."""
        return DrawColumns(
            self.heat[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.numbers[rows],
            None if self.top_k is None else self.top_k[rows],
        )


def _columns_of(
    params: Sequence[SampleParams],
    positions: Sequence[int],
    device: torch.device,
    *,
    is_within: bool,
) -> DrawColumns:
    floats = [
        (row.temperature, row.top_p, row.min_p, uniform(row.seed, position))
        for row, position in zip(params, positions, strict=True)
    ]
    heat, top_p, min_p, numbers = torch.tensor(floats, dtype=torch.float64, device=device).unbind(1)
    top_k = torch.tensor([row.top_k for row in params], device=device) if is_within else None
    return DrawColumns(
        heat[:, None],
        top_p[:, None],
        min_p[:, None],
        numbers[:, None],
        None if top_k is None else top_k[:, None],
    )


def draw(
    rows: torch.Tensor, columns: DrawColumns, width: int, *, is_within: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from each row of logits (rows, vocabulary) of 32 bits by its `width` likeliest tokens.

    Most draws fall among few tokens, and sorting a large vocabulary takes long. The second result
    is False for rows that these tokens do not decide: where top-k is wider, or a draw falls behind
    them or among tokens as likely as the last of them. `is_within`: no top-k is wider.

    It asks the device for nothing, so it may be a part of a CUDA graph.
    """
    values, order = torch.topk(rows, width)
    order, by_token = order.sort(-1)
    values = values.gather(-1, by_token)
    values, by_value = values.sort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, by_value)
    whole = None
    if not is_within:
        whole = _weights(rows, values, columns).sum(-1, keepdim=True)
    places, deepest = _places(_weights(values, values, columns), columns, whole)
    drawn = order.gather(-1, places.clamp(max=width - 1))[:, 0]
    likelier = (values > values[:, -1:]).sum(-1, keepdim=True)
    is_decided = deepest < likelier
    if columns.top_k is not None and not is_within:
        is_decided &= (columns.top_k <= width) | (columns.top_k >= rows.shape[-1])
    return drawn, is_decided[:, 0]


def _drawn(
    rows: torch.Tensor, columns: DrawColumns, width: int, *, is_within: bool
) -> torch.Tensor:
    """Draw from each row, by all of its tokens where `width` of them do not decide."""
    drawn, is_decided = draw(rows, columns, width, is_within=is_within)
    left = (~is_decided).nonzero()[:, 0]
    if len(left):
        values, order = torch.sort(rows[left], descending=True, stable=True)
        some = columns.of_rows(left)
        places, _ = _places(_weights(values, values, some), some)
        drawn[left] = order.gather(-1, places)[:, 0]
    return drawn


def rows_at_a_time(vocabulary: int) -> int:
    """How many rows of logits are ordered at a time, so that their copies stay small."""
    return max(_MAX_NUMBERS // vocabulary, 1)


def _weights(logits: torch.Tensor, ordered: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
    """The probabilities of logits (rows, tokens), as multiples of the most likely token's. That
    token is the first of `ordered`. Probabilities below `min_p` are 0."""
    # The largest is subtracted first so that no temperature overflows.
    weights = (logits - ordered[:, :1]).double().div_(columns.heat).exp_()
    return weights.masked_fill_(weights < columns.min_p, 0.0)


def _places(
    weights: torch.Tensor, columns: DrawColumns, whole: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's draw as a place in `weights` (rows, tokens), which are the most likely first.

    `whole` is the weight of all tokens, for rows whose top-k is wider than these. The second result
    is the last place that was looked at. The others are (rows, 1).
    """
    num = weights.shape[-1]
    if columns.top_k is not None:
        is_beyond = torch.arange(num, device=weights.device) >= columns.top_k
        weights = weights.masked_fill_(is_beyond, 0.0)
    sums = weights.cumsum(-1)
    if whole is None:
        whole = sums[:, -1:]
    elif columns.top_k is not None:
        whole = torch.where(columns.top_k <= num, sums[:, -1:], whole)
    # A token is kept while the sum before it has not reached top_p.
    cut = torch.searchsorted(sums, whole * columns.top_p)
    is_cut = columns.top_p < 1
    kept = torch.where(is_cut, sums.gather(-1, cut.clamp(max=num - 1)), whole)
    passed = (kept * columns.numbers).minimum(kept.nextafter(torch.zeros_like(kept)))
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
