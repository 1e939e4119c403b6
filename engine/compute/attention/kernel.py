"""Attention over the paged pool by kernels in Triton, for prefill and decode alike.

Nothing is gathered, and no mask is in memory. Keys and values are read through the block table.
Query heads that share a KV head (arXiv 2305.13245) are rows of one tile. Parts of a row are merged
by their log-sum-exp, as in FlashDecoding and cascade inference (arXiv 2402.05099).

`TRITON_INTERPRET=1`, set before this module is imported, runs the kernels on a CPU.
"""

from dataclasses import replace
from subprocess import SubprocessError

import torch
from triton.errors import TritonError

from engine.compute.attention.arithmetic import Layer
from engine.compute.attention.placed import PlacedTiles, place
from engine.compute.attention.step import Attend
from engine.compute.attention.tiles import Tiles
from engine.compute.attention.triton_kernels import attend_tile, merge_parts
from engine.compute.batch import build_batch
from engine.compute.compiler import NotCompiled
from engine.compute.kv import KvLayout, KvPool
from engine.schedule.runner import Work

_WIDE_SCORES = 64
"""The rows of scores in a wide tile: query rows x heads of one KV head."""
_KEYS = 64
"""The keys that a tile takes at a time, if a head is at most _KEYS_DIM wide."""
_LEAST = 16
"""The least size of each dimension of `tl.dot`."""
_KEYS_DIM = 128
"""The widest head of which a tile takes _KEYS keys at a time. It takes fewer keys of wider heads.
Triton holds up to three such pieces of keys and of values in a chip's shared memory, and smaller
chips have 99 KB of it."""
_FOUR_WARPS_BYTES = 16 * 1024
"""The most bytes of a tile's queries for four warps. A larger tile's output takes so many registers
that it needs twice the threads."""


class PagedKernel:
    """The kernel of one model. `tile_rows` is the width of a wide tile, for `tiles.cut`."""

    name = "triton"

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        self.tile_rows = max(_WIDE_SCORES // _padded(num_heads // num_kv_heads), 1)

    def step(self, tiles: Tiles, positions: torch.Tensor) -> Attend:
        """The attention function of one step. `positions` (rows) are on the device."""
        return self.over(place(tiles, positions))

    def over(self, placed: PlacedTiles) -> Attend:
        """The attention function over these tiles. It reads them anew at each call."""

        def attend(query: torch.Tensor, pool: KvPool, layer: Layer) -> torch.Tensor:
            num_heads, num_rows, head_dim = query.shape
            query = query if query.stride(2) == 1 else query.contiguous()
            kv_heads = pool.layout.num_kv_heads
            num_parts = len(placed.parts)
            outputs = query.new_empty((num_parts, num_heads, head_dim), dtype=torch.float32)
            log_sums = query.new_empty((num_parts, num_heads), dtype=torch.float32)
            group = _padded(num_heads // kv_heads)
            padded_dim = max(_padded(head_dim), _LEAST)
            num_keys = _keys_at_once(padded_dim, query.dtype)
            for tiles, rows in ((placed.wide, self.tile_rows), (placed.narrow, 1)):
                if not len(tiles):
                    continue
                scores = max(rows * group, _LEAST)
                attend_tile[(len(tiles), kv_heads)](
                    query,
                    pool.keys[layer.index],
                    pool.values[layer.index],
                    outputs,
                    log_sums,
                    tiles,
                    placed.rows,
                    placed.positions,
                    placed.table,
                    layer.scaling,
                    query.stride(0),
                    query.stride(1),
                    KV_HEADS=kv_heads,
                    HEADS_OF_EACH=num_heads // kv_heads,
                    GROUP=group,
                    SCORES=scores,
                    HEAD_DIM=head_dim,
                    PADDED_DIM=padded_dim,
                    BLOCK_SIZE=pool.block_size,
                    KEYS=num_keys,
                    SOFTCAP=layer.softcap or 0.0,
                    WINDOW=layer.window or 0,
                    num_warps=8 if scores * padded_dim * query.itemsize > _FOUR_WARPS_BYTES else 4,
                )
            merged = query.new_empty((num_heads, num_rows, head_dim))
            merge_parts[(num_rows, num_heads)](
                outputs,
                log_sums,
                placed.offsets,
                placed.parts,
                outputs if layer.sinks is None else layer.sinks,
                merged,
                num_heads,
                num_rows,
                HEAD_DIM=head_dim,
                PADDED_DIM=padded_dim,
                HAS_SINKS=layer.sinks is not None,
            )
            return merged

        return attend


def tried_kernel(layout: KvLayout, num_heads: int, device: torch.device) -> PagedKernel:
    """A kernel that has attended a prompt and a decode step on the device.

    Raises NotCompiled if the kernel can't do that. Triton needs a C compiler on the machine, and a
    chip that is neither too old nor too small for such heads.
    """
    kernel = PagedKernel(num_heads, layout.num_kv_heads)
    pool = KvPool(replace(layout, num_layers=1), 2, _LEAST, device)
    works = [
        Work(token_ids=[0, 0], start=0, block_table=[0]),
        Work(token_ids=[0], start=0, block_table=[1]),
    ]
    batch = build_batch(works, pool.block_size, device, tile_rows=kernel.tile_rows)
    assert batch.tiles is not None
    query = torch.zeros((num_heads, 3, layout.head_dim), dtype=layout.dtype, device=device)
    layer = Layer(index=0, scaling=1.0, window=None, softcap=None)
    try:
        kernel.step(batch.tiles, batch.positions)(query, pool, layer).cpu()
    except (TritonError, SubprocessError, OSError, RuntimeError) as error:
        why = str(error).strip().partition("\n")[0]
        raise NotCompiled(f"the kernel in Triton does not run on this device: {why}") from error
    return kernel


def _keys_at_once(padded_dim: int, dtype: torch.dtype) -> int:
    """The number of keys that a tile takes at a time."""
    if dtype == torch.float32:
        # Exact products don't run on tensor cores. They are unrolled into registers.
        return _LEAST
    return max(min(_KEYS, _KEYS * _KEYS_DIM // padded_dim), _LEAST)


def _padded(number: int) -> int:
    """The next power of two. The shapes of Triton's tensors must be powers of two."""
    return 1 << (number - 1).bit_length()
