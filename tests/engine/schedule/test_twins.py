"""Cold twins: what requests that run at one time begin with is computed once."""

import pytest

from engine.protocol import Started
from engine.schedule.request import Twin
from engine.schedule.scheduler import find_twin
from tests.engine.schedule.harness import Harness, Sent, words


def started(sent: Sent) -> Started:
    assert sent.started is not None
    return sent.started


def computed(engine: Harness) -> int:
    return sum(len(work.token_ids) for step in engine.runner.steps for work in step)


def test_equal_prompts_are_computed_once_however_many_there_are() -> None:
    engine = Harness(max_step_tokens=16)
    sents = [engine.send(words(0, 40), marks={0: "5m"}, seed=i, max_tokens=1) for i in range(5)]
    engine.finish(*sents)
    first, *others = [started(sent) for sent in sents]
    assert (first.miss_reason, first.usage.computed_tokens) == ("cold", 41)
    for late in others:
        assert late.miss_reason == "in_progress_race"
        assert (late.usage.cache_read_tokens, late.usage.cache_write_5m_tokens) == (0, 40)
        assert (late.usage.automatic_tokens, late.usage.computed_tokens) == (40, 1)
    assert computed(engine) == 41 + 4
    engine.check_idle()


def test_it_waits_for_the_shared_blocks_and_not_for_the_rest() -> None:
    engine = Harness(max_step_tokens=16)
    first = engine.send(words(0, 16), words(100, 200), marks={0: "5m"})
    second = engine.send(words(0, 16), words(500, 2), marks={0: "5m"}, seed=2)
    engine.step(3)
    assert first.started is None
    engine.finish(first, second)
    assert started(second).miss_reason == "in_progress_race"
    assert started(second).usage.automatic_tokens == 16
    assert started(first).usage.automatic_tokens == 0


def test_another_scope_is_no_twin() -> None:
    engine = Harness(max_step_tokens=64)
    sents = [engine.send(words(0, 20), scope=scope, marks={0: "5m"}) for scope in "ab"]
    engine.step()
    assert len(engine.runner.steps[0]) == 2
    engine.finish(*sents)
    assert [started(sent).miss_reason for sent in sents] == ["cold", "cold"]
    assert [started(sent).usage.automatic_tokens for sent in sents] == [0, 0]


def test_who_waits_for_a_twin_does_not_stop_those_behind_it() -> None:
    engine = Harness(max_step_tokens=24)
    first = engine.send(words(0, 20))
    twin = engine.send(words(0, 20), seed=2)
    other = engine.send(words(300, 2))
    engine.step()
    assert len(engine.runner.steps[0]) == 2
    assert other.started is not None and twin.started is None
    engine.finish(first, twin, other)


@pytest.mark.parametrize("steps", range(5))
def test_when_the_other_is_cancelled_it_goes_ahead_with_what_is_there(steps: int) -> None:
    engine = Harness(max_step_tokens=16)
    first = engine.send(words(0, 60), marks={0: "5m"})
    second = engine.send(words(0, 60), marks={0: "5m"}, seed=2)
    third = engine.send(words(0, 60), marks={0: "5m"}, seed=3)
    engine.step(steps)
    engine.loop.cancel(first.state.request_id)
    engine.finish(second, third)
    assert started(second).usage.automatic_tokens == min(16 * steps, 60)
    assert started(third).usage.computed_tokens == 1
    engine.check_idle()


def test_who_has_read_most_of_it_does_not_wait_for_one_that_began_earlier() -> None:
    engine = Harness(max_step_tokens=16)
    engine.send(words(0, 100))
    engine.step()
    late = engine.send(words(0, 100), seed=2)
    running, found = engine.scheduler.running, late.state.found
    assert found is not None
    assert find_twin(late.state, running, 4) == Twin(running[0], 100)
    found.read = 90
    assert find_twin(late.state, running, 4) is None
