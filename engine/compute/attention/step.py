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
from torch.nn.functional import pad

from engine.compute.attention.arithmetic import (
    Layer,
    attend,
    attend_decodes,
    first_visible_block,
    visible,
)
from engine.compute.attention.replay import Replay
from engine.compute.batch import Batch
from engine.compute.errors import ModelRefused
from engine.compute.kv import KvPool
from engine.compute.linear import PackedCache, StepStates

Attend = Callable[[torch.Tensor, KvPool, Layer], torch.Tensor]
"""Attends all rows of a step (heads, rows, head_dim), whose keys and values are in the pool."""

ATTENTION_NAME = "holdfast"
STEP_ARGUMENT = "holdfast_step"
# Arguments that models pass along and that change nothing in a packed forward of ours.
_HARMLESS_ARGUMENTS = set(
    "position_ids use_cache output_attentions output_hidden_states output_router_logits return_dict"
    "".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """What one forward's attention layers share."""

    pool: KvPool
    batch: Batch
    # Each layer's sliding window in tokens, as the configuration has it.
    windows: Sequence[int | None]
    # The layers whose attention ran, for the check at load.
    visited: list[int] = field(default_factory=list)
    # The places of layers whose keys and values are in the pool.
    written: set[int] = field(default_factory=set)
    # The paged kernel, where it is used.
    attend: Attend | None = None
    # Attends in the place of everything else. Then nothing is written.
    replay: Replay | None = None
    # DepthReached ends the forward behind the keys and values of so many layers.
    depth: int | None = None


class DepthReached(Exception):
    """A forward has written the keys and values of all layers that it was made for."""


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
    result is (1, tokens, heads, head_dim). Raises ModelRefused for what is not implemented, and
    DepthReached.
    """
    step = arguments.pop(STEP_ARGUMENT, None)
    if isinstance(step, AttentionProbe):
        step.note(module, query, key, value)
        return query.new_zeros((*query.shape[:1], *query.shape[2:0:-1], value.shape[-1])), None
    if not isinstance(step, AttentionStep):
        raise ModelRefused("the model does not hand its forward arguments to its attention")
    if attention_mask is not None:
        raise ModelRefused("the model brings an attention mask of its own")
    layer = _checked_layer(step, module, query, arguments)
    layout = step.pool.layout
    if step.replay is not None:
        output = step.replay.attend(query, key, value, layer)
        return output.transpose(1, 2).contiguous(), None
    if layout.latent_rank is not None:
        output = _attend_latents(module, query[0], step, layer, layout.latent_rank)
        return output.transpose(0, 1).unsqueeze(0).contiguous(), None
    if layer.index not in step.written:  # otherwise its keys and values are an earlier layer's
        step.written.add(layer.index)
        # A layer with fewer KV heads than the widest has each of them several times.
        more = layout.num_kv_heads // key.shape[1]
        keys = _widened(key[0], layout.head_dim).transpose(0, 1)
        values = _widened(value[0], layout.head_dim).transpose(0, 1)
        if more > 1:  # a copy otherwise, too
            keys = keys.repeat_interleave(more, dim=1)
            values = values.repeat_interleave(more, dim=1)
        step.pool.write(layer.index, step.batch.slots, keys, values)
    if len(step.visited) == step.depth:
        raise DepthReached
    # A narrower head is kept with zeros behind it, which add nothing to a product.
    output = _attend_rows(_widened(query[0], layout.head_dim), step, layer)
    return output[..., : value.shape[-1]].transpose(0, 1).unsqueeze(0).contiguous(), None


def _checked_layer(
    step: AttentionStep, module: torch.nn.Module, query: torch.Tensor, arguments: dict[str, Any]
) -> Layer:
    """The layer that a model's call is of, noted as visited.

    Raises ModelRefused for arguments that are not implemented.
    """
    scaling = arguments.pop("scaling", None)
    window = arguments.pop("sliding_window", None)
    softcap = arguments.pop("softcap", None)
    sinks: torch.Tensor | None = arguments.pop("s_aux", None)
    if arguments.pop("dropout", 0.0):
        raise ModelRefused("attention with dropout: the model is not in evaluation mode")
    if arguments.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
        raise ModelRefused("attention that is not causal")
    set_arguments = {name for name, value in arguments.items() if value is not None}
    unknown = sorted(set_arguments - _HARMLESS_ARGUMENTS)
    if unknown:
        raise ModelRefused(f"attention arguments that are not implemented: {unknown}")
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int) or not 0 <= index < len(step.windows):
        raise ModelRefused(f"an attention module without a layer index: {type(module).__name__}")
    if window != step.windows[index]:
        raise ModelRefused(
            f"layer {index} has the window {step.windows[index]} in the configuration and "
            f"{window} in the model"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
    step.visited.append(index)
    return Layer(step.pool.layout.place_of[index], scaling, window, softcap, sinks)


def _attend_latents(
    module: Any, query: torch.Tensor, step: AttentionStep, layer: Layer, rank: int
) -> torch.Tensor:
    """Rows (heads, rows, width) to latents of a width of `rank`, which `LatentCache` wrote.

    The projection from a latent to a head's keys is taken to the queries' side, and the one to its
    values behind the sum, so that all heads share one KV head (DeepSeek-V2, arXiv 2405.04434,
    2.1.2).
    """
    expand = module.kv_b_proj
    nope = module.qk_nope_head_dim
    if not isinstance(expand, torch.nn.Linear) or getattr(expand, "bias", None) is not None:
        raise ModelRefused("latents that are expanded in another way")
    heads = expand.weight.view(query.shape[0], -1, rank)
    absorbed = torch.cat([query[..., :nope] @ heads[:, :nope], query[..., nope:]], dim=-1)
    output = _attend_rows(absorbed, step, layer)[..., :rank]
    return output @ heads[:, nope:].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """One attention layer, as a forward calls it."""

    layer: int
    kv_heads: int
    # The most numbers of a key's or value's head.
    width: int
    # The index of the layer whose keys and values it attends to: its own, or an earlier one's.
    source: int


class AttentionProbe:
    """Notes what attention layers a model has. It attends to nothing."""

    def __init__(self) -> None:
        self.layers: list[ProbedLayer] = []
        self._keys: list[tuple[torch.Tensor, int]] = []

    def note(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            raise ModelRefused(f"an attention module without a layer index: {type(module)}")
        source = next((number for earlier, number in self._keys if earlier is key), index)
        self._keys.append((key, source))
        width = max(query.shape[-1], value.shape[-1])
        self.layers.append(ProbedLayer(index, key.shape[1], width, source))


class LatentCache(PackedCache):
    """Where a model with multi-head latent attention would keep a step's latents: in the pool."""

    def __init__(self, pool: KvPool, slots: torch.Tensor, states: StepStates | None = None) -> None:
        super().__init__(states)
        self._pool = pool
        self._slots = slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent and the rotated part, each (1, 1, tokens, width), which are given back."""
        both = torch.cat([key_states, value_states], dim=-1)
        layout = self._pool.layout
        if both.shape[:2] != (1, 1) or both.shape[3] != layout.head_dim:
            raise ModelRefused(f"layer {layer_idx} keeps no latents: {tuple(both.shape)}")
        rows = both[0].transpose(0, 1)
        self._pool.write(layout.place_of[layer_idx], self._slots, rows, rows)
        return key_states, value_states


def _attend_rows(query: torch.Tensor, step: AttentionStep, layer: Layer) -> torch.Tensor:
    """All rows of the step (heads, rows, width) to what is in the pool; the same shape."""
    pool = step.pool
    batch = step.batch
    if step.attend is not None:
        return step.attend(query, pool, layer)
    output = torch.empty_like(query)
    for run, blocks in batch.chunks:
        rows = slice(run.begin, run.begin + run.count)
        end = run.start + run.count
        first = first_visible_block(run.start, layer.window, pool.block_size)
        gathered = pool.gather(layer.index, blocks[first:])
        begin = first * pool.block_size
        keys, values = (rows_of[: end - begin].transpose(0, 1)[None] for rows_of in gathered)
        query_positions = torch.arange(run.start, end, device=query.device)
        key_positions = torch.arange(begin, end, device=query.device)
        attention_mask = visible(query_positions[:, None], key_positions[None, :], layer.window)
        sinks = None if layer.sinks is None else layer.sinks.view(1, -1, 1, 1)
        run_query = query[None, :, rows]
        output[:, rows] = attend(run_query, keys, values, attention_mask, layer, sinks)[0]
    for group in batch.decode_groups:
        output[:, group.rows] = attend_decodes(query[:, group.rows], group, pool, layer)
    return output


def _widened(rows: torch.Tensor, width: int) -> torch.Tensor:
    return rows if rows.shape[-1] == width else pad(rows, (0, width - rows.shape[-1]))
