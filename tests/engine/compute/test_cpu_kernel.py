"""The kernel in C++: equal to plain attention, whoever else is in the step, and done without."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from engine.compute.attention.arithmetic import Layer
from engine.compute.attention.cpu_kernel import CpuKernel
from engine.compute.batch import build_batch
from engine.compute.compiler import NotCompiled, load_library
from engine.compute.errors import ModelRefused
from engine.compute.kv import KvLayout, KvPool
from engine.compute.loading import prepare_model
from engine.schedule.runner import Work
from scripts.gpu.exactness import ALLOWED, FEW_SHAPES, SHAPES, kernel_differences
from tests.engine.compute.tiny import GREEDY, new_tiny_model

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_the_kernel_equals_plain_attention(dtype: torch.dtype) -> None:
    shapes = [*SHAPES, *FEW_SHAPES] if dtype == torch.float32 else SHAPES[:2]
    differences = dict(kernel_differences(CPU, dtype, shapes, CpuKernel))
    wrong = {what: size for what, size in differences.items() if not size <= ALLOWED[dtype]}
    assert len(differences) >= 3 * len(shapes) and not wrong


@needs_compiler
def test_a_row_is_the_same_to_the_bit_whoever_else_is_in_the_step_and_on_any_threads() -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    pool = KvPool(layout, 512, 16, CPU)
    torch.manual_seed(1)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    kernel, layer = CpuKernel(layout, 8), Layer(index=0, scaling=0.125, window=None, softcap=None)
    shapes = [(1030, 1), (200, 37), (0, 20), (2999, 1), (64, 1)]
    order, works = torch.randperm(512).tolist(), []
    for start, count in shapes:
        num = -(-(start + count) // 16)
        table, order = order[:num], order[num:]
        works.append(Work(token_ids=[1] * count, start=start, block_table=table, sample=GREEDY))
    queries = [torch.randn(8, count, 64) for _, count in shapes]

    def attended(chosen: list[int]) -> torch.Tensor:
        batch = build_batch([works[index] for index in chosen], 16, CPU, tile_rows=kernel.tile_rows)
        assert batch.tiles is not None
        query = torch.cat([queries[index] for index in chosen], dim=1)
        return kernel.step(batch.tiles, batch.positions)(query, pool, layer)

    together = attended([0, 1, 2, 3, 4]).split([count for _, count in shapes], dim=1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for index in range(len(shapes)):
            assert torch.equal(attended([index]), together[index])
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_torch_attends_and_an_explicit_wish_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    model = new_tiny_model("llama", "auto")
    assert model.loaded.kernel is None
    with pytest.raises(ModelRefused, match=r"`attention`: .*no-compiler"):
        prepare_model(model.plain, "cpp")


def test_what_a_compiler_refuses_is_told_in_a_line(tmp_path: Path) -> None:
    compiler, source = tmp_path / "compiler", tmp_path / "source.cpp"
    source.write_text("")
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo hm; echo wrong >&2; exit 1; }\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(compiler))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(NotCompiled, match=r"compiler failed: wrong$"):
            load_library(source, {})


@needs_compiler
def test_a_library_is_kept_and_only_in_a_folder_that_nobody_else_writes_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "two.cpp"
    source.write_text('extern "C" int two() { return NUMBER; }')
    assert load_library(source, {"NUMBER": 2}).two() == 2
    (kept,) = (tmp_path / "holdfast" / "kernels").iterdir()
    made = kept.stat().st_mtime_ns
    assert load_library(source, {"NUMBER": 2}).two() == 2
    assert kept.stat().st_mtime_ns == made
    assert load_library(source, {"NUMBER": 3}).two() == 3
    assert len(list(kept.parent.iterdir())) == 2
    os.chmod(kept.parent, 0o777)
    kept.unlink()
    kept.write_bytes(b"not a library")
    assert load_library(source, {"NUMBER": 2}).two() == 2
