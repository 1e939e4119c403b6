"""Paged, chunked and shared attention against the model's own: what reuse of KV must not change."""

import random
import shutil
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute.attention import arithmetic, tiles
from engine.compute.attention.cpu_kernel import CpuKernel
from engine.compute.attention.tiles import Run, Shared, Tiles, cut
from engine.compute.batch import build_batch
from engine.compute.runner import TorchRunner
from engine.schedule.runner import Work
from tests.engine.compute.conftest import MakeModel
from tests.engine.compute.tiny import (
    GREEDY,
    WINDOW,
    TinyModel,
    new_works,
    random_prompt,
    random_splits,
    relative_difference,
    run_in_turn,
)

BOUND = 1e-5
CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen3", "mistral", "gpt_oss", "deepseek_v3", "mimo_v2", "gemma4")
Models = Callable[[str], TinyModel]


@pytest.fixture
def tiny_models(both_attentions: Models) -> Models:
    return both_attentions


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the bound, and the same greedy token unless the best two are that close."""
    assert relative_difference(logits, expected) <= BOUND
    if logits.argmax() != expected.argmax():
        best, second = expected.topk(2).values
        assert float((best - second) / expected.abs().max()) <= 2 * BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_reused_blocks_give_bitwise_the_logits_of_computed_ones(
    tiny_models: Models, family: str
) -> None:
    runner = tiny_models(family).runner()
    prompt = random_prompt(random.Random(1), 3 * WINDOW + 40, 3 * WINDOW + 40)
    alone = run_in_turn(runner, new_works(prompt, [40, 80], range(20)))
    shared = [*range(10), *range(50, 60)]
    assert torch.equal(alone, run_in_turn(runner, new_works(prompt, [40, 80], shared)[2:]))


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_any_chunking_equals_the_plain_forward(tiny_models: Models, family: str) -> None:
    model = tiny_models(family)
    rng = random.Random(2)
    runner = model.runner()
    for _ in range(20):
        prompt = random_prompt(rng)
        table = rng.sample(range(model.num_blocks), 20)
        works = new_works(prompt, random_splits(rng, len(prompt)), table)
        assert_same(run_in_turn(runner, works), model.plain_logits(prompt))


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_a_batch_equals_its_sequences_one_by_one(tiny_models: Models, family: str) -> None:
    """Chunks and decodes of very different lengths: the padded groups must not mix them up."""
    model = tiny_models(family)
    rng = random.Random(4)
    runner = model.runner()
    last = list[Work]()
    prompts = [random_prompt(rng, n, n) for n in (2, 5, 9, 33, 57, 58, 60, 60)]
    for index, prompt in enumerate(prompts):
        split = len(prompt) - 1 if index % 4 else max(1, len(prompt) // 2)
        head, tail = new_works(prompt, [split], range(8 * index, 8 * index + 8))
        runner.logits([head])
        last.append(tail)
    for row, prompt in zip(runner.logits(last), prompts, strict=True):
        assert_same(row, model.plain_logits(prompt))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"sliding_window": 500}),
        ("gemma2", {"attn_logit_softcapping": None}),
    ],
)
def test_an_ignored_window_or_softcap_would_be_noticed(
    tiny_models: Models, family: str, settings: dict[str, object]
) -> None:
    model = tiny_models(family)
    prompt = random_prompt(random.Random(8), 3 * WINDOW, 3 * WINDOW)
    logits = run_in_turn(model.runner(), new_works(prompt, [50], range(20)))
    wrong = model.with_plain_setting(**settings).plain_logits(prompt)
    assert relative_difference(logits, wrong) > 1000 * BOUND


def decodes_behind_shared_blocks(
    runner: TorchRunner, rng: random.Random
) -> tuple[list[Work], list[list[int]]]:
    """Nine sequences behind 64 tokens, two behind 40 others, one alone; their tails differ."""
    works = []
    prompts = []
    for shared, num, length in ((range(8), 9, 64), (range(8, 13), 2, 40), (range(0), 1, 0)):
        prefix = random_prompt(rng, length, length) if length else []
        if prefix:
            runner.logits(new_works(prefix, [], shared))
        for _ in range(num):
            prompt = prefix + random_prompt(rng, 1, 25)
            first = 13 + 4 * len(works)
            table = [*shared, *range(first, first + 4)]
            start = len(prefix)
            if len(prompt) - 1 > start:
                head = new_works(prompt[:-1], [start] if start else [], table)[-1]
                runner.logits([head])
            works.append(new_works(prompt, [len(prompt) - 1], table)[-1])
            prompts.append(prompt)
    return works, prompts


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
@pytest.mark.parametrize("piece", [1024, 16])
def test_shared_decodes_equal_the_plain_forward(
    tiny_models: Models, family: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "SPLIT_TOKENS", piece)
    model = tiny_models(family)
    rng = random.Random(11)
    runner = model.runner()
    for _ in range(2):
        works, prompts = decodes_behind_shared_blocks(runner, rng)
        order = rng.sample(range(len(works)), len(works))
        logits = runner.logits([works[index] for index in order])
        for row, index in zip(logits, order, strict=True):
            assert_same(row, model.plain_logits(prompts[index]))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_softcap_holds_behind_shared_blocks(models_by_attention: MakeModel) -> None:
    pool = models_by_attention("gemma2", "cpp").runner().pool
    torch.manual_seed(3)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_(0, 3)
    works = [
        Work(token_ids=[1], start=70 + i, block_table=[*range(8), 20 + i, 40 + i], sample=GREEDY)
        for i in range(9)
    ]
    layer = arithmetic.Layer(index=0, scaling=0.25, window=None, softcap=2.0)
    query = torch.randn(8, 9, 16) * 3
    (single,) = build_batch(works, pool.block_size, CPU).decode_groups
    one_by_one = torch.empty_like(query)
    one_by_one[:, single.rows] = arithmetic.attend_decodes(
        query[:, single.rows], single, pool, layer
    )
    kernel = CpuKernel(pool.layout, 8)
    batch = build_batch(works, pool.block_size, CPU, tile_rows=kernel.tile_rows)
    assert batch.tiles is not None and len(batch.tiles.wide)
    together = kernel.step(batch.tiles, batch.positions)(query, pool, layer)
    assert torch.allclose(together, one_by_one, rtol=1e-5, atol=1e-6)


def wide_tiles(works: list[Work], block_size: int, **options: bool) -> list[tuple[int, int, int]]:
    """Of each wide tile its rows, and the keys that they are attended to."""
    cut = build_batch(works, block_size, CPU, tile_rows=64, **options).tiles
    assert cut is not None
    return [(num, begin, end) for _, num, _, begin, end, _ in cut.wide.tolist()]


def test_groups_are_those_that_save_reading_and_lose_nobody(tiny_models: Models) -> None:
    runner = tiny_models("llama").runner()
    works, _ = decodes_behind_shared_blocks(runner, random.Random(12))
    size = runner.pool.block_size
    assert wide_tiles(works, size) == [(9, 0, 8 * size)], "two behind five blocks save too little"
    cut = build_batch(works, size, CPU, tile_rows=64).tiles
    assert cut is not None and sorted(set(cut.rows.tolist())) == list(range(12))
    assert not wide_tiles(works, size, share=False)


def test_a_block_that_is_written_to_is_never_shared() -> None:
    """Equal tables (a fork before its copy) share only what is before both new tokens."""
    works = [
        Work(token_ids=[1], start=start, block_table=list(range(81)), sample=GREEDY)
        for start in (640, 645, 559)
    ]
    assert wide_tiles(works, 8) == [(3, 0, 559 // 8 * 8)]


BLOCK_SIZE = 16


def table_for(tokens: int, first: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(first, first - (-tokens // BLOCK_SIZE), dtype=np.int64)


def keys_of_rows(tiles: Tiles) -> dict[int, Counter[tuple[int, int]]]:
    """By row, how often it meets each key: the block in memory and the slot."""
    met: dict[int, Counter[tuple[int, int]]] = {}
    for first, num, place, begin, end, _ in [*tiles.wide.tolist(), *tiles.narrow.tolist()]:
        for row in tiles.rows[first : first + num].tolist():
            keys = [
                (int(tiles.table[place + key // BLOCK_SIZE]), key % BLOCK_SIZE)
                for key in range(begin, end)
            ]
            met.setdefault(row, Counter()).update(keys)
    return met


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 2300), st.integers(1, 40)), min_size=1, max_size=5),
    st.lists(st.integers(0, 50), max_size=4),
    st.sampled_from([1, 4, 16]),
)
def test_each_row_meets_each_key_of_its_table_once(
    steps: list[tuple[int, int]], shared_tails: list[int], width: int
) -> None:
    runs = []
    row = 0
    blocks = 0
    for start, count in steps:
        table = table_for(start + count, blocks)
        runs.append(Run(row, count, start, table))
        row = row + count
        blocks = blocks + len(table)
    common = table_for(70 * BLOCK_SIZE, blocks)
    blocks += len(common)
    group = []
    for tail in shared_tails:
        start = 70 * BLOCK_SIZE + tail
        suffix = table_for(tail + 1, blocks)
        group.append(Run(row, 1, start, np.concatenate([common, suffix])))
        row = row + 1
        blocks = blocks + len(suffix)
    shared = [Shared(group, 70)] if group else []
    tiles = cut(runs, shared, row, BLOCK_SIZE, width)
    met = keys_of_rows(tiles)
    for run in [*runs, *group]:
        end = run.start + run.count
        expected = Counter((int(run.table[k // BLOCK_SIZE]), k % BLOCK_SIZE) for k in range(end))
        for own_row in range(run.begin, run.begin + run.count):
            assert met[own_row] == expected
    check_parts(tiles, row)


def check_parts(tiles: Tiles, num_rows: int) -> None:
    """Each part belongs to the row whose tile wrote it."""
    assert sorted(tiles.parts.tolist()) == list(range(tiles.num_parts))
    for row in range(num_rows):
        parts = tiles.parts[tiles.offsets[row] : tiles.offsets[row + 1]]
        assert len(parts) and set(tiles.rows[parts].tolist()) == {row}
