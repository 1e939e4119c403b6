"""However a prompt's prefix came to be in memory, and wherever it ends: the same logits.

Each prompt is asked with three different split points per way of reuse. EXACT_PROMPTS says how many
prompts; `scripts/long_tests exactness` runs 200.
"""

import os
import random
from collections.abc import Callable

import pytest

from engine.protocol import InputUsage
from tests.engine.compute.test_engine_exactness import FAMILIES, Models, RealEngine, ask, prompt
from tests.engine.compute.tiny import TinyModel
from tests.engine.schedule.harness import Sent

NUM_PROMPTS = int(os.environ.get("EXACT_PROMPTS", "2"))
NUM_SPLITS = 3
Way = Callable[[TinyModel, random.Random, list[int], int], RealEngine]


def cached(model: TinyModel, _: random.Random, text: list[int], split: int) -> RealEngine:
    engine = RealEngine(model, num_blocks=40)
    engine.run(ask(engine, text[:split], max_tokens=1))
    again = ask(engine, text[:split], text[split:])
    engine.run(again)
    assert usage_of(again).cache_read_tokens == split
    return engine


def forked(model: TinyModel, _: random.Random, text: list[int], split: int) -> RealEngine:
    engine = RealEngine(model, num_blocks=60)
    sent = engine.send(text[:split], choices=3, max_tokens=len(text) - split)
    engine.run(sent)
    assert engine.pool.num_copied >= (2 if split % 8 else 0)
    return engine


def demoted(model: TinyModel, rng: random.Random, text: list[int], split: int) -> RealEngine:
    engine = RealEngine(model, num_blocks=24, host_blocks=100)
    engine.run(engine.send(text[:split], max_tokens=1))
    while any(block.digest for block in engine.pool.blocks if block.tokens == packed(text[:8])):
        engine.run(engine.send(prompt(rng, 60), max_tokens=1))
    assert engine.host is not None
    before = engine.host.num_promoted
    again = engine.send(text[:split], text[split:], max_tokens=3)
    engine.run(again)
    assert engine.host.num_promoted > before
    assert usage_of(again).automatic_tokens >= split // 8 * 8
    return engine


def preempted(model: TinyModel, rng: random.Random, text: list[int], split: int) -> RealEngine:
    """By sequences that need the memory; the youngest gives way."""
    engine = RealEngine(model, num_blocks=14)
    others = [engine.send(prompt(rng, 30), max_tokens=30) for _ in range(2)]
    engine.run(engine.send(text[:split], max_tokens=len(text) - split), *others)
    assert engine.scheduler.num_preempted > 0
    return engine


def hole_filled(model: TinyModel, _: random.Random, text: list[int], split: int) -> RealEngine:
    """The block that holds token `split` is lost, and what its memory held must not matter."""
    engine = RealEngine(model, num_blocks=24)
    first = engine.send(text, max_tokens=1)
    while first.started is None:
        chain = first.state.leader.table.blocks
        engine.step()
    engine.run(first)
    lost = chain[min(split // 8, len(text) // 8 - 1)]
    others = [block for block in engine.pool.blocks if block.ref_count == 0 and block is not lost]
    for block in others:
        engine.pool.acquire(block)
    engine.pool.release(engine.pool.allocate())
    engine.pool.release_chain(others)
    for tensor in (*engine.checked._runner.pool.keys, *engine.checked._runner.pool.values):
        tensor[lost.block_id] = 1e4
    again = engine.send(text, max_tokens=3)
    engine.run(again)
    assert usage_of(again).computed_tokens == len(text) + 1 - (len(text) // 8 - 1) * 8
    return engine


def packed(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def usage_of(sent: Sent) -> InputUsage:
    assert sent.started is not None
    return sent.started.usage


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [cached, forked, demoted, preempted, hole_filled])
def test_any_split_of_any_prompt_is_exact(tiny_models: Models, family: str, way: Way) -> None:
    model, rng = tiny_models(family), random.Random(21)
    worst, num_compared = 0.0, 0
    for _ in range(NUM_PROMPTS):
        text = prompt(rng, rng.randint(60, 100))
        for split in rng.sample(range(20, len(text) - 10), NUM_SPLITS):
            engine = way(model, rng, text, split)
            worst = max(worst, engine.checked.worst)
            num_compared += engine.checked.num_compared
    print(
        f"{family}, {way.__name__}: {NUM_PROMPTS} prompts x {NUM_SPLITS} splits, "
        f"{num_compared} logits, largest relative difference {worst:.1e}"
    )
