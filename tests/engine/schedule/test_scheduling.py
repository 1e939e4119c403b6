"""What a step computes: chunks, choices, preemption, exhaustion, and copies between tiers."""

import random

import pytest

from engine.protocol import Done
from tests.engine.schedule.harness import Harness, Sent, words


def chunks(engine: Harness) -> list[tuple[int, int]]:
    """Where the only work of each step began, and its tokens."""
    return [(step[0].start, len(step[0].token_ids)) for step in engine.runner.steps]


def test_chunks_end_at_every_breakpoint_and_are_after_a_hit_as_without_it() -> None:
    engine = Harness(max_step_tokens=16)
    engine.done(words(0, 5), words(5, 20), words(25, 3), marks={0: "5m", 1: "5m"})
    assert chunks(engine)[:4] == [(0, 5), (5, 16), (21, 4), (25, 4)]
    cold = Harness()
    warm = Harness()
    warm.done(words(0, 10), marks={0: "5m"})
    warm.runner.steps.clear()
    for engine in (cold, warm):
        engine.done(words(0, 10), words(10, 6), marks={0: "5m"}, seed=3)
    assert chunks(cold)[0] == (0, 10) and chunks(warm) == chunks(cold)[1:]


def test_decoding_goes_on_in_every_step_of_anothers_prefill() -> None:
    engine = Harness(max_step_tokens=16)
    talker = engine.send(words(0, 4), max_tokens=40)
    engine.step()
    reader = engine.send(words(100, 120), max_tokens=1)
    before = len(talker.answer())
    steps = 0
    while not reader.is_over:
        engine.step()
        steps += 1
    assert steps == 9, "15 of the 16 tokens of each step are left for prefill"
    assert len(talker.answer()) == before + steps
    engine.finish(talker, reader)


def test_decoding_goes_on_in_every_step_while_blocks_come_back() -> None:
    engine = Harness(num_blocks=32, host_blocks=64, max_copies=2)
    engine.done(words(0, 40), max_tokens=1)
    for start in range(1000, 5000, 200):
        engine.done(words(start, 8), max_tokens=1)
    talker = engine.send(words(9000, 4), max_tokens=60)
    engine.step()
    reader = engine.send(words(0, 40), max_tokens=1)
    assert engine.host is not None
    before = engine.host.num_promoted
    while not reader.is_over:
        promoted = engine.host.num_promoted
        num_tokens = len(talker.answer())
        engine.step()
        assert engine.host.num_promoted - promoted <= 2
        assert len(talker.answer()) == num_tokens + 1
    assert engine.host.num_promoted > before
    engine.finish(talker, reader)
    engine.check_idle()


def test_the_oldest_is_never_preempted() -> None:
    engine = Harness(num_blocks=12)
    oldest = engine.send(words(0, 11), max_tokens=20)
    younger = [engine.send(words(100 * i, 11), max_tokens=20) for i in (1, 2)]
    while not oldest.is_over:
        engine.step()
        assert oldest.state.leader in engine.scheduler.running or oldest.is_over
    engine.finish(oldest, *younger)


def test_alone_with_a_full_pool_a_sequence_ends_with_its_context() -> None:
    engine = Harness(num_blocks=8)
    turn = engine.done(words(0, 11), max_tokens=1000)
    assert turn.finishes[0].reason == "context"
    assert len(turn.answer()) == 8 * 4 - 12 + 1
    engine.check_idle()


