"""Cold twins: what requests that run at one time begin with is computed once."""

import pytest

from tests.engine.schedule.harness import Harness, words


def test_equal_prompts_are_computed_once_however_many_there_are() -> None:
    engine = Harness(max_step_tokens=16)
    sents = [engine.send(words(0, 40), marks={0: "5m"}, seed=i, max_tokens=1) for i in range(5)]
    engine.finish(*sents)
    first, *others = [sent.begun for sent in sents]
    assert (first.miss_reason, first.usage.computed_tokens) == ("cold", 41)
    for late in others:
        assert late.miss_reason == "in_progress_race"
        assert (late.usage.cache_read_tokens, late.usage.cache_write_5m_tokens) == (0, 40)
        assert (late.usage.automatic_tokens, late.usage.computed_tokens) == (40, 1)
    computed = sum(len(work.token_ids) for step in engine.runner.steps for work in step)
    assert computed == 41 + 4
    engine.check_idle()


def test_it_waits_for_the_shared_blocks_alone_and_stops_nobody_behind_it() -> None:
    engine = Harness(max_step_tokens=24)
    first = engine.send(words(0, 16), words(100, 200), marks={0: "5m"})
    second = engine.send(words(0, 16), words(500, 2), marks={0: "5m"}, seed=2)
    other = engine.send(words(300, 2))
    engine.step()
    assert len(engine.runner.steps[0]) == 2
    assert other.started is not None and second.started is None
    engine.step(2)
    assert first.started is None
    engine.finish(first, second, other)
    assert second.begun.miss_reason == "in_progress_race"
    assert second.usage.automatic_tokens == 16
    assert first.usage.automatic_tokens == 0


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_when_the_other_is_cancelled_it_goes_ahead_with_what_is_there(steps: int) -> None:
    engine = Harness(max_step_tokens=16)
    first = engine.send(words(0, 60), marks={0: "5m"})
    second = engine.send(words(0, 60), marks={0: "5m"}, seed=2)
    third = engine.send(words(0, 60), marks={0: "5m"}, seed=3)
    engine.step(steps)
    engine.loop.cancel(first.state.request_id)
    engine.finish(second, third)
    assert second.usage.automatic_tokens == min(16 * steps, 60)
    assert third.usage.computed_tokens == 1
    engine.check_idle()
