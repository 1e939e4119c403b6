"""What the forkserver imports (tests/forking.py).

None of it is garbage of its children: each would look through all of it, a million objects with
torch's, as it becomes ready, and so copy the pages that they share. While it is imported the
collector would take a quarter of the time.
"""

import gc
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

gc.disable()

import torch  # noqa: E402
from litestar import Litestar  # noqa: E402

from engine.compute import kv  # noqa: E402

MODULES = ["engine.backends.native", "engine.backends.prepare.renderers",
           "engine.backends.synthetic_renderer", "engine.__main__",
           "gateway.__main__", "gateway.cli.serve",
           "transformers.models.llama.modeling_llama", "aiosqlite", "uvicorn.lifespan.on",
           "uvicorn.loops.auto", "uvicorn.protocols.http.auto",
           "uvicorn.protocols.websockets.auto", "uvloop", "anyio._backends._asyncio",
           "tests.forked_workers"]  # fmt: skip


def mapped_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As `kv.zeros`, whose half a gigabyte takes half a second of CPU time: a page is taken when it
    is written to."""
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=private)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(shape))


kv.zeros = mapped_zeros
for name in MODULES:
    with suppress(ImportError):  # not everything is installed everywhere
        import_module(name)
Litestar()  # imports the framework's plugins, half of what an engine's start takes
gc.collect()
gc.freeze()
gc.enable()
