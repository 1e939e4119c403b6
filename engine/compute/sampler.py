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
"""The least log-probability that is reported. JSON has no infinity for a token that the model rules
out."""
_FRACTION_BITS = 53
"""The bits of a double's fraction. A uniform number in [0, 1) has as many."""
HEAD = 256
"""The number of likeliest tokens that are ordered first."""
_WIDTHS = (64, HEAD)
"""The numbers of likeliest tokens that are ordered for a top-k. The first that is greater than the
top-k is used: one token more shows whether another is as likely as the last."""
_MAX_NUMBERS = 1 << 22
"""The most logits that are ordered at a time. They take some 160 MB."""


def is_greedy(params: SampleParams) -> bool:
    """Whether a draw is the most likely token. No other rule may forbid that token: top-p and min-p
    always keep it."""
    return params.temperature <= 0 or params.top_k == 1


def sample(
    logits: torch.Tensor, params: SampleParams, position: int, allowed: bytes | None = None
) -> int:
    """Draw the token at `position` from one row of logits (vocabulary).

    `allowed` has one bit for each token that may be drawn, the lowest first; None: all may. A token
    that is not allowed takes no place in top-k or top-p.

    The temperature is applied first, then min-p, top-k and top-p. Top-p keeps the smallest set of
    the remaining tokens whose probability reaches it. The kept tokens are ordered by probability,
    the most likely first. The drawn token is the one at which their cumulative distribution passes
    a uniform number.
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
    """Draw from each row of logits (rows, vocabulary) the token that `sample` draws.

    No row may be greedy. `num_kept` is the number of tokens that are allowed; None: all.
    """
    vocabulary = logits.shape[-1]
    num_kept = vocabulary if num_kept is None else num_kept
    # The rows, by the number of likeliest tokens that are ordered first, and by whether top-k lets
    # only these be drawn.
    kinds = defaultdict(list)
    for index, row in enumerate(params):
        is_top_k_within = 0 < row.top_k < num_kept
        width = next((width for width in _WIDTHS if width > row.top_k), row.top_k)
        kinds[min(width if is_top_k_within else HEAD, vocabulary), is_top_k_within].append(index)
    tokens = [0] * len(params)
    at_a_time = rows_at_a_time(vocabulary)
    for (width, is_top_k_within), indexes in kinds.items():
        for begin in range(0, len(indexes), at_a_time):
            part = indexes[begin : begin + at_a_time]
            columns = _columns_of(
                [params[i] for i in part],
                [positions[i] for i in part],
                logits.device,
                is_top_k_within=is_top_k_within,
            )
            drawn = _draw_all(logits[part].float(), columns, width, is_top_k_within=is_top_k_within)
            for index, token in zip(part, drawn.tolist(), strict=True):
                tokens[index] = token
    return tokens


class DrawColumns(NamedTuple):
    """The parameters of each row's draw, each as a column (rows, 1)."""

    # The temperatures.
    heat: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    # The numbers of `uniform`.
    numbers: torch.Tensor
    # A value of at least the vocabulary's size means no top-k; None: no row has a top-k.
    top_k: torch.Tensor | None

    def of_rows(self, rows: torch.Tensor) -> "DrawColumns":
        """The columns of some rows."""
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
    is_top_k_within: bool,
) -> DrawColumns:
    floats = [
        (row.temperature, row.top_p, row.min_p, uniform(row.seed, position))
        for row, position in zip(params, positions, strict=True)
    ]
    heat, top_p, min_p, numbers = torch.tensor(floats, dtype=torch.float64, device=device).unbind(1)
    top_k = torch.tensor([row.top_k for row in params], device=device) if is_top_k_within else None
    return DrawColumns(
        heat[:, None],
        top_p[:, None],
        min_p[:, None],
        numbers[:, None],
        None if top_k is None else top_k[:, None],
    )


