"""Triton's compiler takes the kernels for the chips that they are for, without such a chip.

Its interpreter runs them as Python, which knows neither a variable's type nor a chip's memory.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.compute.attention.arithmetic import Layer
from engine.compute.batch import build_batch
from engine.compute.kv import KvLayout, KvPool
from engine.schedule.runner import Work

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

# Bytes of shared memory that a block of threads may have (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"), by the compute capability.
SHARED_BYTES = {89: 99 * 1024, 90: 227 * 1024}
BLOCK_SIZE = 16


class Chip:
    """A driver of Triton's for a chip that is not here: it compiles and does not launch."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, _device: int) -> int:
        return 0


@pytest.mark.parametrize(
    ("capability", "dtype", "heads", "window", "softcap"),
    [
        pytest.param(90, torch.bfloat16, (32, 8, 128), None, None, id="llama-h200"),
        pytest.param(89, torch.bfloat16, (16, 8, 256), 4096, 50.0, id="gemma2-l4"),
        pytest.param(89, torch.float32, (4, 4, 72), None, None, id="float32-l4"),
    ],
)
def test_a_chip_takes_what_a_step_of_prefill_and_decode_launches(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: int,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    window: int | None,
    softcap: float | None,
) -> None:
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from engine.compute.attention.kernel import PagedKernel

    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> None:
        kernels.append(run(self, *args, warmup=True, **options))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", Chip(capability))
    num_heads, kv_heads, head_dim = heads
    layout = KvLayout(num_layers=1, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    pool = KvPool(layout, 8, BLOCK_SIZE, torch.device("cpu"))
    kernel = PagedKernel(num_heads, kv_heads)
    works = [
        Work(token_ids=[1] * 40, start=5, block_table=[1, 2, 3]),
        Work(token_ids=[1], start=20, block_table=[4, 5]),
    ]
    batch = build_batch(works, BLOCK_SIZE, pool.device, tile_rows=kernel.tile_rows)
    assert batch.tiles is not None
    query = torch.zeros((num_heads, 41, head_dim), dtype=dtype)
    layer = Layer(index=0, scaling=head_dim**-0.5, window=window, softcap=softcap)
    kernel.step(batch.tiles, batch.positions)(query, pool, layer)
    assert [kernel.name for kernel in kernels] == ["attend_tile", "attend_tile", "merge_parts"]
    assert all(kernel.metadata.shared <= SHARED_BYTES[capability] for kernel in kernels)