def test_waiting_holds_are_given_up_before_a_lease() -> None:
    engine = Harness(num_blocks=16, lease_share=0.25)
    engine.done(words(500, 15), marks={0: "1h"}, max_tokens=1)
    engine.done(words(600, 23), marks={0: "5m"}, max_tokens=1)
    first = engine.send(words(0, 40), max_tokens=1)
    holder = engine.send(words(600, 23), marks={0: "5m"}, max_tokens=1)
    engine.finish(first, holder)
    assert engine.pool.num_leased
    assert "leases_sacrificed" not in engine.totals.counters


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_everybody_ends_with_the_right_tokens(seed: int) -> None:
    """Many requests, some cancelled, over a pool that is too small for them together."""
    rng = random.Random(seed)
    engine = Harness(
        num_blocks=rng.choice([12, 16, 24]),
        max_step_tokens=rng.choice([16, 24]),
        max_running=rng.choice([2, 4, 8]),
        max_waiting=100,
        host_blocks=rng.choice([0, 0, 4, 10, 40]),
        max_copies=rng.choice([1, 4]),
        lease_share=rng.choice([0.0, 0.5, 0.5]),
    )
    sents: list[Sent] = []
    for _ in range(120):
        if len(sents) < 25 and rng.random() < 0.4:
            lengths = [rng.choice([1, 3, 4, 5, 8, 11]) for _ in range(rng.randint(1, 3))]
            segments = [words(rng.choice([0, 0, 300]), length) for length in lengths]
            marked = [i for i in range(len(segments)) if rng.random() < 0.6]
            turn = engine.send(
                *segments,
                marks={i: rng.choice(["5m", "1h"]) for i in marked},
                max_tokens=rng.choice([1, 3, 10]),
                choices=rng.choice([1, 1, 1, 2, 3]),
                seed=rng.randint(0, 5),
                scope=rng.choice(["a", "b"]),
            )
            sents.append(turn)
        if sents and rng.random() < 0.1:
            # Half of those that hang up came a moment ago: they wait, with what was found held.
            leaving = sents[-2:] if rng.random() < 0.5 else sents
            engine.loop.cancel(rng.choice(leaving).state.request_id)
        if rng.random() < 0.1:
            engine.clock.advance(rng.choice([1, 200, 3000]))
        engine.step()
    engine.finish(*sents)
    for turn in sents:
        if isinstance(turn.frames[-1], Done):
            assert len(turn.finishes) == len(turn.state.sequences)
    assert engine.totals.num_unacknowledged == len(sents)
    engine.check_idle()


@pytest.mark.parametrize("lease_share", [0.0, 0.5])
def test_usage_adds_up_for_readers_that_lose_their_place(lease_share: float) -> None:
    """Readers of cached prefixes, preempted in the middle of their prefill by those who answer."""
    num_preempted = 0
    for seed in range(60):
        rng = random.Random(seed)
        num_blocks = rng.choice([16, 18, 20])
        engine = Harness(num_blocks=num_blocks, max_step_tokens=8, lease_share=lease_share)
        prefix = words(0, rng.randint(3, 20))
        engine.done(prefix, marks={0: "5m"}, max_tokens=1)
        sents = [
            engine.send(words(100 * i, rng.randint(3, 12)), max_tokens=rng.randint(8, 24), seed=i)
            for i in range(1, rng.randint(2, 4))
        ]
        engine.step(rng.randint(1, 6))
        sents.append(engine.send(prefix, words(900, rng.randint(10, 24)), marks={0: "5m"}))
        engine.finish(*sents)
        num_preempted += engine.scheduler.num_preempted
        engine.check_idle()
    assert num_preempted > 10


@pytest.mark.parametrize("length", range(1, 14))
def test_every_choice_says_what_it_would_say_alone(length: int) -> None:
    engine = Harness()
    for _ in range(2):  # the second time the prompt's blocks are in memory
        turn = engine.done(words(0, length), choices=3, max_tokens=6)
        assert [len(turn.answer(choice)) for choice in range(3)] == [6, 6, 6]
    engine.check_idle()


def test_choices_share_the_prompts_blocks_and_copy_one_tail_each() -> None:
    engine = Harness(block_size=4)
    turn = engine.send(words(0, 9), choices=3, max_tokens=2)
    while turn.started is None:
        engine.step()
    tables = [sequence.table.block_ids for sequence in turn.state.sequences]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert engine.pool.num_copied == 2, "the last one keeps the original"
    assert engine.pool.counts().active == 2 + 3
    engine.finish(turn)


@pytest.mark.parametrize("num_blocks", range(9, 16))
@pytest.mark.parametrize("steps_ahead", range(4))
def test_choices_survive_preemption_at_any_point(num_blocks: int, steps_ahead: int) -> None:
    engine = Harness(num_blocks=num_blocks)
    older = engine.send(words(0, 11), max_tokens=18)
    engine.step(steps_ahead)
    turn = engine.send(words(100, 10), choices=3, max_tokens=5, marks={0: "5m"})
    engine.finish(older, turn, limit=300)
    engine.check_idle()


@pytest.mark.parametrize("steps", range(8))
def test_cancelling_choices_at_any_point_gives_everything_back(steps: int) -> None:
    engine = Harness()
    turn = engine.send(words(0, 20), choices=3, max_tokens=10)
    engine.step(steps)
    assert engine.loop.cancel(turn.state.request_id)
    assert engine.pool.counts().active == 0
    assert not engine.scheduler.has_work