def draw(
    rows: torch.Tensor, columns: DrawColumns, width: int, *, is_top_k_within: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from each row of logits (rows, vocabulary) of 32 bits by its `width` likeliest tokens.

    Most draws fall among few tokens, and sorting a large vocabulary takes long. The first result
    has the tokens (rows). The second (rows) is False for rows that these tokens do not decide. Such
    a row has a wider top-k, or its draw falls behind the likeliest tokens, or it falls among tokens
    that are as likely as the last of them. `is_top_k_within`: each row has a top-k of at most
    `width`, so the weights of other tokens are not needed.

    The host reads nothing from the device here, so the draw may be a part of a CUDA graph.
    """
    values, order = torch.topk(rows, width)
    order, by_token = order.sort(-1)
    values = values.gather(-1, by_token)
    values, by_value = values.sort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, by_value)
    whole = None
    if not is_top_k_within:
        whole = _weights(rows, values, columns).sum(-1, keepdim=True)
    places, deepest = _places(_weights(values, values, columns), columns, whole)
    drawn = order.gather(-1, places.clamp(max=width - 1))[:, 0]
    likelier = (values > values[:, -1:]).sum(-1, keepdim=True)
    is_decided = deepest < likelier
    if columns.top_k is not None and not is_top_k_within:
        is_decided &= (columns.top_k <= width) | (columns.top_k >= rows.shape[-1])
    return drawn, is_decided[:, 0]


def _draw_all(
    rows: torch.Tensor, columns: DrawColumns, width: int, *, is_top_k_within: bool
) -> torch.Tensor:
    """Draw from each row. All of a row's tokens are ordered if the `width` likeliest do not
    decide."""
    drawn, is_decided = draw(rows, columns, width, is_top_k_within=is_top_k_within)
    undecided = (~is_decided).nonzero()[:, 0]
    if len(undecided):
        values, order = torch.sort(rows[undecided], descending=True, stable=True)
        row_columns = columns.of_rows(undecided)
        places, _ = _places(_weights(values, values, row_columns), row_columns)
        drawn[undecided] = order.gather(-1, places)[:, 0]
    return drawn


def rows_at_a_time(vocabulary: int) -> int:
    """The number of rows of logits that are ordered at a time. It keeps their copies small."""
    return max(_MAX_NUMBERS // vocabulary, 1)


def _weights(logits: torch.Tensor, ordered: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
    """The probabilities of logits (rows, tokens), as shares of the most likely token's probability.

    That token is the first of `ordered`. Shares below `min_p` become 0.
    """
    # The largest logit is subtracted first, so that no temperature makes a number overflow.
    weights = (logits - ordered[:, :1]).double().div_(columns.heat).exp_()
    return weights.masked_fill_(weights < columns.min_p, 0.0)


def _places(
    weights: torch.Tensor, columns: DrawColumns, whole: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's draw, as a place in `weights` (rows, tokens), the most likely first.

    `whole` (rows, 1) is the weight of all tokens. It is used for rows whose top-k is wider than
    `weights`; None: `weights` has all tokens. Both results are (rows, 1): the places, and the last
    place on which the draw depends.
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
    """One row of logits (vocabulary), with the bias added. Tokens beyond the vocabulary are
    ignored."""
    known = [] if bias is None else [token for token in bias if token < logits.shape[-1]]
    if bias is None or not known:
        return logits
    added = torch.tensor([bias[token] for token in known], dtype=torch.float32)
    token_ids = torch.tensor(known, dtype=torch.long, device=logits.device)
    return logits.float().index_add(-1, token_ids, added.to(logits.device))


def penalized(logits: torch.Tensor, seen: Mapping[int, tuple[bytearray, float]]) -> torch.Tensor:
    """Logits (rows, vocabulary) after repetition penalties. `seen` has the penalized rows.

    A row has a byte for each token, 1 if the token was seen, and its penalty. A seen token's logit
    is divided by the penalty if it is positive, and multiplied otherwise.
    """
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
    """Fill `probs` for the drawn `token`, from its row of logits (vocabulary)."""
    logprobs = torch.log_softmax(logits.float(), dim=-1).clamp(min=LEAST_LOGPROB)
    probs.drawn = float(logprobs[token])
    values, token_ids = torch.topk(logprobs, min(probs.num_top, logprobs.shape[-1]))
    probs.top = list(zip(token_ids.tolist(), values.tolist(), strict=True))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1): a hash of both arguments. So no state of a generator must be kept."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return float(int.from_bytes(digest) >> (64 - _FRACTION_BITS)) / (1 << _FRACTION_BITS)
