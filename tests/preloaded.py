"""The last module that the forkserver imports (tests/forking.py).

What it has imported by now is no garbage of its children: each would look through all of it, a
million objects with torch's, as it becomes ready, and so copy the pages that they share.
"""

import gc
import math
import mmap
from collections.abc import Sequence

import torch
from litestar import Litestar

from engine.compute import kv


def mapped_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As `kv.zeros`, whose half a gigabyte takes half a second of CPU time: a page is taken when it
    is written to."""
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=private)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(shape))


kv.zeros = mapped_zeros
Litestar()  # imports the framework's plugins, half of what an engine's start takes
gc.collect()
gc.freeze()
