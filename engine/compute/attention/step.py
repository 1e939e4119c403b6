"""Attention over the paged pool, registered with transformers under the name `holdfast`.

The model's forward takes a packed row of tokens and hands `holdfast_step` through to every
attention layer. There the new keys and values are written to the pool. Each sequence's blocks are
gathered once and attended to with a causal mask, and with a sliding window where the layer has one.
`arithmetic.py` attends sequences with one new token together. On a GPU the paged kernel
(`kernel.py`) does all of that at once, and nothing is gathered.

An argument that would change the result and is not implemented here raises ModelRefused: ignoring
it would pass most comparisons and be wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.compute.attention.arithmetic import (
    Layer,
    attend,
    attend_decodes,
    first_visible_block,
    visible,
)
from engine.compute.batch import Batch, TokenRun
from engine.compute.errors import ModelRefused, StepStopped
from engine.compute.kv import KvPool
from engine.schedule.runner import Stop

Attend = Callable[[torch.Tensor, KvPool, Layer], torch.Tensor]
"""Attends all rows of a step (heads, rows, head_dim), whose keys and values are in the pool."""

ATTENTION_NAME = "holdfast"
STEP_ARGUMENT = "holdfast_step"
# Arguments that models pass along and that change nothing in a packed forward of ours.
_HARMLESS_ARGUMENTS = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """What one forward's attention layers share.

    `windows` holds each layer's sliding window in tokens, as the configuration has it. `visited`
    counts the layers whose attention ran, for the check at load. `stop` is asked at each layer; the
    forward ends with StepStopped where it says so. `attend` is the paged kernel, where it is used.
    """

    pool: KvPool
    batch: Batch
    windows: Sequence[int | None]
    visited: list[int] = field(default_factory=list)
    stop: Stop | None = None
    attend: Attend | None = None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend a packed row; the signature is that of transformers' attention functions.

    `query` is (1, heads, tokens, head_dim), `key` and `value` (1, kv_heads, tokens, head_dim); the
    result is (1, tokens, heads, head_dim). Raises ModelRefused for what is not implemented.
    """
    step = arguments.pop(STEP_ARGUMENT, None)
    if not isinstance(step, AttentionStep):
        raise ModelRefused("the model does not hand its forward arguments to its attention")
    layer = _check_arguments(module, step, attention_mask, arguments, query.shape[-1])
    pool, batch = step.pool, step.batch
    if key.shape[1:] != value.shape[1:] or key.shape[0] != 1:
        raise ModelRefused(
            f"keys and values differ in shape: {tuple(key.shape)}, {tuple(value.shape)}"
        )
    expected = (pool.layout.num_kv_heads, pool.layout.head_dim)
    if (key.shape[1], key.shape[3]) != expected:
        raise ModelRefused(f"layer {layer.index} has other KV heads than the first: {key.shape}")
    if step.stop is not None and step.stop():
        raise StepStopped
    step.visited.append(layer.index)
    pool.write(layer.index, batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if step.attend is not None:
        return step.attend(query[0], pool, layer).transpose(0, 1).unsqueeze(0), None
    output = torch.empty_like(query[0])
    for chunk in batch.chunks:
        rows = slice(chunk.begin, chunk.end)
        output[:, rows] = _attend_chunk(query[0, :, rows], chunk, pool, layer)
    for group in batch.decode_groups:
        output[:, group.rows] = attend_decodes(query[0, :, group.rows], group, pool, layer)
    return output.transpose(0, 1).unsqueeze(0).contiguous(), None


def _check_arguments(
    module: torch.nn.Module,
    step: AttentionStep,
    attention_mask: torch.Tensor | None,
    arguments: dict[str, Any],
    head_dim: int,
) -> Layer:
    scaling = arguments.pop("scaling", None)
    window = arguments.pop("sliding_window", None)
    softcap = arguments.pop("softcap", None)
    if arguments.pop("dropout", 0.0):
        raise ModelRefused("attention with dropout: the model is not in evaluation mode")
    if arguments.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
        raise ModelRefused("attention that is not causal")
    if attention_mask is not None:
        raise ModelRefused("the model brings an attention mask of its own")
    unknown = [
        name
        for name, value in arguments.items()
        if value is not None and name not in _HARMLESS_ARGUMENTS
    ]
    if unknown:
        raise ModelRefused(f"attention arguments that are not implemented: {sorted(unknown)}")
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int) or not 0 <= index < len(step.windows):
        raise ModelRefused(f"an attention module without a layer index: {type(module).__name__}")
    if window != step.windows[index]:
        raise ModelRefused(
            f"layer {index} has the window {step.windows[index]} in the configuration and "
            f"{window} in the model"
        )
    scaling = head_dim**-0.5 if scaling is None else float(scaling)
    return Layer(index=index, scaling=scaling, window=window, softcap=softcap)


def _attend_chunk(query: torch.Tensor, chunk: TokenRun, pool: KvPool, layer: Layer) -> torch.Tensor:
    """Attend several tokens (heads, tokens, head_dim) of one sequence to all before them."""
    first = first_visible_block(chunk.start, layer.window, pool.block_size)
    keys, values = pool.gather(layer.index, chunk.blocks[first:])
    first_position = first * pool.block_size
    num_keys = chunk.context_tokens - first_position
    keys, values = keys[:num_keys].transpose(0, 1), values[:num_keys].transpose(0, 1)
    device = query.device
    query_positions = torch.arange(chunk.start, chunk.context_tokens, device=device)
    key_positions = torch.arange(first_position, chunk.context_tokens, device=device)
    mask = visible(query_positions[:, None], key_positions[None, :], layer.window)
    return attend(query[None], keys[None], values[None], mask, layer)[0]
