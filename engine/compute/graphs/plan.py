"""What decode graphs are captured for, and the memory that they are counted with."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from engine.compute.graphs.buffers import StepBuffers
from engine.compute.graphs.capture import Capture
from engine.compute.graphs.rule import GraphSizes
from engine.compute.kv import KvLayout
from engine.compute.sampler import rows_at_a_time

GRAPH_BYTES = 4 * 2**20
"""Allowed for one graph's own nodes, and for what the allocator rounds up. Not measured."""
_DRAW_BYTES = 40
"""Of each logit that is ordered at a time: copies in 32 and 64 bits."""
_HIDDEN = 8
_INNER = 4
"""So many rows of a layer's width, and of its feed-forward's, live at once at most."""


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """Decode graphs that are wanted."""

    capture: Capture
    # The most sequences that decode together.
    most_rows: int


def planned_bytes(
    sizes: GraphSizes, config: PretrainedConfig, layout: KvLayout, block_size: int
) -> int:
    """The device's memory that the graphs of a model are counted with, in bytes.

    They run one after another, in memory that the largest one fills: tokens and tiles, logits,
    attention's parts of one layer, a layer's activations, and what is ordered for draws. A scratch
    block is part of it.
    """
    config = config.get_text_config()
    rows = sizes.rows[-1]
    parts = sizes.most_parts(rows)
    vocabulary: int = config.vocab_size
    width: int = config.hidden_size
    num_heads: int = config.num_attention_heads
    inner_width = getattr(config, "intermediate_size", None) or 4 * width
    # Some models have one for each layer.
    inner: int = max(inner_width) if isinstance(inner_width, list) else inner_width
    activations = rows * (_HIDDEN * width + _INNER * inner) * layout.dtype.itemsize
    of_parts = parts * num_heads * (layout.head_dim + 1) * 4
    logits = rows * vocabulary * (layout.dtype.itemsize + 4)
    draws = min(rows, rows_at_a_time(vocabulary)) * vocabulary * _DRAW_BYTES
    buffers = StepBuffers(
        rows,
        parts,
        blocks_a_part=sizes.split // block_size,
        scratch_slot=0,
        vocabulary=vocabulary,
        device=torch.device("meta"),
    )
    return (
        buffers.num_bytes
        + activations
        + of_parts
        + logits
        + draws
        + len(sizes.all()) * GRAPH_BYTES
        + layout.bytes_per_block(block_size)
    )
