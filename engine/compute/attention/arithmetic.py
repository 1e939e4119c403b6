"""The arithmetic of attention by torch's own functions.

Decoding sequences have one new token each, and are attended together.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.compute.batch import DecodeGroup
from engine.compute.kv import KvPool


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention layer, as a step computes it."""

    # The layer's place in the pool.
    index: int
    # The factor of the scores.
    scaling: float
    # The number of last tokens to which a token attends; None: it attends to all.
    window: int | None
    # The value at which scores are softly capped; None: they are not capped.
    softcap: float | None
    # (heads), float32. A head's sink is one more score in each of its rows. It has no value, so it
    # counts only in the denominator of the softmax (arXiv 2508.10925, section 2.2).
    sinks: torch.Tensor | None = None


def attend_decodes(
    query: torch.Tensor, group: DecodeGroup, pool: KvPool, layer: Layer
) -> torch.Tensor:
    """Attend one token of each sequence. `query` and the result are (heads, sequences, head_dim).

    The query heads that share a KV head take the place of query tokens. So keys and values are not
    repeated.
    """
    num_heads, num_sequences, head_dim = query.shape
    first = first_visible_block(group.earliest, layer.window, pool.block_size)
    blocks = group.blocks[:, first:]
    keys, values = pool.gather(layer.index, blocks.flatten())
    begin = first * pool.block_size
    num_keys = blocks.shape[1] * pool.block_size
    shape = (num_sequences, num_keys, *keys.shape[1:])
    keys = keys.view(shape).transpose(1, 2)
    values = values.view(shape).transpose(1, 2)
    positions = torch.arange(begin, begin + num_keys, device=keys.device)
    by_sequence = visible(group.positions[:, None], positions[None, :], layer.window)
    attention_mask = by_sequence[:, None, None, :]
    by_kv_head = query.transpose(0, 1).reshape(num_sequences, keys.shape[1], -1, head_dim)
    sinks = None if layer.sinks is None else layer.sinks.view(1, keys.shape[1], -1, 1)
    output = attend(by_kv_head, keys, values, attention_mask, layer, sinks)
    return output.reshape(num_sequences, num_heads, -1).transpose(0, 1)


def first_visible_block(position: int, window: int | None, block_size: int) -> int:
    """The first block in which the token at `position` sees a key."""
    if window is None:
        return 0
    return max(0, position - window + 1) // block_size


def visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """The causal mask: True where a query sees a key. `queries` and `keys` are positions.

    With a window a query sees the last `window` positions, its own included.
    """
    attention_mask = keys <= queries
    return attention_mask if window is None else attention_mask & (keys > queries - window)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: torch.Tensor,
    layer: Layer,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with queries (batch, heads, tokens, head_dim) to keys and values (batch, kv_heads,
    keys, head_dim). A query sees a key where the attention mask is True.

    `sinks` must be expandable to (batch, heads, tokens, 1).
    """
    grouped = query.shape[1] != keys.shape[1]
    is_plain = layer.softcap is None and sinks is None
    # On a GPU torch's function for grouped heads keeps a matrix of all scores if there is an
    # attention mask.
    if grouped and not (is_plain and query.device.type == "cpu"):
        keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
        values = values.repeat_interleave(query.shape[1] // values.shape[1], dim=1)
        grouped = False
    if is_plain:
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=attention_mask, scale=layer.scaling, enable_gqa=grouped
        )
    scores = (query @ keys.transpose(2, 3)) * layer.scaling
    if layer.softcap is not None:
        # As in Gemma 2, a score becomes cap x tanh(score / cap), before the mask.
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    scores = scores.masked_fill(~attention_mask, float("-inf")).float()
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]].to(query.dtype)
    return weights @ values
