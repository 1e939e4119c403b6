"""Sequences that decode behind the same blocks, read once for all: the logits stay the same."""

import random
from collections.abc import Callable

import pytest
import torch

from engine.compute.attention import arithmetic as decode
from engine.compute.batch import build_batch
from engine.compute.runner import TorchRunner
from engine.schedule.runner import Work
from tests.engine.compute.test_exactness import assert_same
from tests.engine.compute.tiny import GREEDY, TinyModel, new_works, random_prompt

Models = Callable[[str], TinyModel]


@pytest.fixture
def tiny_models(both_attentions: Models) -> Models:
    return both_attentions


CPU = torch.device("cpu")


def decodes_behind_shared_blocks(
    runner: TorchRunner, rng: random.Random
) -> tuple[list[Work], list[list[int]]]:
    """Nine sequences behind 64 tokens, two behind 40 others, one alone; their tails differ."""
    works, prompts = [], []
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


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("piece", [2048, 16])
def test_shared_decodes_equal_the_plain_forward(
    tiny_models: Models, family: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_PIECE_TOKENS", piece)
    model, rng = tiny_models(family), random.Random(11)
    runner = model.runner()
    for _ in range(5):
        works, prompts = decodes_behind_shared_blocks(runner, rng)
        order = rng.sample(range(len(works)), len(works))
        logits = runner.logits([works[index] for index in order])
        for row, index in zip(logits, order, strict=True):
            assert_same(row, model.plain_logits(prompts[index]))


def test_a_softcap_holds_behind_shared_blocks(tiny_models: Models) -> None:
    model = tiny_models("gemma2")
    pool = model.runner().pool
    torch.manual_seed(3)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_(0, 3)
    works = [
        Work(token_ids=[1], start=70 + i, block_table=[*range(8), 20 + i, 40 + i], sample=GREEDY)
        for i in range(9)
    ]
    shared = build_batch(works, pool.block_size, CPU).shared_groups
    plain = build_batch(works, pool.block_size, CPU, share=False).decode_groups
    layer = decode.Layer(index=0, scaling=0.25, window=None, softcap=2.0)
    query = torch.randn(8, 9, 16) * 3
    (group,) = shared
    together = decode.attend_shared(query[:, group.rows], group, pool, layer)
    (single,) = plain
    one_by_one = decode.attend_decodes(query[:, single.rows], single, pool, layer)
    back = torch.empty_like(together)
    back[:, group.rows] = together
    expected = torch.empty_like(one_by_one)
    expected[:, single.rows] = one_by_one
    assert torch.allclose(back, expected, rtol=1e-5, atol=1e-6)


def test_groups_are_those_that_save_reading_and_lose_nobody(tiny_models: Models) -> None:
    runner = tiny_models("llama").runner()
    works, _ = decodes_behind_shared_blocks(runner, random.Random(12))
    batch = build_batch(works, runner.pool.block_size, CPU)
    (shared,) = batch.shared_groups
    assert sorted(shared.rows.tolist()) == list(range(9))
    assert shared.blocks.tolist() == list(range(8))
    alone = [row for group in batch.decode_groups for row in group.rows.tolist()]
    assert sorted(alone) == [9, 10, 11], "two behind five blocks save too little"
    assert not build_batch(works, runner.pool.block_size, CPU, share=False).shared_groups


def test_a_block_that_is_written_to_is_never_shared() -> None:
    """Equal tables (a fork before its copy) share only what is before both new tokens."""
    works = [
        Work(token_ids=[1], start=start, block_table=list(range(81)), sample=GREEDY)
        for start in (640, 645, 559)
    ]
    (shared,) = build_batch(works, 8, CPU).shared_groups
    assert len(shared.blocks) == 559 // 8
    assert [tail.offset for tail in shared.tails] == [69 * 8] * len(shared.tails)
