"""Attention over the paged pool by a kernel in C++, for prefill and decode alike, on a CPU.

It does the same as `kernel.py` does on a GPU, over the same tiles. Nothing is gathered, no mask is
in memory, and parts are merged by their log-sum-exp. `cpu_kernel.cpp` was either built ahead for
the model's heads (`prebuilt.py`), or is compiled when the model is loaded.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch

from engine.compute.attention.arithmetic import Layer
from engine.compute.attention.placed import PlacedTiles, place
from engine.compute.attention.prebuilt import BUILT, ELEMENTS, LANES, SOURCE, constants_of
from engine.compute.attention.step import Attend
from engine.compute.attention.tiles import Tiles
from engine.compute.compiler import NotCompiled, load_library
from engine.compute.errors import ModelRefused
from engine.compute.kv import KvLayout, KvPool


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Step(ctypes.Structure):
    """`Step` of cpu_kernel.cpp, field by field."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "tiles rows table offsets parts positions outputs log_sums"),
        *_fields(ctypes.c_int32, "num_tiles num_rows threads kv_heads group"),
    )


class _Layer(ctypes.Structure):
    """`Layer` of cpu_kernel.cpp, field by field."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "query keys values sinks merged"),
        *_fields(ctypes.c_int64, "head_stride row_stride"),
        *_fields(ctypes.c_float, "scaling softcap"),
        *_fields(ctypes.c_int32, "window block_size"),
    )


class CpuKernel:
    """The kernel of one model. `tile_rows` is the width of a wide tile, for `tiles.cut`.

    `level` is the processor's level for which the library was built (`engine.compute.compiler`).
    """

    def __init__(self, layout: KvLayout, num_heads: int, built: Path = BUILT) -> None:
        """`built` is the folder of libraries that were built ahead. Raises NotCompiled."""
        element = str(layout.dtype).removeprefix("torch.")
        if element not in ELEMENTS:
            raise NotCompiled(f"the kernel in C++ reads no {layout.dtype}")
        group = num_heads // layout.num_kv_heads
        self.tile_rows = max(LANES // group, 1)
        constants = constants_of(layout.head_dim, element, lanes=self.tile_rows * group)
        library = load_library(SOURCE, constants, built)
        self.level = library.level
        self._attend = library.code.attend
        self._attend.restype = None
        self._attend.argtypes = [ctypes.POINTER(_Step), ctypes.POINTER(_Layer)]
        self._heads = (layout.num_kv_heads, group)
        self._compiled_for = (num_heads, layout.head_dim, layout.dtype)

    @property
    def name(self) -> str:
        return f"cpp {self.level}"

    def step(self, tiles: Tiles, positions: torch.Tensor) -> Attend:
        """The attention function of one step. `positions` (rows) are those of its tokens."""
        return self.over(place(tiles, positions))

    def over(self, placed: PlacedTiles) -> Attend:
        """The attention function over these tiles. It reads them anew at each call."""
        num_heads, head_dim, _ = self._compiled_for
        num_parts = len(placed.parts)
        memory = [
            placed.tiles,
            placed.rows,
            placed.table,
            placed.offsets,
            placed.parts,
            placed.positions,
            torch.empty(num_parts * num_heads * head_dim),
            torch.empty(num_parts * num_heads),
        ]
        pointers = (tensor.data_ptr() for tensor in memory)
        threads = torch.get_num_threads()
        num_tiles = len(placed.tiles)
        step = _Step(*pointers, num_tiles, len(placed.positions), threads, *self._heads)

        # `step` points into `memory`. The function holds it, so that it lives as long.
        def attend(
            query: torch.Tensor, pool: KvPool, layer: Layer, _held: object = memory
        ) -> torch.Tensor:
            query = query if query.stride(2) == 1 else query.contiguous()
            heads, num_rows, head_dim = query.shape
            if (heads, head_dim, query.dtype) != self._compiled_for:
                raise ModelRefused(f"layer {layer.index} has other heads: {tuple(query.shape)}")
            merged = torch.empty((num_rows, heads, head_dim), dtype=query.dtype)
            arguments = _Layer(
                query.data_ptr(),
                pool.keys[layer.index].data_ptr(),
                pool.values[layer.index].data_ptr(),
                None if layer.sinks is None else layer.sinks.data_ptr(),
                merged.data_ptr(),
                query.stride(0),
                query.stride(1),
                layer.scaling,
                layer.softcap or 0.0,
                layer.window or 0,
                pool.block_size,
            )
            self._attend(step, arguments)
            return merged.transpose(0, 1)

        return attend
