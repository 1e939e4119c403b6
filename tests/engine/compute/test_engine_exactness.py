"""The whole engine over a real model: however a prompt's KV came to be, the logits are the same."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from engine.cache.ids import BlockId, TokenId
from engine.protocol import Done
from engine.schedule.runner import Stop, Work
from tests.engine.compute.tiny import TinyModel, relative_difference
from tests.engine.schedule.harness import Harness, Sent

BOUND = 1e-5
FAMILIES = ("llama", "qwen3", "mistral")
Models = Callable[[str], TinyModel]


class CheckedRunner:
    """Greedy, and every logit it answers with is compared with the model's plain forward."""

    def __init__(self, model: TinyModel) -> None:
        self._model = model
        self._runner = model.loaded.runner(model.num_blocks, model.block_size, 100)
        self.engine: Harness | None = None
        self.worst = 0.0
        self.num_compared = 0

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        self._runner.copy_blocks(pairs)

    def demote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        self._runner.demote(pairs)

    def promote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        self._runner.promote(pairs)

    def save(self, blocks: Sequence[BlockId]) -> list[bytes]:
        return self._runner.save(blocks)

    def load(self, loads: Sequence[tuple[bytes, BlockId]]) -> None:
        self._runner.load(loads)

    def execute(
        self, works: Sequence[Work], stop: Stop | None = None
    ) -> list[TokenId | None] | None:
        rows = iter(self._runner.logits(works))
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
        assert self.engine is not None
        for sequence in self.engine.scheduler.running:
            end = work.start + len(work.token_ids)
            is_same = sequence.table.block_ids == work.block_table
            if is_same and list(sequence.tokens[work.start : end]) == list(work.token_ids):
                return sequence.tokens[:end]
        raise AssertionError("a work of nobody")


class RealEngine(Harness):
    """A pool of 8-token blocks that is smaller than what is asked of it."""

    def __init__(self, model: TinyModel, num_blocks: int = 24, host_blocks: int = 0) -> None:
        self.checked = CheckedRunner(model)
        super().__init__(
            num_blocks=num_blocks,
            block_size=8,
            max_step_tokens=32,
            runner=self.checked,
            scaffold=198,
            host_blocks=host_blocks,
        )
        self.checked.engine = self

    def run(self, *sents: Sent) -> None:
        for _ in range(500):
            if all(sent.is_over for sent in sents):
                break
            self.step()
        assert all(isinstance(sent.frames[-1], Done) for sent in sents)
        assert self.checked.worst <= BOUND


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(199) for _ in range(length)]


def ask(engine: RealEngine, *segments: list[int], choices: int = 1, max_tokens: int = 3) -> Sent:
    return engine.send(*segments, marks={0: "5m"}, choices=choices, max_tokens=max_tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("host_blocks", [0, 30])
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
    assert engine.checked.num_compared > 100
