"""The plan of decode graphs, and the memory that is reserved for them."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from engine.compute.graphs.buffers import StepBuffers
from engine.compute.graphs.capture import Capture
from engine.compute.graphs.rule import GraphSizes
from engine.compute.kv import KvLayout
from engine.compute.sampler import rows_at_a_time

GRAPH_BYTES = 4 * 2**20
"""The bytes reserved for one graph's own nodes and for the allocator's rounding. Not measured."""
_DRAW_BYTES = 40
"""The bytes of each logit that is ordered at a time. They are copies in 32 and 64 bits."""
_HIDDEN = 8
"""The most activations of the model's width that live at once, for each row."""
_INNER = 4
"""The most activations of the feed-forward's width that live at once, for each row."""


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The decode graphs that an engine captures."""

    # How a step is captured.
    capture: Capture
    # The most sequences that decode together.
    most_rows: int


def planned_bytes(
    sizes: GraphSizes, config: PretrainedConfig, layout: KvLayout, block_size: int
) -> int:
    """The bytes of the device's memory that are reserved for the graphs of a model.

    The graphs run one after another in the same memory, so the largest graph counts. It needs
    tokens and tiles, logits, the attention parts of one layer, a layer's activations, and the
    logits that are ordered for draws. The scratch block is counted too.
    """
    config = config.get_text_config()
    rows = sizes.rows[-1]
    parts = sizes.most_parts(rows)
    vocabulary: int = config.vocab_size
    width: int = config.hidden_size
    num_heads: int = config.num_attention_heads
    inner_width = getattr(config, "intermediate_size", None) or 4 * width
    # Some models have one width for each layer.
    inner: int = max(inner_width) if isinstance(inner_width, list) else inner_width
    activations = rows * (_HIDDEN * width + _INNER * inner) * layout.dtype.itemsize
    part_outputs = parts * num_heads * (layout.head_dim + 1) * 4
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
        + part_outputs
        + logits
        + draws
        + len(sizes.all()) * GRAPH_BYTES
        + layout.bytes_per_block(block_size)
    )
