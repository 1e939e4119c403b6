"""Paged, chunked and shared attention against the model's own: what reuse of KV must not change."""

import random
from collections.abc import Callable

import pytest
import torch

from engine.cache.ids import BlockId
from engine.schedule.runner import Work
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
FAMILIES = ("llama", "qwen3", "mistral")
Models = Callable[[str], TinyModel]


@pytest.fixture
def tiny_models(both_attentions: Models) -> Models:
    return both_attentions


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Within the bound, and the same greedy token unless the best two are that close."""
    difference = relative_difference(logits, expected)
    assert difference <= BOUND
    if logits.argmax() != expected.argmax():
        best, second = expected.topk(2).values
        margin = float((best - second) / expected.abs().max())
        print(f"greedy tokens flip at a margin of {margin:.1e}")
        assert margin <= 2 * BOUND
    return difference


@pytest.mark.parametrize("family", FAMILIES)
def test_reused_blocks_give_bitwise_the_logits_of_computed_ones(
    tiny_models: Models, family: str
) -> None:
    model = tiny_models(family)
    runner = model.runner()
    rng = random.Random(1)
    prompt = [rng.randrange(199) for _ in range(3 * WINDOW + 40)]
    splits = [40, 80]
    own = run_in_turn(runner, new_works(prompt, splits, range(20)))
    shared = [*range(10), *range(50, 60)]
    reused = run_in_turn(runner, new_works(prompt, splits, shared)[2:])
    assert torch.equal(own, reused)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_any_chunking_equals_the_plain_forward(tiny_models: Models, family: str) -> None:
    model = tiny_models(family)
    runner = model.runner()
    rng = random.Random(2)
    worst = 0.0
    for _ in range(50):
        prompt = random_prompt(rng)
        table = rng.sample(range(model.num_blocks), 20)
        works = new_works(prompt, random_splits(rng, len(prompt)), table)
        logits = run_in_turn(runner, works)
        worst = max(worst, assert_same(logits, model.plain_logits(prompt)))
    print(f"{family}: largest relative difference of 50 prompts {worst:.1e}")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_equals_the_plain_forward_token_by_token(
    tiny_models: Models, family: str
) -> None:
    model = tiny_models(family)
    runner = model.runner()
    tokens = random_prompt(random.Random(3), 60, 60)
    table = [BlockId(block) for block in range(63, 50, -1)]
    start = 0
    for _ in range(24):
        work = Work(token_ids=tokens[start:], start=start, block_table=table, sample=GREEDY)
        logits = runner.logits([work])[0]
        assert_same(logits, model.plain_logits(tokens))
        start = len(tokens)
        tokens.append(int(logits.argmax()))


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_a_batch_equals_its_sequences_one_by_one(tiny_models: Models, family: str) -> None:
    model = tiny_models(family)
    runner = model.runner()
    rng = random.Random(4)
    # Chunks and decodes of very different lengths: the padded groups must not mix them up.
    prompts = [random_prompt(rng, n, n) for n in (2, 5, 9, 33, 64, 65, 90, 90)]
    tables = [list(range(i * 8, i * 8 + 8)) for i in range(4)]
    tables += [list(range(32 + i * 8, 40 + i * 8)) for i in range(4)]
    prompts = [prompt[:60] for prompt in prompts]
    last: list[Work] = []
    for index, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        split = len(prompt) - 1 if index % 4 else max(1, len(prompt) // 2)
        head, tail = new_works(prompt, [split], table)
        runner.logits([head])
        last.append(tail)
    for row, prompt in zip(runner.logits(last), prompts, strict=True):
        assert_same(row, model.plain_logits(prompt))


def test_only_sampling_works_get_logits_and_tokens(tiny_models: Models) -> None:
    model = tiny_models("llama")
    runner = model.runner()
    prompt = random_prompt(random.Random(5), 20, 20)
    reading, sampling = new_works(prompt, [9], range(4))
    assert runner.execute([reading]) == [None]
    other = new_works(prompt, [], range(8, 12))
    tokens = runner.execute([sampling, new_works(prompt, [9], range(20, 24))[0], *other])
    expected = int(model.plain_logits(prompt).argmax())
    assert tokens == [expected, None, expected]


@pytest.mark.parametrize("num_layers", [0, 1])
def test_a_stopped_step_is_computed_again_with_the_same_result(
    tiny_models: Models, num_layers: int
) -> None:
    model = tiny_models("llama")
    runner = model.runner()
    prompt = random_prompt(random.Random(8), 30, 30)
    head, tail = new_works(prompt, [20], range(4))
    runner.logits([head])
    asked: list[int] = []

    def stop() -> bool:
        asked.append(len(asked))
        return len(asked) > num_layers

    assert runner.execute([tail], stop) is None
    assert len(asked) == num_layers + 1
    assert_same(runner.logits([tail])[0], model.plain_logits(prompt))


def test_a_copied_block_continues_like_its_source(tiny_models: Models) -> None:
    model = tiny_models("qwen3")
    runner = model.runner()
    prompt = random_prompt(random.Random(6), 30, 30)
    head, tail = new_works(prompt, [20], [3, 9, 4, 7])
    runner.logits([head])
    runner.copy_blocks([(BlockId(4), BlockId(40)), (BlockId(3), BlockId(41))])
    copied = Work(
        token_ids=tail.token_ids,
        start=20,
        block_table=[BlockId(block) for block in (41, 9, 40, 50)],
        sample=GREEDY,
    )
    first = runner.logits([copied])
    assert torch.equal(first, runner.logits([tail]))
    # The source was not written to: what the copy continued with is in the copy alone.
    assert not torch.equal(runner.pool.keys[0][4], torch.zeros_like(runner.pool.keys[0][4]))
    assert torch.equal(runner.pool.keys[0][4], runner.pool.keys[0][40])


def test_a_write_to_a_copy_leaves_the_source_alone(tiny_models: Models) -> None:
    runner = tiny_models("llama").runner()
    prompt = random_prompt(random.Random(7), 12, 12)
    runner.logits(new_works(prompt, [], [1, 2]))
    before = runner.pool.keys[1][2].clone()
    runner.copy_blocks([(BlockId(2), BlockId(5))])
    table = [BlockId(1), BlockId(5)]
    runner.logits([Work(token_ids=[1, 2], start=12, block_table=table)])
    assert torch.equal(runner.pool.keys[1][2], before)
    assert not torch.equal(runner.pool.keys[1][5], before)


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
