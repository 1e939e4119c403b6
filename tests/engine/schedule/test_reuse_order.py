"""Requests of one scope that would evict each other's blocks are admitted by what they reuse, and
what requests that run at one time begin with is computed once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.pool import BlockPool
from engine.schedule.reuse_order import (
    MAX_OVERTAKEN,
    MAX_STEPS,
    Waiting,
    next_by_reuse,
)
from tests.engine.schedule.harness import Harness, Sent, occupied, words

BLOCK = 4


def warmed(engine: Harness, start: int, count: int, scope: str = "a") -> list[int]:
    """A prompt whose blocks are in memory, without a reference."""
    prompt = words(start, count)
    engine.done(prompt, scope=scope, max_tokens=1)
    return prompt


def order_of_starts(engine: Harness, *sents: Sent) -> list[int]:
    order: list[int] = []
    for _ in range(500):
        engine.step()
        order += [i for i, turn in enumerate(sents) if turn.started is not None and i not in order]
        if len(order) == len(sents):
            return order
    raise AssertionError("not all began")


@pytest.mark.parametrize(
    ("num_blocks", "scopes", "order"),
    [
        pytest.param(40, "aa", [1, 0], id="it-goes-before-one-that-would-evict-them"),
        pytest.param(100, "aa", [0, 1], id="with-room-for-both-as-they-came"),
        pytest.param(40, "ab", [0, 1], id="another-scope-is-never-passed"),
    ],
)
def test_a_request_whose_blocks_are_there(num_blocks: int, scopes: str, order: list[int]) -> None:
    engine = Harness(num_blocks=num_blocks, max_step_tokens=16)
    warm = warmed(engine, 1000, 100, scope=scopes[1])
    if num_blocks == 100:
        warmed(engine, 3000, 160)  # nothing is empty enough for the cold one
    cold = engine.send(words(5000, 120), scope=scopes[0], max_tokens=1)
    again = engine.send([*warm, 7, 7, 7], scope=scopes[1], max_tokens=1)
    assert order_of_starts(engine, cold, again) == order
    if scopes == "aa":
        assert again.usage.automatic_tokens == 100
    engine.finish(cold, again)
    engine.check_idle()


def test_a_request_that_came_keeps_its_blocks_before_content_that_nobody_asks_for() -> None:
    """It waits, and what is evicted meanwhile is what was used after it last ran."""
    engine = Harness(num_blocks=64, max_step_tokens=16, max_running=1)
    warm = warmed(engine, 1000, 60)
    warmed(engine, 3000, 60)
    warmed(engine, 4000, 60)
    running = occupied(engine, 8)
    waits = engine.send([*warm, 7, 7, 7], scope="a", max_tokens=1)
    second = engine.send([*warm, 8, 8, 8], scope="a", max_tokens=1)
    newer = engine.send(words(5000, 80), scope="a", max_tokens=1)
    engine.finish(running, waits, second, newer)
    for turn in (waits, second):
        assert turn.usage.automatic_tokens == 60


def test_a_cold_request_is_passed_a_bounded_number_of_times() -> None:
    engine = Harness(num_blocks=40, max_step_tokens=16, max_waiting=1000)
    warm = warmed(engine, 1000, 100)
    cold = engine.send(words(5000, 120), scope="a", max_tokens=1)
    passing: list[Sent] = []
    while cold.started is None:
        assert len(passing) < 1000, "the flood kept it out"
        passing.append(engine.send([*warm, len(passing), 7], scope="a", max_tokens=1))
        engine.step()
    ahead = [turn for turn in passing if turn.started is not None]
    assert 0 < len(ahead) <= MAX_OVERTAKEN + 1
    engine.finish(cold, *passing)
    engine.check_idle()


waiting = st.builds(
    Waiting,
    uncached=st.integers(1, 5000),
    num_unreferenced=st.integers(0, 500),
    num_overtaken=st.integers(0, MAX_OVERTAKEN),
    overtaken_tokens=st.integers(0, 20_000),
)


@given(line=st.lists(waiting, min_size=1, max_size=16), step=st.integers(16, 4096))
def test_nobody_is_passed_beyond_its_patience(line: list[Waiting], step: int) -> None:
    chosen = next_by_reuse(line, BlockPool(64, 16), step)
    turn = line[chosen]
    for passed in line[:chosen]:
        assert turn.uncached < passed.uncached
        assert passed.num_overtaken < MAX_OVERTAKEN
        most = max(passed.uncached, MAX_STEPS * step)
        assert passed.overtaken_tokens + turn.uncached <= most


def test_equal_prompts_are_computed_once_however_many_there_are() -> None:
    engine = Harness(max_step_tokens=16)
    sents = [engine.send(words(0, 40), marks={0: "5m"}, seed=i, max_tokens=1) for i in range(5)]
    engine.finish(*sents)
    first, *later = [turn.begun for turn in sents]
    assert (first.miss_reason, first.usage.computed_tokens) == ("cold", 41)
    for late in later:
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
    unrelated = engine.send(words(300, 2))
    engine.step()
    assert len(engine.runner.steps[0]) == 2
    assert unrelated.started is not None and second.started is None
    engine.step(2)
    assert first.started is None
    engine.finish(first, second, unrelated)
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
