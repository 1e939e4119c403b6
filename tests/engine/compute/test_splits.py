"""However a prompt's prefix came to be in memory, and wherever it ends: the same logits.

Each prompt is asked with three different split points per way of reuse. EXACT_PROMPTS says how many
prompts; `scripts/long_tests exactness` runs 200.
"""

import os
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from engine.cache.digests import pack
from engine.cache.ids import TokenId
from engine.protocol import Done, InputUsage
from engine.schedule.runner import Work
from tests.engine.compute.tiny import TinyModel, relative_difference
from tests.engine.schedule.harness import Harness, Sent

BOUND = 1e-5
FAMILIES = ("llama", "qwen3", "mistral")
Models = Callable[[str], TinyModel]
NUM_PROMPTS = int(os.environ.get("EXACT_PROMPTS", "2"))
NUM_SPLITS = 3


class RealEngine(Harness):
    """A pool of 8-token blocks that is smaller than what is asked of it.

    Greedy, and every logit it answers with is compared with the model's plain forward.
    """

    def __init__(self, model: TinyModel, num_blocks: int = 24, host_blocks: int = 0) -> None:
        self.real = model.loaded.runner(model.num_blocks, model.block_size, 100)
        self.real.execute = self._execute  # type: ignore[method-assign]
        self.worst = 0.0
        self.num_compared = 0
        self._model = model
        super().__init__(
            num_blocks=num_blocks,
            block_size=8,
            max_step_tokens=32,
            runner=self.real,
            scaffold=198,
            host_blocks=host_blocks,
        )

    def _execute(self, works: Sequence[Work]) -> list[TokenId | None]:
        rows = iter(self.real.logits(works))
        return [None if work.sample is None else self._compare(work, next(rows)) for work in works]

    def _compare(self, work: Work, logits: torch.Tensor) -> TokenId:
        expected = self._model.plain_logits(self._tokens_of(work))
        self.worst = max(self.worst, relative_difference(logits, expected))
        self.num_compared += 1
        best, second = expected.topk(2).values
        if float((best - second) / expected.abs().max()) > 2 * BOUND:
            assert int(logits.argmax()) == int(expected.argmax())
        return int(expected.argmax())

    def _tokens_of(self, work: Work) -> list[TokenId]:
        """The sequence whose table this is: its tail block is its own."""
        end = work.start + len(work.token_ids)
        for sequence in self.scheduler.running:
            is_same = sequence.table.block_ids == work.block_table
            if is_same and list(sequence.tokens[work.start : end]) == list(work.token_ids):
                return sequence.tokens[:end]
        raise AssertionError("a work of nobody")

    def run(self, *sents: Sent) -> None:
        for _ in range(500):
            if all(turn.is_over for turn in sents):
                break
            self.step()
        assert all(isinstance(turn.frames[-1], Done) for turn in sents)
        assert self.worst <= BOUND


Way = Callable[[TinyModel, random.Random, list[int], int], RealEngine]


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(199) for _ in range(length)]


def ask(engine: RealEngine, *segments: list[int], choices: int = 1, max_tokens: int = 3) -> Sent:
    return engine.send(*segments, marks={0: "5m"}, choices=choices, max_tokens=max_tokens)


@pytest.mark.parametrize(("family", "host_blocks"), [*zip(FAMILIES, (0, 30, 30), strict=True)])
def test_everything_at_once_is_exact(tiny_models: Models, family: str, host_blocks: int) -> None:
    engine = RealEngine(tiny_models(family), num_blocks=20, host_blocks=host_blocks)
    rng = random.Random(4)
    texts = [prompt(rng, rng.randint(10, 70)) for _ in range(4)]
    sents: list[Sent] = []
    for index in range(24):
        tail = prompt(rng, rng.randint(1, 20))
        sents.append(ask(engine, rng.choice(texts), tail, choices=1 + index % 2, max_tokens=4))
        engine.step(rng.randint(0, 3))
        if len(engine.scheduler.waiting) > 8:
            engine.run(*sents)
    engine.run(*sents)
    assert engine.num_compared > 100


def cached(model: TinyModel, _: random.Random, text: list[int], split: int) -> RealEngine:
    engine = RealEngine(model, num_blocks=40)
    engine.run(ask(engine, text[:split], max_tokens=1))
    again = ask(engine, text[:split], text[split:])
    engine.run(again)
    assert usage_of(again).cache_read_tokens == split
    return engine


def forked(model: TinyModel, _: random.Random, text: list[int], split: int) -> RealEngine:
    engine = RealEngine(model, num_blocks=60)
    turn = engine.send(text[:split], choices=3, max_tokens=len(text) - split)
    engine.run(turn)
    assert engine.pool.num_copied >= (2 if split % 8 else 0)
    return engine


def demoted(model: TinyModel, rng: random.Random, text: list[int], split: int) -> RealEngine:
    engine = RealEngine(model, num_blocks=24, host_blocks=100)
    engine.run(engine.send(text[:split], max_tokens=1))
    while any(block.digest for block in engine.pool.blocks if block.tokens == pack(text[:8])):
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
    neighbours = [engine.send(prompt(rng, 30), max_tokens=30) for _ in range(2)]
    engine.run(engine.send(text[:split], max_tokens=len(text) - split), *neighbours)
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
    blocks = [block for block in engine.pool.blocks if block.ref_count == 0 and block is not lost]
    for block in blocks:
        engine.pool.acquire(block)
    engine.pool.release(engine.pool.allocate())
    engine.pool.release_chain(blocks)
    for tensor in (*engine.real.pool.keys, *engine.real.pool.values):
        tensor[lost.block_id] = 1e4
    again = engine.send(text, max_tokens=3)
    engine.run(again)
    assert usage_of(again).computed_tokens == len(text) + 1 - (len(text) // 8 - 1) * 8
    return engine


def usage_of(turn: Sent) -> InputUsage:
    assert turn.started is not None
    return turn.started.usage


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [cached, forked, demoted, preempted, hole_filled])
def test_any_split_of_any_prompt_is_exact(tiny_models: Models, family: str, way: Way) -> None:
    model = tiny_models(family)
    rng = random.Random(21)
    worst = 0.0
    num_compared = 0
    for _ in range(NUM_PROMPTS):
        text = prompt(rng, rng.randint(60, 100))
        for split in rng.sample(range(20, len(text) - 10), NUM_SPLITS):
            engine = way(model, rng, text, split)
            worst = max(worst, engine.worst)
            num_compared += engine.num_compared
    print(
        f"{family}, {way.__name__}: {NUM_PROMPTS} prompts x {NUM_SPLITS} splits, "
        f"{num_compared} logits, largest relative difference {worst:.1e}"
    )
