"""Speculation in the step: whatever is proposed, answers, counts and blocks are as without it."""

import random
from collections.abc import Sequence

import pytest

from engine.cache.digests import pack
from engine.cache.ids import TokenId
from engine.protocol import FinalCounts
from tests.engine.schedule.harness import Harness, Sent, next_token

LONGEST = 7


class Guesser:
    """Proposes what choices of seed 1 answer, wrong from a random place on."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def propose(self, tokens: Sequence[TokenId]) -> list[TokenId]:
        known = list(tokens)
        guessed = []
        for _ in range(self._rng.randint(0, LONGEST)):
            guessed.append(next_token([*known, *guessed], 1))
        for index in range(self._rng.randint(0, LONGEST), len(guessed)):
            guessed[index] = -7
        return guessed

    def verified(self, num_proposed: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_proposed <= LONGEST


class SpeculatingHarness(Harness):
    """After each step, what a block says is what its memory has."""

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            super().step()
            for block in self.pool.blocks:
                num = self.pool.num_tokens(block)
                assert block.tokens == pack(self.runner.memory[block.block_id][:num])


def speculating(rng: random.Random, **settings: int) -> SpeculatingHarness:
    return SpeculatingHarness(new_drafter=lambda: Guesser(rng), **settings)


def ask(engine: Harness, rng: random.Random) -> Sent:
    """One of a few prefixes, so that blocks are shared, and a tail."""
    shared = [rng.randrange(5)] * rng.randint(5, 7)
    tail = [rng.randrange(1000) for _ in range(rng.randint(0, 6))]
    return engine.send(
        shared,
        tail,
        marks={0: "5m"},
        max_tokens=rng.randint(1, 24),
        choices=rng.randint(1, 3),
        scope=rng.choice("ab"),
        service_class=rng.choice(["interactive", "interactive", "batch"]),
    )


@pytest.mark.parametrize("seed", range(12))
def test_answers_counts_and_blocks_are_as_without_speculation(seed: int) -> None:
    """A pool that is too small for all of it, two scopes, batches, choices and a host tier."""
    counts: list[list[FinalCounts]] = []
    for is_speculating in (True, False):
        rng = random.Random(seed)
        guesses = random.Random(100 + seed)
        sizes = {"num_blocks": 26, "host_blocks": 10, "max_waiting": 64, "max_step_tokens": 64}
        engine = speculating(guesses, **sizes) if is_speculating else Harness(**sizes)
        sents = []
        for _ in range(20):
            sents.append(ask(engine, rng))
            engine.step(2)
        engine.finish(*sents)
        counts.append(
            sorted(
                engine.totals.unacknowledged(), key=lambda unacknowledged: unacknowledged.request_id
            )
        )
        totals = engine.totals.counters
        if is_speculating:
            assert totals["accepted_draft_tokens"] > 20, "nothing was tried"
            assert totals["draft_tokens"] > totals["accepted_draft_tokens"]
            assert totals["sampling_steps"] < totals["output_tokens"]
        engine.check_idle()
    speculated, plain = counts
    assert [(c.reason, c.output_tokens) for c in speculated] == [
        (c.reason, c.output_tokens) for c in plain
    ]


def test_nothing_behind_a_stop_or_a_limit_is_told_or_kept() -> None:
    rng = random.Random(3)
    for max_tokens in range(1, 12):
        engine = speculating(rng)
        plain = Harness()
        text = [1, 2, 3, 4, 5]
        for where in (engine, plain):
            turn = where.send(text, max_tokens=max_tokens)
            where.finish(turn)
            assert len(turn.answer()) == max_tokens
        unstopped = plain.send(text, max_tokens=12)
        plain.finish(unstopped)
        stop = unstopped.answer()[max_tokens % 5]
        stopped = engine.done(text, max_tokens=12, stop=stop)
        assert stopped.answer() == unstopped.answer()[: unstopped.answer().index(stop) + 1]
        assert [finish.reason for finish in stopped.finishes] == ["stop"]


def test_an_answer_ends_with_the_context_and_never_behind_it() -> None:
    for limit in range(8, 20):
        engine = speculating(random.Random(limit), max_context_tokens=limit)
        turn = engine.done([1, 2, 3], max_tokens=50)
        assert len(turn.state.leader.tokens) == limit
        assert [finish.reason for finish in turn.finishes] == ["context"]


def test_proposed_tokens_preempt_nobody() -> None:
    """Two sequences fill the pool to its last block; without speculation none is preempted."""
    engine = speculating(random.Random(1), num_blocks=8, block_size=4)
    sents = [engine.send([index] * 7, max_tokens=8) for index in range(2)]
    engine.finish(*sents)
    assert engine.scheduler.num_preempted == 0
