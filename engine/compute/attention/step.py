"""Attention over the paged pool, registered with transformers under the name `holdfast`.

The model's forward takes a packed row of tokens, and passes `holdfast_step` on to every attention
layer. The layer writes the new keys and values to the pool. Then it gathers each sequence's blocks
once, and attends to them with a causal mask and with the layer's sliding window. Sequences with one
new token are attended together (`arithmetic.py`). A paged kernel (`kernel.py`, `cpu_kernel.py`)
attends all sequences at once, and gathers nothing.

ModelRefused is raised for an argument that would change the result and is not implemented here. If
it were ignored, the result would be wrong and would still pass most comparisons.
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
"""Attends all rows of a step. Their keys and values are in the pool. The queries and the result are
(heads, rows, head_dim)."""

ATTENTION_NAME = "holdfast"
STEP_ARGUMENT = "holdfast_step"
# The arguments that models pass on and that change nothing in a packed forward.
_HARMLESS_ARGUMENTS = set(
    "position_ids use_cache output_attentions output_hidden_states output_router_logits return_dict"
    "".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """The data that all attention layers of one forward share."""

    pool: KvPool
    batch: Batch
    # Each layer's sliding window in tokens, by the configuration; None: the layer has none.
    windows: Sequence[int | None]
    # The layers whose attention ran, in order, for the check at the load.
    visited: list[int] = field(default_factory=list)
    # The places of the layers whose keys and values this forward has written.
    written: set[int] = field(default_factory=set)
    # The paged kernel's function; None: torch's functions attend.
    attend: Attend | None = None
    # If it is given, it alone attends, and nothing is written.
    replay: Replay | None = None
    # The number of layers whose keys and values are written before DepthReached ends the forward;
    # None: all layers run.
    depth: int | None = None


class DepthReached(Exception):
    """A forward has written the keys and values of its first `depth` layers."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend a packed row. The signature is that of transformers' attention functions.

    `query` is (1, heads, tokens, head_dim). `key` and `value` are (1, kv_heads, tokens, head_dim).
    The result is (1, tokens, heads, head_dim). Raises ModelRefused for arguments that are not
    implemented, and DepthReached at the step's depth.
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
    if layer.index not in step.written:  # otherwise the layer uses an earlier layer's keys
        step.written.add(layer.index)
        # The pool has as many KV heads as the widest layer. The heads of a layer with fewer are
        # repeated.
        repeats = layout.num_kv_heads // key.shape[1]
        keys = _widened(key[0], layout.head_dim).transpose(0, 1)
        values = _widened(value[0], layout.head_dim).transpose(0, 1)
        if repeats > 1:  # repeating once would copy, too
            keys = keys.repeat_interleave(repeats, dim=1)
            values = values.repeat_interleave(repeats, dim=1)
        step.pool.write(layer.index, step.batch.slots, keys, values)
    if len(step.visited) == step.depth:
        raise DepthReached
    # A narrower head is kept with zeros behind it. They add nothing to a product.
    output = _attend_rows(_widened(query[0], layout.head_dim), step, layer)
    return output[..., : value.shape[-1]].transpose(0, 1).unsqueeze(0).contiguous(), None


def _checked_layer(
    step: AttentionStep, module: torch.nn.Module, query: torch.Tensor, arguments: dict[str, Any]
) -> Layer:
    """The layer that the model's call belongs to. It is noted as visited.

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
    """Attend rows (heads, rows, width) to latents of `rank` numbers, which `LatentCache` wrote.

    The projection from a latent to a head's keys is applied to the queries instead. The projection
    to a head's values is applied to the weighed sum of latents. So all heads share one KV head
    (DeepSeek-V2, arXiv 2405.04434, 2.1.2).
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

    # The index of the layer.
    layer: int
    # The number of its KV heads.
    kv_heads: int
    # The width of a head's keys or of its values, whichever is larger.
    width: int
    # The index of the layer that makes the keys and values: this layer or an earlier one.
    source: int


class AttentionProbe:
    """Notes a model's attention layers in a forward. It attends to nothing."""

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
    """The cache of a model with multi-head latent attention. It writes a step's latents to the
    pool."""

    def __init__(self, pool: KvPool, slots: torch.Tensor, states: StepStates | None = None) -> None:
        super().__init__(states)
        self._pool = pool
        self._slots = slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the latents and the rotated parts, each (1, 1, tokens, width), and return them.

        Raises ModelRefused if they have another shape.
        """
        both = torch.cat([key_states, value_states], dim=-1)
        layout = self._pool.layout
        if both.shape[:2] != (1, 1) or both.shape[3] != layout.head_dim:
            raise ModelRefused(f"layer {layer_idx} keeps no latents: {tuple(both.shape)}")
        rows = both[0].transpose(0, 1)
        self._pool.write(layout.place_of[layer_idx], self._slots, rows, rows)
        return key_states, value_states


def _attend_rows(query: torch.Tensor, step: AttentionStep, layer: Layer) -> torch.Tensor:
    """Attend all rows of the step to the pool. `query` and the result are (heads, rows, width)."""
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
    """Rows (..., width) with zeros behind their own numbers."""
    return rows if rows.shape[-1] == width else pad(rows, (0, width - rows.shape[-1]))
