"""Several choices of one prompt: what they share, when they part, and how they end."""

import pytest

from tests.engine.schedule.harness import Harness, words


@pytest.mark.parametrize("length", range(1, 14))
def test_every_choice_says_what_it_would_say_alone(length: int) -> None:
    engine = Harness()
    for _ in range(2):  # the second time the prompt's blocks are in memory
        sent = engine.done(words(0, length), choices=3, max_tokens=6)
        assert [len(sent.answer(choice)) for choice in range(3)] == [6, 6, 6]
    engine.check_idle()


def test_choices_share_the_prompts_blocks_and_copy_one_tail_each() -> None:
    engine = Harness(block_size=4)
    sent = engine.send(words(0, 9), choices=3, max_tokens=2)
    while sent.started is None:
        engine.step()
    tables = [sequence.table.block_ids for sequence in sent.state.sequences]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert engine.pool.num_copied == 2, "the last one keeps the original"
    assert engine.pool.counts().active == 2 + 3
    engine.finish(sent)


@pytest.mark.parametrize("num_blocks", range(9, 16))
@pytest.mark.parametrize("steps_ahead", range(4))
def test_choices_survive_preemption_at_any_point(num_blocks: int, steps_ahead: int) -> None:
    engine = Harness(num_blocks=num_blocks)
    older = engine.send(words(0, 11), max_tokens=18)
    engine.step(steps_ahead)
    sent = engine.send(words(100, 10), choices=3, max_tokens=5, marks={0: "5m"})
    engine.finish(older, sent, limit=300)
    engine.check_idle()


@pytest.mark.parametrize("steps", range(8))
def test_cancelling_choices_at_any_point_gives_everything_back(steps: int) -> None:
    engine = Harness()
    sent = engine.send(words(0, 20), choices=3, max_tokens=10)
    engine.step(steps)
    assert engine.loop.cancel(sent.state.request_id)
    assert engine.pool.counts().active == 0
    assert not engine.scheduler.has_work
