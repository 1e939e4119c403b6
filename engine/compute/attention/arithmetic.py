"""The arithmetic of attention.

Decoding sequences, with one new token each, are attended together.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.compute.batch import DecodeGroup, SharedGroup
from engine.compute.kv import KvPool

# Shared blocks are read in pieces of about this many tokens. The scores of a piece stay in the
# CPU's caches. The memory for scores does not grow with the prefix's length.
_PIECE_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One attention layer's `scaling` of scores, `window` and `softcap`, None without."""

    index: int
    scaling: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class _Partial:
    """Attention over some of the keys: its output (…, queries, head_dim), and the logarithm of the
    sum of the exponentials of its scores (…, queries, 1), by which parts are weighed."""

    output: torch.Tensor
    log_sum: torch.Tensor

    def merge(self, other: "_Partial") -> "_Partial":
        """Attention over both sets of keys."""
        log_sum = torch.logaddexp(self.log_sum, other.log_sum)
        mine, theirs = (self.log_sum - log_sum).exp(), (other.log_sum - log_sum).exp()
        return _Partial(self.output * mine + other.output * theirs, log_sum)


def attend_decodes(
    query: torch.Tensor, group: DecodeGroup, pool: KvPool, layer: Layer
) -> torch.Tensor:
    """Attend one token of each sequence, together (heads, sequences, head_dim).

    The query heads that share a KV head take the place of query tokens, so that keys and values
    are not repeated.
    """
    keys, values, mask = _read(group, pool, layer)
    output = attend(_by_kv_head(query, keys.shape[1]), keys, values, mask, layer)
    return _by_head(output, query.shape[0])


def attend_shared(
    query: torch.Tensor, group: SharedGroup, pool: KvPool, layer: Layer
) -> torch.Tensor:
    """As `attend_decodes`, but common blocks are read once for all (heads, sequences, head_dim)."""
    num_heads, num_sequences, head_dim = query.shape
    kv_heads = pool.layout.num_kv_heads
    grouped = _by_kv_head(query, kv_heads)
    together = grouped.transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
    shared = _attend_pieces(together, group.blocks, pool, layer)
    of_shape = (kv_heads, num_sequences, num_heads // kv_heads, -1)
    shared = _Partial(
        shared.output.view(of_shape).transpose(0, 1), shared.log_sum.view(of_shape).transpose(0, 1)
    )
    outputs, begin = [], 0
    for tail in group.tails:
        rows = slice(begin, begin + len(tail.rows))
        begin = rows.stop
        own = _attend_partly(grouped[rows], *_read(tail, pool, layer), layer)
        outputs.append(own.merge(_Partial(shared.output[rows], shared.log_sum[rows])).output)
    return _by_head(torch.cat(outputs), num_heads).to(query.dtype)


def _attend_pieces(
    query: torch.Tensor, blocks: torch.Tensor, pool: KvPool, layer: Layer
) -> _Partial:
    """Every query sees all of `blocks`: (1, kv_heads, queries, head_dim)."""
    parts: Iterator[_Partial] = (
        _attend_partly(query, *_read_keys(piece, pool, layer), None, layer)
        for piece in torch.split(blocks, max(_PIECE_TOKENS // pool.block_size, 1))
    )
    whole = next(parts)
    for part in parts:
        whole = whole.merge(part)
    return whole


def _read_keys(
    blocks: torch.Tensor, pool: KvPool, layer: Layer
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = pool.gather(layer.index, blocks)
    return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def _read(
    group: DecodeGroup, pool: KvPool, layer: Layer
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values (sequences, kv_heads, keys, head_dim), and the mask of visible keys."""
    first = first_visible_block(group.earliest - group.offset, layer.window, pool.block_size)
    blocks = group.blocks[:, first:]
    num_sequences, num_blocks = blocks.shape
    num_keys = num_blocks * pool.block_size
    keys, values = pool.gather(layer.index, blocks.flatten())
    shape = (num_sequences, num_keys, *keys.shape[1:])
    begin = group.offset + first * pool.block_size
    positions = torch.arange(begin, begin + num_keys, device=keys.device)
    mask = visible(group.positions[:, None], positions[None, :], layer.window)
    return (
        keys.view(shape).transpose(1, 2),
        values.view(shape).transpose(1, 2),
        mask[:, None, None, :],
    )


def _by_kv_head(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(heads, sequences, head_dim) to (sequences, kv_heads, heads of each, head_dim)."""
    num_heads, num_sequences, head_dim = query.shape
    shape = (num_sequences, kv_heads, num_heads // kv_heads, head_dim)
    return query.transpose(0, 1).reshape(shape)


def _by_head(output: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`_by_kv_head` back."""
    return output.reshape(len(output), num_heads, -1).transpose(0, 1)


def _attend_partly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    layer: Layer,
) -> _Partial:
    """Shapes as in `attend`, each query seeing something; weights are computed in float32."""
    if query.device.type == "cpu" and layer.softcap is None:
        return _attend_by_kernel(query, keys, values, mask, layer)
    scores = _scores(query, keys, layer)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    scores = scores.float()
    log_sum = scores.logsumexp(-1, keepdim=True)
    weights = (scores - log_sum).exp().to(values.dtype)
    return _Partial((weights @ values).float(), log_sum)


def _attend_by_kernel(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    layer: Layer,
) -> _Partial:
    """By torch's own kernel for the CPU, which has the log-sum-exp but no public name."""
    if mask is not None:
        hidden = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        mask = hidden.expand(len(query), 1, query.shape[2], keys.shape[2])
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=layer.scaling
    )
    return _Partial(output.float(), log_sum[..., None])


def _scores(query: torch.Tensor, keys: torch.Tensor, layer: Layer) -> torch.Tensor:
    """A softcap is Gemma 2's: scores become cap x tanh(score / cap) before the mask."""
    scores = (query @ keys.transpose(2, 3)) * layer.scaling
    if layer.softcap is None:
        return scores
    return torch.tanh(scores / layer.softcap) * layer.softcap


def first_visible_block(position: int, window: int | None, block_size: int) -> int:
    """The first block in which the token at `position` sees a key."""
    if window is None:
        return 0
    return max(0, position - window + 1) // block_size


def visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """The causal mask. With a window a query sees the last `window` positions, its own included."""
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, layer: Layer
) -> torch.Tensor:
    """(batch, heads, tokens, head_dim) over (batch, kv_heads, keys, head_dim); seen where True."""
    grouped = query.shape[1] != keys.shape[1]
    # On a GPU what torch has for grouped heads behind a mask keeps a matrix of all scores.
    if grouped and (layer.softcap is not None or query.device.type != "cpu"):
        keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
        values = values.repeat_interleave(query.shape[1] // values.shape[1], dim=1)
        grouped = False
    if layer.softcap is None:
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=layer.scaling, enable_gqa=grouped
        )
    scores = _scores(query, keys, layer).masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights @ values
