"""The kernel in C++: equal to plain attention, whoever else is in the step, and done without."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import pytest
import torch

from engine.compute.attention.arithmetic import Layer
from engine.compute.attention.cpu_kernel import CpuKernel
from engine.compute.attention.prebuilt import BUILT, ELEMENTS, SOURCE, constants_of
from engine.compute.batch import build_batch
from engine.compute.compiler import (
    LEVELS,
    NATIVE,
    Level,
    NotCompiled,
    build,
    levels_of,
    load_library,
)
from engine.compute.errors import ModelRefused
from engine.compute.kv import KvLayout, KvPool
from engine.compute.loading import prepare_model
from engine.schedule.runner import Work
from scripts.gpu.exactness import ALLOWED, FEW_SHAPES, SHAPES, Shape, kernel_comparisons
from scripts.stack import ROOT
from tests.engine.compute.tiny import GREEDY, new_tiny_model

CPU = torch.device("cpu")
BUILDER = "engine.compute.attention.prebuilt"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def assert_equals_plain(
    dtype: torch.dtype, shapes: Sequence[Shape], new_kernel: Callable[[KvLayout, int], CpuKernel]
) -> None:
    compared = kernel_comparisons(CPU, dtype, shapes, new_kernel)
    differences = {what: compare() for what, compare in compared}
    wrong = {what: size for what, size in differences.items() if not size <= ALLOWED[dtype]}
    assert len(differences) >= 3 * len(shapes) > 0 and not wrong


@needs_compiler
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_the_kernel_equals_plain_attention(dtype: torch.dtype) -> None:
    shapes = [*SHAPES, *FEW_SHAPES] if dtype == torch.float32 else SHAPES[:2]
    assert_equals_plain(dtype, shapes, CpuKernel)


def attended(
    kernel: CpuKernel, works: Sequence[Work], query: torch.Tensor, pool: KvPool, layer: Layer
) -> torch.Tensor:
    batch = build_batch(works, 16, CPU, tile_rows=kernel.tile_rows)
    assert batch.tiles is not None
    return kernel.step(batch.tiles, batch.positions)(query, pool, layer)


def random_pool(head_dim: int, num_blocks: int) -> KvPool:
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=head_dim, dtype=torch.float32)
    pool = KvPool(layout, num_blocks, 16, CPU)
    torch.manual_seed(1)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    return pool


@needs_compiler
def test_a_row_is_the_same_to_the_bit_whoever_else_is_in_the_step_and_on_any_threads() -> None:
    pool = random_pool(head_dim=64, num_blocks=512)
    kernel = CpuKernel(pool.layout, 8)
    layer = Layer(0, 0.125, None, None)
    shapes = [(1030, 1), (200, 37), (0, 20), (2999, 1), (64, 1)]
    order = torch.randperm(512).tolist()
    works = []
    for start, count in shapes:
        num = -(-(start + count) // 16)
        table = order[:num]
        order = order[num:]
        works.append(Work(token_ids=[1] * count, start=start, block_table=table, sample=GREEDY))
    queries = [torch.randn(8, count, 64) for _, count in shapes]

    whole = torch.cat(queries, dim=1)
    counts = [count for _, count in shapes]
    together = attended(kernel, works, whole, pool, layer).split(counts, dim=1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for work, query, row in zip(works, queries, together, strict=True):
            assert torch.equal(attended(kernel, [work], query, pool, layer), row)
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_a_row_alone_is_the_same_to_the_bit_as_among_rows_of_its_sequence(group: int) -> None:
    pool = random_pool(head_dim=80, num_blocks=128)
    heads = 2 * group
    start = 990
    count = 24  # below where the keys of one row are cut
    kernel = CpuKernel(pool.layout, heads)
    table = torch.randperm(128).tolist()
    query = torch.randn(heads, count, 80)

    def of_rows(layer: Layer, first: int, rows: int) -> torch.Tensor:
        work = Work(token_ids=[1] * rows, start=start + first, block_table=table, sample=GREEDY)
        return attended(kernel, [work], query[:, first : first + rows], pool, layer)

    for window, softcap in ((None, None), (200, None), (None, 5.0)):
        layer = Layer(0, 0.1, window, softcap)
        together = of_rows(layer, 0, count)
        for first in range(count):
            assert torch.equal(of_rows(layer, first, 1)[:, 0], together[:, first])


def test_without_a_compiler_torch_attends_and_an_explicit_wish_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    model = new_tiny_model("llama", "auto")
    assert model.loaded.kernel is None and model.loaded.attention == "sdpa"
    assert model.loaded.why_no_kernel is not None and "no-compiler" in model.loaded.why_no_kernel
    with pytest.raises(ModelRefused, match=r"`attention`: .*no-compiler"):
        prepare_model(model.plain, "cpp")


def test_what_a_compiler_refuses_is_told_in_a_line(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    source = tmp_path / "source.cpp"
    source.write_text("")
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo hm; echo wrong >&2; exit 1; }\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(compiler))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(NotCompiled, match=r"compiler failed: wrong$"):
            load_library(source, {})


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel for heads of 64 channels, for every level of this kind of machine."""
    folder = tmp_path_factory.mktemp("prebuilt")
    build(SOURCE, [constants_of(64, element) for element in ELEMENTS], folder)
    return folder


@needs_compiler
@pytest.mark.parametrize("level", LEVELS.get(platform.machine(), ()), ids=lambda level: level.name)
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_a_kernel_that_was_built_before_equals_plain_attention_without_a_compiler(
    prebuilt: Path,
    level: Level,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "one"  # with what was built for this level alone
    shutil.copytree(prebuilt, folder, ignore=lambda _, of: {n for n in of if level.name not in n})
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    names = set()

    def new_kernel(layout: KvLayout, num_heads: int) -> CpuKernel:
        kernel = CpuKernel(layout, num_heads, folder)
        names.add(kernel.name)
        return kernel

    try:
        new_kernel(KvLayout(num_layers=1, num_kv_heads=1, head_dim=64, dtype=dtype), 1)
    except NotCompiled:
        pytest.skip(f"this processor has not all of {level.name}")
    shapes = [shape for shape in [*SHAPES, *FEW_SHAPES] if shape.head_dim == 64]
    assert_equals_plain(dtype, shapes, new_kernel)
    assert names == {f"cpp {level.name}"}


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
def test_what_was_built_for_avx2_has_no_instruction_of_avx512(prebuilt: Path) -> None:
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump")

    def wide_registers(level: str) -> list[bool]:
        command = ["objdump", "--disassemble", "--no-show-raw-insn"]
        commands = [[*command, str(path)] for path in prebuilt.glob(f"*-{level}-*.so")]
        codes = [subprocess.run(c, capture_output=True, text=True, check=True) for c in commands]
        return ["%zmm" in code.stdout or "%k1" in code.stdout for code in codes]

    assert wide_registers("x86-64-v3") == [False] * len(ELEMENTS)
    assert wide_registers("x86-64-v4") == [True] * len(ELEMENTS)


def test_a_processor_gets_the_best_level_of_which_it_has_all_instructions() -> None:
    best, lesser = LEVELS["x86_64"]
    assert lesser.needs < best.needs

    def chosen(flags: Set[str]) -> list[str]:
        return [level.name for level in levels_of("x86_64", flags)]

    assert chosen(best.needs | {"amx_tile"}) == ["x86-64-v4", "x86-64-v3"]
    assert chosen(best.needs - {"avx512vl"}) == ["x86-64-v3"]
    assert chosen(lesser.needs) == ["x86-64-v3"]
    assert chosen(lesser.needs - {"avx2"}) == chosen(frozenset()) == []
    assert [level.name for level in levels_of("aarch64", frozenset())] == ["armv8-a"]
    assert levels_of("riscv64", best.needs) == []


@needs_compiler
def test_a_library_of_another_source_or_of_other_constants_is_not_taken(tmp_path: Path) -> None:
    source = tmp_path / "two.cpp"
    folder = tmp_path / "built"
    source.write_text('extern "C" int two() { return NUMBER; }')
    libraries = build(source, [{"NUMBER": 2}], folder)
    if not libraries:
        pytest.skip("nothing is built for this kind of machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(tmp_path / "no-compiler"))
        library = load_library(source, {"NUMBER": 2}, folder)
        assert library.code.two() == 2 and library.level != NATIVE
        with pytest.raises(NotCompiled):
            load_library(source, {"NUMBER": 3}, folder)
        damaged = tmp_path / "damaged"
        damaged.mkdir()
        for path in libraries:
            (damaged / path.name).write_bytes(b"not a library")
        with pytest.raises(NotCompiled):
            load_library(source, {"NUMBER": 2}, damaged)
    source.write_text('extern "C" int two() { return NUMBER + 1; }')
    assert load_library(source, {"NUMBER": 2}, folder).code.two() == 3


def test_the_image_has_what_the_engine_looks_for() -> None:
    """The stage that builds kernels is given all that it imports, and they go where they are read.

    The program runs in a folder with these files alone, by Python without its packages.
    """
    text = (ROOT / "engine" / "Dockerfile").read_text("utf-8")
    stage = text.partition("AS kernels\n")[2].partition("\nFROM ")[0]
    copied = [words.split() for words in re.findall(r"^COPY (.*)$", stage, re.MULTILINE)]
    with tempfile.TemporaryDirectory() as folder:
        for *names, target in copied:
            Path(folder, target).mkdir(parents=True, exist_ok=True)
            for name in names:
                shutil.copy(ROOT / name, Path(folder, target))
        code = f"import {BUILDER}; print({BUILDER}.SOURCE.exists())"
        command = [sys.executable, "-S", "-c", code]
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert process.stdout == "True\n", process.stderr
    assert f"RUN python -m {BUILDER} /kernels" in stage
    assert f"COPY --from=kernels /kernels {BUILT.relative_to(ROOT)}\n" in text


@needs_compiler
def test_a_library_is_kept_and_only_in_a_folder_that_nobody_else_writes_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "two.cpp"
    source.write_text('extern "C" int two() { return NUMBER; }')
    assert load_library(source, {"NUMBER": 2}).code.two() == 2
    (library,) = (tmp_path / "holdfast" / "kernels").iterdir()
    built_ns = library.stat().st_mtime_ns
    assert load_library(source, {"NUMBER": 2}).code.two() == 2
    assert library.stat().st_mtime_ns == built_ns
    assert load_library(source, {"NUMBER": 3}).code.two() == 3
    assert len(list(library.parent.iterdir())) == 2
    os.chmod(library.parent, 0o777)
    library.unlink()
    library.write_bytes(b"not a library")
    assert load_library(source, {"NUMBER": 2}).code.two() == 2
